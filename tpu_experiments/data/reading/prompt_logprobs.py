"""vLLM's log-probabilities of prompts as predictions of a teacher.

A line of the file is a JSON object with `prompt_token_ids` and `prompt_logprobs` (a list with null for the first token
and for each other one an object from token id to `{logprob: ...}`), as vLLM's `RequestOutput` has them, or a response
of its server with `choices`. vLLM reports one entry more where the token itself is not among the likeliest.
"""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.rows import Rows
from tpu_experiments.data.teacher import digest_of, documents_of
from tpu_experiments.storage.given_folders import require_answers


class PromptLogprobs:
    """Predictions of a file, found by the tokens of a document; the file is read once for an index."""

    def __init__(self, path: str, *, entries: int, num_ids: int) -> None:
        """Index the lines.

        Raises:
            ConfigError: the file is missing, or a line is none of vLLM's.
        """
        self.path, self.entries, self.num_ids = path, entries, num_ids
        self._file = require_answers(path)
        self._places: dict[bytes, tuple[int, int]] = {}
        start = 0
        with self._file.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    ids, _ = self._read(line, number)
                    self._places[digest_of(ids)] = (start, number)
                start += len(line)

    def require(self, rows: Rows, *, what: str) -> None:
        """Require predictions of every document of the rows.

        Raises:
            ConfigError: some are missing.
        """
        found = [ids_L for _, _, ids_L in documents_of(rows)]
        missing = [ids_L for ids_L in found if digest_of(ids_L) not in self._places]
        if missing:
            raise ConfigError(
                f"task.teacher={self.path}; it lacks {len(missing):,} of {len(found):,} documents of {what}, the first "
                f"of {len(missing[0])} tokens ({', '.join(map(str, missing[0][:6].tolist()))}, ...); write the token "
                "ids of all with task.teacher_requests=FILE, and have vLLM score them."
            )

    def of(self, rows: Rows) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids and log-probabilities of the likeliest next tokens (M, T, E); `require` was called.

        Raises:
            ConfigError: a token has too few.
        """
        shape = (*rows.ids_NT.shape, self.entries)
        ids_MTE, logps_MTE = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        with self._file.open("rb") as file:
            for row, place, ids_L in documents_of(rows):
                start, number = self._places[digest_of(ids_L)]
                file.seek(start)
                _, told = self._read(file.readline(), number)
                for position in range(1, len(ids_L)):
                    column = place.start + position - 1  # what is predicted there is the token behind it
                    own = self._likeliest(told[position], number=number, position=position)
                    ids_MTE[row, column], logps_MTE[row, column] = zip(*own, strict=True)
        return ids_MTE, logps_MTE

    def _read(self, line: bytes, number: int) -> tuple[NDArray[np.int32], list[Any]]:
        try:
            found = json.loads(line)
            found = found["choices"][0] if "choices" in found else found
            numbers, told = found["prompt_token_ids"], found["prompt_logprobs"]
            if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
                raise ValueError("prompt_token_ids is no list of whole numbers")
            if not isinstance(told, list) or len(told) != len(numbers):
                raise ValueError(f"{len(numbers)} tokens and no list of as many predictions")
            ids = np.array(numbers, np.int32)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            raise ConfigError(
                f"task.teacher={self.path}; line {number} has no prompt_token_ids with as many prompt_logprobs "
                f"({type(error).__name__}: {error}); ask vLLM for prompt_logprobs, and its server for return_token_ids."
            ) from error
        return ids, told

    def _likeliest(self, told: Any, *, number: int, position: int) -> list[tuple[int, float]]:
        try:
            pairs = {int(key): float(e["logprob"] if isinstance(e, dict) else e) for key, e in told.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            pairs, why = {}, f" ({type(error).__name__}: {error})"
        else:
            why = ""
        known = [pair for pair in pairs.items() if 0 <= pair[0] < self.num_ids and pair[1] <= 1e-3]
        if len(known) < self.entries:
            raise ConfigError(
                f"task.teacher={self.path}; line {number}, token {position}: {len(known)} log-probabilities of tokens "
                f"of this tokenizer, and objective.top_k={self.entries}{why}; lower it, or ask vLLM for "
                f"prompt_logprobs={self.entries}."
            )
        return sorted(known, key=lambda pair: (-pair[1], pair[0]))[: self.entries]
