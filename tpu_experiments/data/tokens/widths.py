"""Bytes of text per token, so that losses can be reported per byte and compared across tokenizers.

Read from the vocabulary, not by decoding, since a token may be part of a character. Byte-level BPE (GPT-2, Llama 3,
Qwen) writes every byte as one character. SentencePiece (Mistral, Llama 2, Gemma) writes a blank as U+2581 and a byte as
<0xNN>; Mistral prepends a blank that the text does not have. Special tokens have no text.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tpu_experiments.storage.gguf.splits import BLANK

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, eq=False)
class Widths:
    """Bytes of text of each of V tokens."""

    bytes_V: NDArray[np.int32]
    """UTF-8 bytes of the text, as the tokenizer normalises it (Qwen: NFC)."""
    is_opened_V: NDArray[np.bool_]
    """Tokens whose leading blank is prepended by the tokenizer at the start of a text; all False if it prepends
    none."""
    is_added_V: NDArray[np.bool_]
    """Added tokens, after which the tokenizer starts a new text."""

    def of(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the bytes of each token of one document (L,) or of rows (N, T).

        A document inside a row begins after an added token, or with a token that is not predicted.
        """
        starts = np.ones(ids.shape, np.bool_)
        starts[..., 1:] = self.is_added_V[ids[..., :-1]]
        return self.bytes_V[ids] - (self.is_opened_V[ids] & starts)

    def is_text(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return whether each token has text, unlike the end of a document or turn."""
        return self.bytes_V[ids] > 0


def widths_of(tokenizer: PreTrainedTokenizerBase) -> Widths | None:
    """Return the widths of a tokenizer's tokens; None unless it is byte-level or SentencePiece-like."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    width: Callable[[str], int]
    kinds = set(component_types(state["decoder"]))
    sets_prefix = state["pre_tokenizer"] is not None and any(
        step.get("add_prefix_space") for step in _steps(state["pre_tokenizer"])
    )
    if "ByteLevel" in kinds and not sets_prefix:
        width, opens = len, False
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        width, opens = _width_with_blanks, _sets_blank(state)
    else:
        return None
    vocab = tokenizer.get_vocab()
    size = 1 + max(vocab.values())
    bytes_V, is_opened_V, is_added_V = np.zeros(size, np.int32), np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    for token, index in vocab.items():
        bytes_V[index] = width(token)
        is_opened_V[index] = opens and token.startswith(BLANK)
    for added in state["added_tokens"]:
        index = added["id"]
        is_added_V[index], is_opened_V[index] = True, False
        bytes_V[index] = 0 if added["special"] else len(added["content"].replace(BLANK, " ").encode())
    unknown = tokenizer.unk_token_id
    if unknown is not None:
        bytes_V[unknown] = 0
    return Widths(bytes_V, is_opened_V, is_added_V)


def _width_with_blanks(token: str) -> int:
    return 1 if _BYTE.fullmatch(token) else len(token.replace(BLANK, " ").encode())


def _sets_blank(state: dict[str, Any]) -> bool:
    """Return whether the tokenizer prepends a blank to a text."""
    if "Prepend" in component_types(state["normalizer"]):
        return True
    steps = _steps(state["pre_tokenizer"]) if state["pre_tokenizer"] else ()
    return any(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)


def component_types(part: dict[str, Any] | None) -> list[str]:
    """Return the types of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    return [step["type"] for step in _steps(part)] if part else []


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    inner = next((part[name] for name in ("normalizers", "pretokenizers", "decoders") if name in part), None)
    if inner is None:
        yield part
    for step in inner or ():
        yield from _steps(step)
