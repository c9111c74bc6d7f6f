"""What objectives that mask tokens take from the tokenizer."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError, suggest


@dataclass(frozen=True)
class Vocabulary:
    """What masking takes from the tokenizer."""

    mask_id: int
    size: int
    """Random tokens are drawn from the ids below this, as transformers' collator does."""
    special: tuple[tuple[int, int], ...]
    """Special tokens, which are never masked, as ranges (first, last) of ids: two comparisons each."""

    def is_special(self, ids: Any) -> Any:
        """Return whether each id of an array or a tensor is that of a special token."""
        found = ids < 0
        for first, last in self.special:
            found = found | ((ids >= first) & (ids <= last))
        return found


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, *, mask_token: str | None) -> Vocabulary:
    """Return what masking needs from a tokenizer.

    Args:
        mask_token: stands for a masked token where the tokenizer has no mask token of its own.

    Raises:
        ConfigError: there is neither, or the tokenizer does not know `mask_token`.
    """
    mask_id = tokenizer.mask_token_id
    if mask_id is None and mask_token is None:
        raise ConfigError(
            f"objective.mask_token=null; the tokenizer {tokenizer.name_or_path} has no mask token; name one that no "
            "text has by 'objective.mask_token=\"TOKEN\"' (a reserved one), or make a tokenizer that has one: "
            "task=tokenizer."
        )
    if mask_id is None:
        known = tokenizer.get_vocab()
        if mask_token not in known:
            raise ConfigError(
                f"objective.mask_token={mask_token}; the tokenizer {tokenizer.name_or_path} does not know it. "
                f"{suggest(str(mask_token), tokenizer.all_special_tokens)}"
            )
        mask_id = known[mask_token]
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = sorted({int(mask_id), *map(int, tokenizer.all_special_ids), *map(int, added)})
    return Vocabulary(int(mask_id), len(tokenizer), ranges(special))


def ranges(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    """Return sorted numbers as ranges (first, last).

    >>> ranges([0, 1, 2, 7])
    ((0, 2), (7, 7))
    """
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)
