"""Answers by llama.cpp from a GGUF file, through the package `xllamacpp`.

Prompts go to it as token ids of our tokenizer, and answers come back as ids: the chat format is that of the other
weights. It runs in this process, behind a port of this machine that a key of this process protects.
"""

import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import GGUF_TYPES, AnswerTaskConfig, ChoiceConfig
from tpu_experiments.export.generation import Ends
from tpu_experiments.models.passes.generation import Sampling
from tpu_experiments.storage import paths
from tpu_experiments.tasks.generate.origin import form_of

TIMEOUT_SECONDS = 3600.0
"""Longest silence of llama.cpp: it computes a whole prompt before the first token."""
ADAPTER = "adapter"
"""Beginning of the name of a file that holds an adapter alone."""
MAX_SEED = 2**32 - 2
"""Largest seed of llama.cpp; the one above means a random one."""


def gguf_file(task: AnswerTaskConfig) -> str:
    """Return the file to answer with: `task.gguf`, or that of the run's export whose weights lose least.

    Raises:
        ConfigError: there is none on this machine.
    """
    if task.gguf is not None:
        if not Path(task.gguf).is_file():
            raise ConfigError(f"task.gguf={task.gguf}; there is no such file; name a .gguf file.")
        return task.gguf
    assert task.run is not None, "checked with the config"
    folder = form_of(task.run, "gguf")
    if paths.is_remote(folder):
        raise ConfigError(
            f"task.weights=gguf with task.run={task.run}; llama.cpp reads files of this machine; copy one of {folder} "
            "here, and name it with task.gguf=FILE."
        )
    names = [
        name for name in sorted(paths.list_names(folder)) if name.endswith(".gguf") and Path(folder, name).is_file()
    ]
    found = {_type_of(name): name for name in names if not name.startswith(ADAPTER)}
    if not found:
        raise ConfigError(
            f"task.weights=gguf; {folder} has no .gguf file; write the form again, or name one: task.gguf=."
        )
    ranked = [found[kind] for kind in (*GGUF_TYPES, "") if kind in found]
    return paths.join(folder, ranked[0])


def _type_of(name: str) -> str:
    """Return the data type that a file's name ends with; empty if it names none."""
    match = re.search(rf"(?:^|[^a-z0-9])({'|'.join(GGUF_TYPES)})\.gguf$", name.lower())
    return match[1] if match else ""


class LlamaCpp:
    """Generates continuations of prompts one at a time; has the methods of models/passes/generation.py's Decoder.

    Args:
        num_slots: tokens of the longest prompt and its answer.
        num_threads: threads of the processor; None takes llama.cpp's default.
    """

    num_rows = 1
    num_programs = 0

    def __init__(
        self,
        file: str,
        *,
        choice: ChoiceConfig,
        ends: Ends,
        num_slots: int,
        max_new_tokens: int,
        num_threads: int | None,
        seed: int,
    ) -> None:
        """Load the file.

        Raises:
            ConfigError: xllamacpp is not installed, or llama.cpp refuses the file.
        """
        try:
            import xllamacpp  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(
                "task.weights=gguf; xllamacpp is not installed; install the extra: "
                "pip install 'tpu_experiments[export]'."
            ) from error
        self.file, self.choice, self.ends = file, choice, ends
        self.num_slots, self.max_new_tokens, self.seed = num_slots, max_new_tokens, seed
        self.buckets: set[int] = set()
        self._key = secrets.token_hex(16)
        given = xllamacpp.CommonParams()
        given.model.path = file
        given.n_ctx, given.n_parallel, given.fit_params = num_slots, 1, False
        given.verbosity, given.warmup, given.ui = -1, False, False
        given.cache_ram_mib = 0  # prompts of earlier answers are not kept
        given.api_keys = [self._key]
        if num_threads:
            given.cpuparams.n_threads = num_threads
        try:
            self._server = xllamacpp.Server(given)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{file}; llama.cpp cannot load it ({' '.join(str(error).split())}); write it again."
            ) from error

    def stream(
        self,
        prompts: Sequence[list[int]],
        *,
        draws: Sequence[int],
        bucket: int,
        sampling: Sampling | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yield the tokens generated so far for one prompt; arguments as of Decoder.stream.

        Draws are llama.cpp's own, from the seed and the prompt's number.

        Raises:
            ConfigError: llama.cpp refuses the prompt.
        """
        ((ids,), (draw,)) = prompts, draws
        self.buckets.add(bucket)
        request = {"prompt": ids, "n_predict": self.max_new_tokens, "stream": True, "return_tokens": True}
        request |= {"cache_prompt": False, "seed": (self.seed + draw) % MAX_SEED, **self._choice(sampling)}
        written: list[int] = []
        for piece in self._answered(request):
            written += piece.get("tokens", [])
            if piece.get("stop_type") == "eos" and written:
                written[-1] = min(self.ends.ids)  # llama.cpp knows further tokens that end a turn
            yield [list(written)]

    def _choice(self, sampling: Sampling | None) -> dict[str, Any]:
        """Return llama.cpp's names for the choice of tokens, its samplers in the order of transformers'."""
        choice = self.choice
        given = sampling or Sampling(choice.temperature)
        return {
            "samplers": ["penalties", "temperature", "top_k", "top_p"],
            "repeat_penalty": choice.repetition_penalty,
            "repeat_last_n": self.num_slots,
            "temperature": given.temperature if choice.do_sample else 0.0,
            "top_k": choice.top_k,
            "top_p": choice.top_p if given.top_p is None else given.top_p,
        }

    def _answered(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            data=json.dumps(fields).encode(),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches this machine's port
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[len(b"data: ") :])
                    elif line.startswith(b"error: "):
                        raise ConfigError(f"{self.file}; llama.cpp: {line[len(b'error: ') :].decode().strip()}")
        except urllib.error.HTTPError as error:
            told = json.loads(error.read() or b"{}").get("error", {}).get("message", error.reason)
            raise ConfigError(f"{self.file}; llama.cpp refuses the prompt: {told}.") from error
