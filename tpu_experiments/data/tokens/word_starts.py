"""Which tokens of a vocabulary begin a word, as the vocabulary itself marks it.

WordPiece marks the pieces that continue a word (`##`), SentencePiece those behind a blank (U+2581); byte-level BPE has
white space in the token behind it (`Ġ` is a blank, `Ċ` a line break). So WordPiece has punctuation as words of its own,
and the others have it in the word before it.
"""

import json
import re

import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.tokens.widths import component_types
from tpu_experiments.storage.gguf.splits import BLANK

_WHITE_SPACE = " \t\n\v\f\r"
# One character at a time: GPT-2's alphabet maps these bytes to one character each.
_OF_BYTES = tuple(
    ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][0] for character in _WHITE_SPACE
)
_WHITE_BYTE = re.compile("|".join(f"<0x{ord(character):02X}>" for character in _WHITE_SPACE))


def word_starts(tokenizer: PreTrainedTokenizerBase) -> NDArray[np.bool_] | None:
    """Return whether each token (V,) begins a word; None if the vocabulary does not mark it.

    Added tokens begin one. The first token of a text does too, which the vocabulary of most tokenizers does not say.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    prefix = state["model"].get("continuing_subword_prefix")
    types = {*component_types(state["pre_tokenizer"]), *component_types(state["decoder"])}
    vocabulary = tokenizer.get_vocab()
    starts_V = np.zeros(1 + max(vocabulary.values()), np.bool_)
    for token, index in vocabulary.items():
        if prefix:
            starts_V[index] = not token.startswith(prefix)
        elif "ByteLevel" in types:
            starts_V[index] = token.startswith(_OF_BYTES)
        else:
            starts_V[index] = token.startswith((BLANK, *_WHITE_SPACE)) or bool(_WHITE_BYTE.fullmatch(token))
    added = [token["id"] for token in state["added_tokens"]]
    own_V = np.ones(len(starts_V), np.bool_)
    own_V[added] = False
    if not starts_V[own_V].any() or starts_V[own_V].all():
        return None
    starts_V[added] = True
    return starts_V
