"""Rollouts made by a seed, as rows of this project."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLES = 4
MAX_NEW = 9
EOS = 2


@dataclass
class Rollout:
    """Answers of groups of `SAMPLES`; one that does not end with `EOS` was cut off."""

    prompts: list[list[int]]
    answers: list[list[int]]
    rewards_NF: NDArray[np.float64]
    noise_NT: NDArray[np.float32]
    """What the sampler's log-probabilities differ by, at the answers' tokens; one is NaN."""

    @property
    def is_whole(self) -> list[bool]:
        return [answer[-1] == EOS for answer in self.answers]


def made_rollout(seed: int, *, vocab: int, groups: int = 4) -> Rollout:
    """Groups of answers; the first has no spread, the second an answer without a reward, the third but one reward."""
    generator = np.random.Generator(np.random.Philox(key=seed))

    def some(most: int) -> list[int]:
        ids: list[int] = generator.integers(5, vocab, generator.integers(1, most + 1)).tolist()
        return ids

    prompts = [prompt for _ in range(groups) for prompt in [some(6)] * SAMPLES]
    answers = [[*some(MAX_NEW - 1), EOS] if generator.random() < 0.8 else some(MAX_NEW) for _ in prompts]
    answers[-1] = [5] * MAX_NEW
    rewards_NF = generator.normal(size=(len(prompts), 2)).round(1)
    rewards_NF[:SAMPLES] = 1.0
    rewards_NF[2 * SAMPLES + 1 : 3 * SAMPLES] = np.nan
    rewards_NF[SAMPLES] = np.nan
    noise_NT = generator.normal(scale=0.7, size=(len(prompts), MAX_NEW)).astype(np.float32)
    noise_NT[-2, 0] = np.nan
    return Rollout(prompts, answers, rewards_NF, noise_NT)


def rows_of(rollout: Rollout, *, seq_len: int, learns_cut: bool) -> dict[str, Tensor]:
    """The rows (N, T) of the answers, without further arrays."""
    names = ("ids", "learn", "positions", "segments")
    made = {name: torch.zeros(len(rollout.answers), seq_len, dtype=torch.int32) for name in names}
    for row, (prompt, answer, is_whole) in enumerate(
        zip(rollout.prompts, rollout.answers, rollout.is_whole, strict=True)
    ):
        length = len(prompt) + len(answer)
        made["ids"][row, :length] = torch.tensor(prompt + answer, dtype=torch.int32)
        made["learn"][row, len(prompt) : length] = int(is_whole or learns_cut)
        made["positions"][row, :length] = torch.arange(length, dtype=torch.int32)
        made["segments"][row, :length] = 1
    return made


def sampler_logps(rollout: Rollout, old_NT: Tensor) -> Tensor:
    """The sampler's log-probabilities at the answers' tokens, (N, T)."""
    found = old_NT.clone()
    for row, (prompt, answer) in enumerate(zip(rollout.prompts, rollout.answers, strict=True)):
        place = slice(len(prompt), len(prompt) + len(answer))
        found[row, place] += torch.from_numpy(rollout.noise_NT[row, : len(answer)])
    return found
