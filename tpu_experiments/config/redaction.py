"""Redaction of values that look like secrets, in written configs, command lines and log lines.

Shapes of services' keys are those of detect-secrets, and in `OWN_SHAPES` those that it lacks. A value without a shape,
such as 40 hexadecimal digits, which are also a commit, is known by the name before it alone.
"""

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "REDACTED"
SECRET_WORD = re.compile(
    r"secrets?|[a-z]*passwords?|[a-z]*passwd|pwd|passphrase|credentials?|authorization|bearer|cookie"
    r"|sharedaccesssignature"
    r"|(api|access|secret|private)keys?|(auth|access|api|hf|session)tokens?"
)
KEY_OWNER = re.compile(r"api|access|private|secret|account|signing|encryption|ssh|service|deploy|auth")
"""Words before `key` in names of secrets: `api_key` is a secret; `sort_key` and `key` alone are not."""
TOKENS_OWNER = re.compile(r"auth|access|api|refresh|bearer|session|security|hf|hub")
"""Words that make `tokens` secret: `access_tokens` are secrets; `tokens`, `max_new_tokens` and `loss_chunk_tokens` are
counts."""
OF_TEXT = re.compile(
    r"bos|eos|pad|unk|mask|sep|cls|special|added|control|begin|start|end|stop|first|last|next|prev|max|min|num|per|new"
    r"|image|audio|video|boi|eoi|think|tool|turn|text|prompt|blank|id"
)
"""Words of names about text tokens, such as `pad_token` and `max_token_id`, which are not secrets."""
ENVIRONMENT_END = re.compile(r"key|pass|auth|pat")
"""Last words of environment variables that hold secrets, such as `OPENAI_KEY`."""
SIGNED = re.compile(r"signature|sig|key|token|credentials?|auth|code|policy")
"""Words in the names of query parameters of signed and authenticated URLs."""
WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>]+")
USERINFO = re.compile(r"(?<=://)[^/?#]+@")
PARAMETER = re.compile(r"(?<=[?&#;])([^=&#;]+)=([^&#;]*)")
OWN_SHAPES = tuple(
    re.compile(shape, re.DOTALL)
    for shape in (
        # PEM: detect-secrets marks the first line, not the key.
        r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
        # JSON web tokens: detect-secrets leaves the signature.
        r"\beyJ[\w=-]{10,}\.[\w=-]{10,}(?:\.[\w.+/=-]*)?",
        # Headers: detect-secrets reads code. The value ends with its quotes or line.
        r"(?<![\w-])(?i:(?:proxy-)?authorization|(?:set-)?cookie|x-api-key)['\"]?:\s*['\"]?[^\n'\"]+",
        r"\b(?i:bearer|basic)\s+(?=[^\s'\"]*[\d=])[^\s'\",;]{8,}",
        # The Hugging Face Hub and Kaggle: no detector.
        r"\b(?:hf_oauth_[\w.-]{16,}|(?:hf|api_org)_[A-Za-z0-9]{16,}|KGAT_\w{16,})",
        # Google's API keys, client secrets and access tokens: no detector.
        r"\b(?:AIza[\w-]{30,}|GOCSPX-[\w-]{20,}|ya29\.[\w-]{20,})",
        # OpenAI's other keys, Anthropic's, OpenRouter's, DeepSeek's: the detector knows one form of OpenAI's.
        r"\bsk-(?=[\w-]*[A-Z])(?=[\w-]*\d)[\w-]{20,}|\bsk-(?:[0-9a-f]{32,}|(?:ant|or|proj)-[\w-]{16,})",
        # Other services of models: no detector.
        r"\b(?:r8_|gsk_|xai-|pplx-|nvapi-|pcsk_|fw_|wandb_v\d_)(?=\w*\d)[\w-]{20,}|\bdapi[0-9a-f]{32}(?:-\d)?",
        # GitHub's fine-grained tokens, npm's and Docker's: the detectors know older forms.
        r"\b(?:github_pat_\w{20,}|npm_[A-Za-z0-9]{36}|dckr_(?:pat|oat)_[\w-]{20,})",
        # Slack's app and refresh tokens, webhooks of Discord and Teams, Stripe's test keys: likewise.
        r"\b(?:xox[a-z](?:\.xox[a-z])?-[\w-]{10,}|xapp-\d-[\w-]{10,}|[prs]k_(?:live|test)_\w{16,}|whsec_[\w+/=]{16,})",
        r"https://(?:discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/[^\s'\"]+",
        # Infrastructure: Vault, DigitalOcean, Grafana, Atlassian, Terraform, Shopify, Linear, Postman: no detector.
        r"\b(?:hv[sbr]\.[\w-]{20,}|do[por]_v1_[0-9a-f]{32,}|gl(?:sa|c)_[\w+/=]{20,}|ATATT3[\w=-]{20,}"
        r"|\w{14}\.atlasv1\.[\w-]{40,}|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|lin_api_\w{20,}|PMAK-[0-9a-f-]{40,}"
        r"|AGE-SECRET-KEY-1[0-9A-Z]{30,})",
        # Azure's client secrets and signatures outside URLs: the detector knows storage keys.
        r"\b[\w.~-]{3}\dQ~[\w.~-]{31,34}|(?<=[?&;])sig=[\w%+/=-]{20,}",
    )
)
"""Shapes that detect-secrets lacks, with the reason."""
NOT_OURS = {
    "artifactory",  # " APARTAMENTELE " has its passwords' shape
    "basic_auth",  # `USERINFO`: also names without a password
    "high_entropy_strings",  # hashes and seeds of runs
    "ip_public",
    "jwt",  # `OWN_SHAPES`
    "keyword",  # `is_secret_name`: an `eos_token` is none
    "npm",  # takes the whole line
    "private_key",  # `OWN_SHAPES`
}
"""Modules of detect-secrets' plugins that are not used."""
ASSIGNMENT = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>['\"]?\s*(?:=>|[=:])\s*)"
    r"(?:(?P<quote>['\"])(?P<quoted>[^'\"\n]+)|(?P<value>[^\s'\",;&}\]]+))"
)
NO_SECRET = re.compile(r"(?i:none|null|true|false|redacted|[\d.:-]+|\W*)|\$\{.*")
"""Values that are no secrets, whatever their name."""


@functools.cache
def _shapes() -> tuple[re.Pattern[str], ...]:
    """Return the shapes of all secrets.

    They are imported with the first text: `requests`, which detect-secrets imports, takes 0.2 s.
    """
    from detect_secrets import plugins

    detector: Any = importlib.import_module("detect_secrets.plugins.base").RegexBasedDetector
    found: list[re.Pattern[str]] = []
    for module in pkgutil.iter_modules(plugins.__path__):
        if module.name not in NOT_OURS:
            parts: Iterable[Any] = vars(importlib.import_module(f"{plugins.__name__}.{module.name}")).values()
            kinds: list[Any] = [part for part in parts if inspect.isclass(part) and issubclass(part, detector)]
            found += (shape for kind in kinds if kind is not detector for shape in kind.denylist)
    return (*OWN_SHAPES, *found)


def is_secret_name(name: str) -> bool:
    """Return whether a setting or environment variable of this name holds a secret.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "api_key", "tokenizer", "max_tokens", "pad_token", "key")]
    [True, True, False, False, False, False]
    """
    if name in ("PWD", "OLDPWD"):  # the shell's folders
        return False
    words = [word.lower() for word in WORD.findall(name)]
    if any(map(SECRET_WORD.fullmatch, ["".join(words), *words])):
        return True
    for before, word in pairwise(words):
        if word in ("key", "keys") and KEY_OWNER.fullmatch(before):
            return True
        if word == "tokens" and TOKENS_OWNER.fullmatch(before):
            return True
    is_variable = name.isupper() and len(words) > 1
    if is_variable and ENVIRONMENT_END.fullmatch(words[-1]):
        return True
    is_token = words[-1:] == ["token"] or (is_variable and "token" in words)
    return is_token and not any(map(OF_TEXT.fullmatch, words))


def redacted(value: Any, *, name: str = "", is_below_secret: bool = False) -> Any:
    """Return a copy of dicts, lists and plain values with secrets replaced.

    `name` is the possibly dotted name of `value`. All text below a secret's name is replaced, and numbers below a name
    other than a token's. For other text, see `redacted_text`.
    """
    is_secret = is_below_secret or any(is_secret_name(part) for part in name.split("."))
    if isinstance(value, dict):
        return {key: redacted(item, name=str(key), is_below_secret=is_secret) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, name=name, is_below_secret=is_secret) for item in value]
    if is_secret and _can_be_secret(value, name=name):
        return REDACTED
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Return the text without secrets: those of URLs, of known shapes, and those that a secret's name precedes."""
    text = URL.sub(lambda found: _redacted_url(found[0]), text)
    for shape in _shapes():
        text = shape.sub(REDACTED, text)
    kept, at = "", 0
    while found := ASSIGNMENT.search(text, at):
        is_secret = _is_secret_assignment(found)
        kept += text[at : found.end("sign")] + (f"{found['quote'] or ''}{REDACTED}" if is_secret else "")
        at = found.end() if is_secret else found.end("sign")  # in `a=PGPASSWORD=b`, the value is an assignment
    return kept + text[at:]


def _is_secret_assignment(found: re.Match[str]) -> bool:
    """Return whether a secret is assigned; one by a colon, as in prose, needs quotes or a digit."""
    value = found["quoted"] or found["value"]
    if NO_SECRET.fullmatch(value) or not is_secret_name(found["name"].rpartition(".")[2]):
        return False
    is_prose = ":" in found["sign"] and not found["quote"]
    return not is_prose or (len(value) >= 6 and any(map(str.isdigit, value)))


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line of `key=value` words without its secrets."""
    return [_redacted_argument(argument) for argument in arguments]


def _redacted_argument(argument: str) -> str:
    key, equals, value = argument.partition("=")
    named = [*key.split("."), *re.findall(r"([\w.-]+)['\"]?\s*:", value if "{" in value else "")]
    if equals and any(is_secret_name(name) for name in named):
        return f"{key}={REDACTED}"
    return redacted_text(argument)


def _can_be_secret(value: Any, *, name: str) -> bool:
    if isinstance(value, str):
        return bool(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and "token" not in name.rpartition(".")[2].lower()


def _redacted_url(url: str) -> str:
    def parameter(found: re.Match[str]) -> str:
        is_signed = any(SIGNED.fullmatch(word.lower()) for word in WORD.findall(found[1]))
        is_secret = is_signed or is_secret_name(found[1])
        return f"{found[1]}={REDACTED}" if is_secret and found[2] else found[0]

    return PARAMETER.sub(parameter, USERINFO.sub(f"{REDACTED}@", url))
