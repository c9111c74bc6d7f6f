"""Answers of an iteration with their rewards, written before the model learns from them.

<folder>/000007.safetensors   one for each iteration, with its own checksum in the header

A run that was killed learns from what it finds here: neither sampler nor rewards are asked again. Legend: N answers
(rows), T tokens of a row, F rewards.
"""

import hashlib
import json
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tpu_experiments.data.rows import Rows
from tpu_experiments.storage import paths, tensors
from tpu_experiments.storage.sealed import SEAL, UNSEALED, DamagedFile, require_seal, sealed

FILE = re.compile(r"(\d{6,})\.safetensors")
ADVICE = "remove it and those after it, and the run samples them again."


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
    rollbacks: int = 0
    """How often the run had gone back before; one that is killed behind a rollback may go that way once more."""
    sha256: str = ""
    """Of the file that it was read from; empty before it is written."""

    def answer_ids(self, row: int) -> list[int]:
        """Return the tokens of an answer, its end mark included."""
        ids: list[int] = self.ids_NT[row, self.prompt_lengths_N[row] : self.lengths_N[row]].tolist()
        return ids

    def learnt(self, *, masks_cut: bool) -> NDArray[np.bool_]:
        """Return the mask (N, T) of the answers' tokens; without those that were cut off, where they are not learnt."""
        column_T = np.arange(self.ids_NT.shape[1], dtype=np.int32)
        learn_NT = (column_T >= self.prompt_lengths_N[:, None]) & (column_T < self.lengths_N[:, None])
        return learn_NT & ~self.is_cut_N[:, None] if masks_cut else learn_NT

    def rows(self, *, masks_cut: bool, pad_id: int) -> Rows:
        """Return the rows to learn from, (N, T), with the arrays that a policy objective declares.

        Where a rollout has no log-probabilities of a kind, those of the rows are 0.
        """
        column_T = np.arange(self.ids_NT.shape[1], dtype=np.int32)
        tokens_NT = column_T < self.lengths_N[:, None]
        learn_NT = self.learnt(masks_cut=masks_cut)
        more = {
            "advantage": self.advantage_N,
            "divisor": self.divisor_N,
            **{
                name: np.zeros(learn_NT.shape, np.float32) if values_NT is None else np.where(learn_NT, values_NT, 0)
                for name, values_NT in (
                    ("old_logps", self.old_logps_NT),
                    ("sampler_logps", self.sampler_logps_NT),
                    ("start_logps", self.start_logps_NT),
                )
            },
        }
        return Rows(
            np.where(tokens_NT, self.ids_NT, np.int32(pad_id)),
            learn_NT,
            np.where(tokens_NT, column_T, np.int32(0)),
            tokens_NT.astype(np.int32),
            more,
        )


ARRAYS = tuple(field.name for field in fields(Rollout) if field.name.endswith(("_N", "_NT", "_NF")))
FACTS = ("iteration", "version", "reward_names", "rollbacks")


class RolloutStore:
    """Rollouts of a run in one folder, local or in a bucket."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, iteration: int) -> str:
        """Return the path of the file of an iteration."""
        return paths.join(self.folder, f"{iteration:06d}.safetensors")

    def write(self, rollout: Rollout) -> str:
        """Write a rollout atomically, and return the SHA-256 of its file; the same values yield the same bytes."""
        arrays = {name: getattr(rollout, name) for name in ARRAYS if getattr(rollout, name) is not None}
        held = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        given = {name: getattr(rollout, name) for name in FACTS if name != "rollbacks" or rollout.rollbacks}
        facts = json.dumps(given)
        content = sealed(b"".join(tensors.chunks_of(held, metadata={SEAL: UNSEALED, "facts": facts})))
        paths.make_dirs(self.folder)
        paths.write_bytes_atomic(self.path(rollout.iteration), content)
        return hashlib.sha256(content).hexdigest()

    def read(self, iteration: int, *, sha256: str | None = None) -> Rollout | None:
        """Return the rollout of an iteration; None where there is none.

        Args:
            sha256: digest that its file must have, as a checkpoint says.

        Raises:
            DamagedFile: the file is damaged, belongs to another iteration, or is another than `sha256` says.
        """
        content = self._content(iteration)
        if content is None:
            return None
        path = self.path(iteration)
        try:
            require_seal(content, path=path)
        except DamagedFile as error:
            raise DamagedFile(f"{str(error).rstrip('.')}; {ADVICE}") from error
        found = hashlib.sha256(content).hexdigest()
        if sha256 is not None and found != sha256:
            raise DamagedFile(
                f"{path}; its sha256 is {found}, and the checkpoint was trained on {sha256}: another run wrote it; "
                "copy the run's own file back, or start anew under another name=."
            )
        rollout = replace(_rollout_of(content, path=path), sha256=found)
        if rollout.iteration != iteration:
            raise DamagedFile(f"{path}; it is the file of iteration {rollout.iteration}; {ADVICE}")
        return rollout

    def iterations(self) -> list[int]:
        """Return the iterations that have a file, in order."""
        found = (FILE.fullmatch(name) for name in paths.list_names(self.folder))
        return sorted(int(match[1]) for match in found if match)

    def remove_after(self, iteration: int) -> None:
        """Remove the rollouts of all iterations after this one, the last first; -1 removes all."""
        for number in reversed(self.iterations()):
            if number > iteration:
                paths.remove_tree(self.path(number))

    def _content(self, iteration: int) -> bytes | None:
        try:
            return paths.read_bytes(self.path(iteration))
        except FileNotFoundError:
            return None


def _rollout_of(content: bytes, *, path: str) -> Rollout:
    """Return the rollout in a file whose seal holds.

    Raises:
        DamagedFile: it is none of this version's.
    """
    try:
        size = tensors.header_length(content[:8], num_bytes=len(content))
        facts: dict[str, Any] = json.loads(tensors.metadata_in(content[8 : 8 + size])["facts"])
        facts["reward_names"] = tuple(facts["reward_names"])
        facts |= {name: tensor.numpy() for name, tensor in tensors.tensors_in(bytearray(content)).items()}
        return Rollout(**facts)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"{path}; it is no rollout of this version ({error}); {ADVICE}") from error
