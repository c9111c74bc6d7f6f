"""Loading of a run's tokenizer, from a local folder or the Hub; never imports torch_xla."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.regular_files import MOST_BYTES, read_regular, require_regular, require_regular_folder
from tpu_experiments.config.remote_code import require_no_code
from tpu_experiments.data.tokens.sandbox import CHAT_FORMATS, TemplateLimit, rendered
from tpu_experiments.data.tokens.words import backend_of
from tpu_experiments.storage.gguf.files import is_gguf
from tpu_experiments.storage.gguf.opening import opened
from tpu_experiments.storage.given_folders import require_template, require_tokenizer_folder
from tpu_experiments.storage.paths import find_local

_CHATML, _HEADERS = ("<|im_start|>", "<|im_end|>"), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MARKS_OF_FORMAT = {
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "llama3": _HEADERS,
    "llama3_1": _HEADERS,
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "mistral_v3": ("[INST]", "[/INST]"),
    "mistral_tekken": ("[INST]", "[/INST]"),
}
"""Tokens around turns in the formats of families; a tokenizer that lacks one is refused with them."""
HARD_LINES = (
    "Știință și tehnică: „țară”, «înțeles», ăâîșț ĂÂÎȘȚ; s\u0326i a\u0306sta",
    "  Two blanks,   three,    four \t tabs\t\tand an end  ",
    " one blank before",
    "In 2024 1,234,567.89 lei, 3.14159 and 1000000",
    "first\n\nsecond;\n\nthird).\r\n  fourth\n",
    "日本語のテキスト、中文文本、한국어 텍스트",
    "🚀 👩\u200d👩\u200d👧 naïve café — ½ ≠ ⅓ …",
    "    if x == 3.14159:\treturn [1, 22, 333]  # it's they'll O'Reilly'Sons",
    "https://example.org/a_b?c=d&e=%20f#g",
)
"""Lines that hold what tokenizers differ in; two that split them alike count as equal."""
AS_WRITTEN = "TokenizersBackend"
"""transformers' class that takes a tokenizer.json as it is; other classes build parts of it by rules of their own."""
GENERIC = (AS_WRITTEN, "PreTrainedTokenizerFast")
"""Its names in tokenizer_config.json, by transformers 5 and 4."""

log = logging.getLogger(__name__)


def load_tokenizer(
    path: str,
    *,
    revision: str | None,
    chat_template_path: str | None,
    chat_format: str = "tokenizer",
    remote_code: str = "refuse",
    key: str = "model.tokenizer_path",
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or Hub id, with the chat template of a file or named format if set.

    Args:
        remote_code: `model.remote_code`, the policy for a tokenizer with Python code of its own.
        key: config key that `path` was read from, for messages.

    Raises:
        ConfigError: there is no tokenizer, or one without character offsets, no such template file, both a file
            and a named format, a format that needs an EOS which the tokenizer lacks, or code that is refused.
    """
    if chat_template_path is not None and chat_format != "tokenizer":
        raise ConfigError(
            f"model.chat_template_path={chat_template_path} with model.chat_format={chat_format}; each names a chat "
            "template; leave one of them out."
        )
    tokenizer = _read_tokenizer(path, revision=revision, remote_code=remote_code, key=key)
    if chat_template_path is not None:
        tokenizer.chat_template = _read_template(chat_template_path)
        _try_template(tokenizer, place=f"model.chat_template_path={chat_template_path}; it")
    elif chat_format != "tokenizer":
        tokenizer.chat_template = _format_template(chat_format, tokenizer=tokenizer)
    elif tokenizer.chat_template:
        _try_template(tokenizer, place=f"{key}={path}; its chat template")
    return tokenizer


def _read_tokenizer(path: str, *, revision: str | None, remote_code: str, key: str) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a folder or Hub id; arguments and errors are those of `load_tokenizer`."""
    local = find_local(path)
    if local is not None and is_gguf(local):
        local, revision = opened(local, revision=revision), None
    if local is None:
        require_tokenizer_folder(path, key=key)
    elif local.is_dir():
        require_regular_folder(local, key=f"{key}={path}")
    else:
        require_regular(local, key=f"{key}={path}")
    from transformers import AutoTokenizer  # imports torch (4 s), which the workers of a preparation do without
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        values = get_tokenizer_config(str(local or path), revision=revision)
        require_no_code(values, source=f"{key}={path}", remote_code=remote_code)
        tokenizer = AutoTokenizer.from_pretrained(
            str(local or path), revision=revision, trust_remote_code=remote_code == "run"
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers and the Hub client raise a dozen unrelated types
        where = "this folder holds no tokenizer" if local else "the Hub gave no tokenizer"
        raise ConfigError(
            f"{key}={path}; {where} ({_first_line(error)}); point "
            f"{key}= at a folder with tokenizer.json and tokenizer_config.json."
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{key}={path}; {type(tokenizer).__name__} gives no character offsets, "
            "which the chat masks need; use a tokenizer with a tokenizer.json."
        )
    return _as_meant(tokenizer, str(local or path), values=values, revision=revision, key=f"{key}={path}")


def _as_meant(
    tokenizer: PreTrainedTokenizerBase, place: str, *, values: dict[str, Any], revision: str | None, key: str
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the owner of a folder means where AutoTokenizer splits otherwise than its file.

    transformers 5 builds a tokenizer by the rules of a class, where transformers 4 and what trained most checkpoints
    take tokenizer.json as it is. The class is what tokenizer_config.json names, or, for some model types in the
    config.json beside it (qwen2), transformers' own in its place. A class that the folder names, or leaves to the
    model type, is kept: everybody who loads the folder gets it. One that is put in the place of the named one is not.

    Args:
        tokenizer: AutoTokenizer's.
        values: of tokenizer_config.json.
    """
    taken = type(tokenizer).__name__
    if taken == AS_WRITTEN or not type(tokenizer).__module__.startswith("transformers."):
        return tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.hub import cached_file

    file = cached_file(place, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return tokenizer
    plain = Tokenizer.from_file(file)
    plain.no_truncation()
    plain.no_padding()
    line = first_apart(backend_of(tokenizer), plain, HARD_LINES)
    if line is None:
        return tokenizer
    named = values.get("tokenizer_class")
    if named is None or str(named).removesuffix("Fast") == taken.removesuffix("Fast"):
        log.warning(
            "%s; its tokenizer.json splits %r otherwise than transformers' %s, which reads the folder and is what is "
            "used here; programs that take the file as it is get other tokens.",
            key,
            line,
            taken,
        )
        return tokenizer
    log.warning(
        "%s; its tokenizer_config.json names %s, and transformers reads it as %s, which splits %r otherwise than "
        "tokenizer.json; the file is taken as it is.",
        key,
        named or "no class",
        taken,
        line,
    )
    own: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        place, revision=revision, trust_remote_code=False
    )
    return own


def first_apart(one: Tokenizer, other: Tokenizer, lines: Iterable[str], *, whole: bool = False) -> str | None:
    """Return the first line that two tokenizers split into other tokens; None where they split all alike.

    Args:
        whole: compare also what they put around a text.
    """
    for line in lines:
        for adds in (False, True)[: 1 + whole]:
            if one.encode(line, add_special_tokens=adds).ids != other.encode(line, add_special_tokens=adds).ids:
                return line
    return None


def text_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, str | None]:
    """Return the special tokens that begin and end a text: BOS and EOS; [CLS] and [SEP] for one that is unset."""
    return tokenizer.bos_token or tokenizer.cls_token, tokenizer.eos_token or tokenizer.sep_token


def text_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """Return the ids of `text_ends`."""
    begin, end = text_ends(tokenizer)
    ids = (None if token is None else tokenizer.convert_tokens_to_ids(token) for token in (begin, end))
    return next(ids), next(ids)


def own_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the special tokens that `tokenizer(text)` puts before and behind a text."""
    backend = backend_of(tokenizer)
    whole, plain = (list(backend.encode("a", add_special_tokens=adds).ids) for adds in (True, False))
    start = next(i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Add special tokens that the tokenizer lacks, in this order, behind its own."""
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)


def closing_texts(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Make `tokenizer(text)` begin and end with `text_ends`, where it adds nothing by itself and has them.

    A classifier reads texts as `tokenizer(text)` gives them, and reads its first token; it is exported with this
    tokenizer.
    """
    if any(own_ends(tokenizer)):
        return tokenizer
    backend = backend_of(tokenizer)
    names = text_ends(tokenizer)
    begin, end = (f"{name} " if name else "" for name in names)
    known = [(name, backend.token_to_id(name)) for name in dict.fromkeys(names) if name]
    if known:
        from tokenizers.processors import TemplateProcessing

        single = f"{begin}$A {end}".strip()
        backend.post_processor = TemplateProcessing(
            single=single, pair=f"{single} $B:1 {end}".strip(), special_tokens=known
        )
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerBase, *, source: str) -> None:
    """Raise if the tokenizer cannot render the conversations of `source`.

    Raises:
        ConfigError: it has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.{source}.kind=chat; the tokenizer {tokenizer.name_or_path} has no chat template; "
            "set model.chat_format=chatml (or another format), model.chat_template_path=FILE, or use a text source."
        )


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that pads rows: padding, else end of sequence, else 0; it is never attended to."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits that change if any text could get other ids; excludes the chat template."""
    backend = tokenizer.backend_tokenizer
    # Reset the options of the last call, which would be part of the JSON.
    backend.no_truncation()
    backend.no_padding()
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokenizer.special_tokens_map.items()}
    return _digest(backend.to_str() + json.dumps(ids, sort_keys=True))


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits of the chat template's SHA-256, or `none`."""
    template = tokenizer.chat_template
    if not template:
        return "none"
    return _digest(template if isinstance(template, str) else json.dumps(template, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _format_template(chat_format: str, *, tokenizer: PreTrainedTokenizerBase) -> str:
    has_markers = {"<|im_start|>", "<|im_end|>"} <= set(tokenizer.get_added_vocab())
    name = "chatml_as_text" if chat_format == "chatml" and not has_markers else chat_format
    template = (CHAT_FORMATS / f"{name}.jinja").read_text(encoding="utf-8")
    lacking = [mark for mark in MARKS_OF_FORMAT.get(chat_format, ()) if mark not in tokenizer.get_added_vocab()]
    if lacking:
        raise ConfigError(
            f"model.chat_format={chat_format}; the tokenizer {tokenizer.name_or_path} has no token {lacking[0]}, which "
            "closes or opens turns in this format and would be spelt out in letters; use model.chat_format=chatml, or "
            "a tokenizer of that family."
        )
    if "eos_token" in template and tokenizer.eos_token is None:
        raise ConfigError(
            f"model.chat_format={chat_format}; answers end with EOS in this format, and the tokenizer "
            f"{tokenizer.name_or_path} has none; set model.chat_template_path=FILE to one with an end of its own."
        )
    return template


def _try_template(tokenizer: PreTrainedTokenizerBase, *, place: str) -> None:
    """Render a small conversation, so that an endless template is reported with its config key.

    Raises:
        ConfigError: it exceeds the limits of the sandbox.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
        template = tokenizer.get_chat_template()
        rendered(template, messages=turns, add_generation_prompt=False, more=tokenizer.special_tokens_map)
    except (TemplateError, ValueError):  # it may refuse these turns; ValueError: several templates, none the default
        return
    except TemplateLimit as error:
        raise ConfigError(
            f"{place} {error}, which no chat needs; read it, or take another with model.chat_template_path=FILE or "
            "model.chat_format=chatml."
        ) from error


def _read_template(path: str) -> str:
    try:
        local = require_template(path)
        return read_regular(local, most=MOST_BYTES[".jinja"], key=f"model.chat_template_path={path}").decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"model.chat_template_path={path}; it is not UTF-8; name a Jinja file.") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
