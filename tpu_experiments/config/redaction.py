"""Redaction of values that look like secrets, in written configs, command lines and log lines."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

REDACTED = "REDACTED"
SECRET_WORD = re.compile(
    r"secrets?|passwords?|passwd|pwd|passphrase|credentials?|authorization|bearer|cookie"
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
TOKEN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
"""Tokens of the Hugging Face Hub, GitHub, GitLab, OpenAI, AWS, Google and Slack, JSON web tokens, and PEM keys."""


def is_secret_name(name: str) -> bool:
    """Return whether a setting or environment variable of this name holds a secret.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "api_key", "tokenizer", "max_tokens", "pad_token", "key")]
    [True, True, False, False, False, False]
    """
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
    """Return the text without secrets: user names and signed parameters of URLs, known services' tokens."""
    return TOKEN_SHAPES.sub(REDACTED, URL.sub(lambda found: _redacted_url(found[0]), text))


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
