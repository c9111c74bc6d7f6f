"""Answers of an iteration with their rewards, written before the model learns from them.

Legend: N answers (rows), P prompts, T tokens of a row, F rewards.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.rows import Rows


@dataclass(frozen=True, eq=False)
class Rollout:
    """The answers of an iteration; those of a prompt are adjacent.

    A row is a prompt and its answer from column 0 on. Token arrays have a value at the token itself, 0 elsewhere.
    """

    iteration: int
    version: int
    """Optimizer steps of the parameters that wrote the answers."""
    ids_NT: NDArray[np.int32]
    lengths_N: NDArray[np.int32]
    """Tokens of prompt and answer."""
    prompt_lengths_N: NDArray[np.int32]
    is_cut_N: NDArray[np.bool_]
    """Whether the answer has no end mark."""
    sampler_logps_NT: NDArray[np.float32]
    """By what drew the tokens; NaN where it did not say."""
    advantage_N: NDArray[np.float32]
    divisor_N: NDArray[np.float32]
    """objectives/policy.py: `divisors`."""
    rewards_NF: NDArray[np.float64]
    """NaN where there is none."""
    reward_names: tuple[str, ...]
    prompt_index_N: NDArray[np.int32]
    """Position of the prompt among those to train on."""
    old_logps_NT: NDArray[np.float32] | None = None
    """By the model when the iteration began; None where the loss does not read them."""
    start_logps_NT: NDArray[np.float32] | None = None
    """By the model as the run started; None where the loss does not read them."""

    def rows(self, *, masks_cut: bool, pad_id: int) -> Rows:
        """Return the rows to learn from, (N, T), with the arrays that a policy objective declares."""
        raise NotImplementedError


class RolloutStore:
    """Rollouts of a run in one folder, local or in a bucket, one file for each iteration."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def write(self, rollout: Rollout) -> str:
        """Write a rollout atomically, and return the SHA-256 of its file; the same values yield the same bytes."""
        raise NotImplementedError

    def read(self, iteration: int, *, sha256: str | None = None) -> Rollout | None:
        """Return the rollout of an iteration; None where there is none.

        Args:
            sha256: digest that its file must have, as a checkpoint says.

        Raises:
            DamagedFile: the file is damaged, or is another than `sha256` says.
        """
        raise NotImplementedError

    def sha256_of(self, iteration: int) -> str | None:
        """Return the SHA-256 of the file of an iteration; None where there is none."""
        raise NotImplementedError

    def remove_after(self, iteration: int) -> None:
        """Remove the rollouts of all iterations after this one; -1 removes all."""
        raise NotImplementedError
