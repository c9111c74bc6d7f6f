"""Answers by a server beside the training that speaks vLLM's protocol (`rollout=vllm`).

Prompts and answers are token ids in both directions: no text is tokenised again. The adapter of every version is
written in PEFT's layout and loaded by the server under a name of its own, since vLLM finds cached keys and values of a
prefix by the adapter's name: under one name they would outlive their adapter. What a server answers is checked: the
model's name and with it the version, the prompt's ids, the answer's ids, its end and, once, its text. Log-probabilities
are those of the distribution that tokens were drawn from; NaN where the server gave none.

    GET  /v1/models                 the base, its longest text, adapters that an earlier life of the run left
    POST /v1/load_lora_adapter      {lora_name, lora_path}; only with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    POST /v1/unload_lora_adapter    {lora_name}
    POST /v1/completions            a prompt, `n` answers

Legend: B answers, N tokens of the longest that is allowed.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import numpy as np
import torch
from torch import Tensor

from tpu_experiments.checkpoint.errors import TrainingStopped, on_rank_zero
from tpu_experiments.checkpoint.state import are_sharded_over_hosts, to_host
from tpu_experiments.config.errors import ConfigError, one_line, suggest
from tpu_experiments.config.rollout_schema import RolloutConfig
from tpu_experiments.models.passes.generation import Completions
from tpu_experiments.storage import paths
from tpu_experiments.storage.tensors import chunks_of, tensors_in

if TYPE_CHECKING:
    from tpu_experiments.training.trainer import Trainer

log = logging.getLogger(__name__)
KEY = "rollout.url"
API_KEY = "VLLM_API_KEY"
"""Environment variable with the server's key, by vLLM's own name."""
TRIES = 4
"""Attempts at a request whose answer the server completes, but wrongly."""
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0
"""Pause before the second attempt, doubled before each further one up to the second number."""
POLL_SECONDS = 0.2
UNREACHED = frozenset({408, 425, 429, 502, 503, 504})
"""HTTP statuses of a server that is busy, or not there yet."""
LEAST = -9999.0
"""What vLLM writes for minus infinity."""
ALIKE = 1e-3
"""Differences of log-probabilities below it do not tell two of vLLM's `--logprobs-mode` apart."""
START_IT = (
    "start it with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve <base> --enable-lora --max-lora-rank <lora.r or more>"
    " --logprobs-mode processed_logprobs`"
)
Result = TypeVar("Result")


class _Again(Exception):
    """The server could not be reached or is busy: the request is repeated until the time is up."""


class _Wrong(Exception):
    """An answer that cannot be used: the request is repeated a few times."""


class _Unloaded(_Wrong):
    """The server does not know the adapter, as after its restart."""


class _Refused(Exception):
    """The server does not accept the request: it is not repeated."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.text = status, text


@dataclass(frozen=True)
class _Adapter:
    """A version of the trained parameters, as the server knows it."""

    name: str
    folder: str
    version: int


@dataclass(frozen=True)
class _Group:
    """Answers to a prompt that are asked for together."""

    num: int
    prompt: list[int]
    seed: int
    temperature: float


@dataclass(frozen=True)
class _Answer:
    ids: list[int]
    log_probs: list[float]
    is_alike: bool | None
    """Whether the server read the ids as the tokenizer does; None where they have no text."""
    text: str


class OutsideSampler:
    """Answers to prompts by a server that has loaded the current adapter.

    Only the process that writes the run's files has one; `start` comes first, then `prepare` before the answers of each
    version.

    Args:
        rollout: its `url`, `model`, `max_new_tokens`, `temperature`, `max_lag` and `max_seconds`.
        base: the model's name where `rollout.model` is null.
        name: begins the adapters' names; of this run alone.
        folder: the adapters' folder, which the server must see under the same path.
        num_tokens: the longest row, prompt and answer.
        seed: of the run; with a number of `draws` it seeds an answer.
        ends: ids that end an answer, which they are part of.
        vocab_size: ids are below it.
        decode: the tokenizer's text of ids, end marks included.
        write: writes the adapter of parameters into a folder, and returns the SHA-256 of its files.
        watch: called while answers are awaited; what it raises ends them.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        *,
        base: str,
        name: str,
        folder: str,
        num_tokens: int,
        seed: int,
        ends: Collection[int],
        vocab_size: int,
        decode: Callable[[list[int]], str],
        write: Callable[[str, Mapping[str, Tensor]], Mapping[str, str]],
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.rollout, self.base, self.name = rollout, rollout.model or base, name
        self.folder, self.num_tokens, self.vocab_size = paths.absolute(folder), num_tokens, vocab_size
        self.seed = seed
        self.ends, self.decode, self.write, self.watch = frozenset(ends), decode, write, watch
        self.url = (rollout.url or "").rstrip("/").removesuffix("/v1")
        self.counts: Counter[str] = Counter()
        """Requests `repeated`, answers that were `stale` or `wrong`, tokens with `no_logp`; since the start."""
        self.lag = 0
        """Versions that the oldest of the last answers is behind."""
        self._loaded: dict[str, _Adapter] = {}
        self._current: _Adapter | None = None
        self._asks_for_seeds = True
        self._has_one_tokenizer = self._has_one_temperature = False
        self._deadline = math.inf
        self._last_error = ""

    # ---- the three things that a run does ------------------------------------------------------------------------

    def start(self) -> None:
        """Require a server with the base, and unload adapters that an earlier life of this run left there.

        Raises:
            ConfigError: there is none, it has another model, or its texts are too short.
        """
        if paths.is_remote(self.folder):
            raise ConfigError(
                f"rollout.adapter_folder={self.folder}; the server reads adapters from a folder of its machine; name "
                "one that it has in common with this machine."
            )
        try:
            models = self._run(lambda http: self._get(http, "/v1/models"))
        except (_Again, _Wrong) as error:
            raise ConfigError(f"{self._place}; no server answers there ({error}); {START_IT} first.") from error
        except _Refused as error:
            key = f"; it wants the key in the environment variable {API_KEY}" if error.status in (401, 403) else ""
            raise ConfigError(f"{self._place}; GET /v1/models gives {error}{key}.") from error
        found = {str(model.get("id")): model for model in models.get("data", [])}
        if self.base not in found:
            bases = [name for name, model in found.items() if model.get("parent") is None]
            raise ConfigError(
                f"rollout.model={self.base}; the server at {self.url} has no such model; {suggest(self.base, bases)}"
            )
        longest = found[self.base].get("max_model_len")
        if isinstance(longest, int) and longest < self.num_tokens:
            raise ConfigError(
                f"{self._place}; its texts have at most {longest:,} tokens, rows have {self.num_tokens:,}; start it "
                f"with --max-model-len {self.num_tokens}, or shorten rollout.max_new_tokens."
            )
        left = [name for name in found if name.startswith(f"{self.name}-v")]
        self._run(lambda http: self._unload(http, left))

    def prepare(self, parameters: Mapping[str, Tensor], version: int) -> None:
        """Write the adapter and let the server load it; those that are too old for an answer are unloaded.

        Args:
            version: grows with the optimizer steps.

        Raises:
            TrainingStopped: the server does not load it.
        """
        folder = paths.join(self.folder, f"v{version}")
        digests = "".join(digest for _, digest in sorted(self.write(folder, parameters).items()))
        adapter = _Adapter(f"{self.name}-v{version}-{digests[:8]}", folder, version)
        if adapter == self._current:
            return
        before = sorted(each.version for each in self._loaded.values() if each.version < version)
        kept = before[max(0, len(before) - self.rollout.max_lag) :]
        old = [each for each in self._loaded.values() if each.version not in kept and each != adapter]
        # First unloaded, then loaded: the server needs max_lag + 1 places, not one more.
        self._finish(lambda http: self._unload(http, [each.name for each in old]), what="unloads an adapter")
        for each in old:
            del self._loaded[each.name]
            if each.folder != folder:
                paths.remove_tree(each.folder)
        self._current = adapter
        self._finish(self._load, what=f"loads the adapter {adapter.name}")

    def sample(
        self, prompts: Sequence[list[int]], *, draws: Sequence[int], iteration: int, temperature: float | None = None
    ) -> Completions:
        """Return an answer to every prompt.

        Neighbours with the same prompt are asked for together, by the first one's number of `draws`; vLLM seeds the
        i-th of them with that seed plus i. With its seed a server may answer alike, which nothing relies on.

        Args:
            temperature: in the place of the setting's; 0 takes the likeliest tokens.

        Raises:
            TrainingStopped: not all prompts have answers in time, or the server is wrong for this run.
        """
        assert self._current is not None, "prepare comes first"
        self.lag, counts = 0, self.counts.copy()
        heat = self.rollout.temperature if temperature is None else temperature
        groups = []
        # vLLM gives one likeliest answer a request.
        for _, rows in itertools.groupby(range(len(prompts)), key=lambda row: tuple(prompts[row]) if heat else row):
            first, *more = rows
            seed = _seed(self.seed, draws[first])
            groups.append(_Group(1 + len(more), list(prompts[first]), seed, heat))
        what = f"answers the {len(groups)} prompts of iteration {iteration}"
        answers = self._finish(lambda http: self._answers(http, groups), what=what)
        num = self.rollout.max_new_tokens
        ids_BN = np.zeros((len(prompts), num), np.int32)
        log_probs_BN = np.zeros((len(prompts), num), np.float32)
        for row, answer in enumerate(answers):
            ids_BN[row, : len(answer.ids)] = answer.ids
            log_probs_BN[row, : len(answer.ids)] = answer.log_probs
        if unknown := int(np.isnan(log_probs_BN).sum()):
            self.counts["no_logp"] += unknown
        self._require_one_tokenizer(answers)
        if self.lag or self.counts != counts:
            told = ", ".join(f"{name} {num:,}" for name, num in (self.counts - counts).items())
            log.info("%s; iteration %d: oldest answer %d versions behind; %s", self._place, iteration, self.lag, told)
        return Completions(ids_BN, log_probs_BN, np.array([len(answer.ids) for answer in answers]))

    def close(self) -> None:
        """Unload this run's adapters and remove their folders; a server that is gone has none."""
        try:
            self._run(lambda http: self._unload(http, list(self._loaded)))
        except (_Again, _Wrong, _Refused) as error:
            log.info("%s; adapters of this run may be left there (%s)", self._place, error)
        for adapter in self._loaded.values():
            paths.remove_tree(adapter.folder)
        self._loaded, self._current = {}, None

    # ---- answers -------------------------------------------------------------------------------------------------

    async def _answers(self, http: aiohttp.ClientSession, groups: Sequence[_Group]) -> list[_Answer]:
        if groups[0].temperature not in (0, 1) and not self._has_one_temperature:
            await self._require_own_temperature(http, groups[0])
        found = await _together([self._answers_of(http, group) for group in groups], watch=self.watch)
        return [answer for answers in found for answer in answers]

    async def _answers_of(self, http: aiohttp.ClientSession, group: _Group) -> list[_Answer]:
        async def once() -> list[_Answer]:
            return self._read(await self._complete(http, group), group)

        return await self._repeated(http, once)

    async def _complete(self, http: aiohttp.ClientSession, group: _Group, **more: Any) -> Any:
        """Return the server's answer to a group's request, as it is."""
        assert self._current is not None
        body = {
            "model": self._current.name,
            "prompt": group.prompt,
            "n": group.num,
            "max_tokens": self.rollout.max_new_tokens,
            "temperature": group.temperature,
            # Said, since otherwise the model's generation_config.json is used: Qwen2.5 has top_p 0.8 and top_k 20.
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
            **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
            # Answers end where the training says, not where the model's generation_config.json does.
            **{"ignore_eos": True, "stop_token_ids": sorted(self.ends)},
            "skip_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 1,  # with 0 vLLM on TPUs fails: vllm-project/tpu-inference#3572
            **more,
        }
        if self._asks_for_seeds:
            body["seed"] = group.seed
        try:
            return await self._post(http, "/v1/completions", body)
        except _Refused as error:
            if error.status == 404 and "does not exist" in error.text:
                raise _Unloaded(f"it does not know {self._current.name}") from error
            if "seed" in body and "seed" in error.text:  # as of vLLM's torch_xla backend
                self._asks_for_seeds = False
                log.info("%s; it takes no seeds; its answers cannot be drawn again, which nothing needs", self._place)
                raise _Again(str(error)) from error
            raise self._stopped(f"it does not accept a prompt of {len(group.prompt):,} tokens ({error})") from error

    def _read(self, answer: Any, group: _Group) -> list[_Answer]:
        """Return a group's answers.

        Raises:
            _Wrong: they cannot be used.
            TrainingStopped: further ones will not be better.
        """
        name = answer.get("model") if isinstance(answer, dict) else None
        assert self._current is not None
        versions = {each.name: each.version for each in self._loaded.values()}
        lag = math.inf if name not in versions else sum(each > versions[name] for each in versions.values())
        if lag > self.rollout.max_lag:
            self.counts["stale"] += group.num
            raise _Wrong(
                f"it answers as {name!r} where {self._current.name!r} is asked for; rollout.max_lag="
                f"{self.rollout.max_lag}"
            )
        choices = sorted(answer.get("choices") or [], key=lambda choice: choice.get("index", 0))
        if len(choices) != group.num:
            raise _Wrong(f"it gives {len(choices)} answers where {group.num} are asked for")
        found = [self._answer_of(choice, group) for choice in choices]
        self.lag = max(self.lag, int(lag))
        return found

    def _answer_of(self, choice: Mapping[str, Any], group: _Group) -> _Answer:
        ids, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
        if ids is None:
            raise self._stopped("its answers have no token ids; vLLM has them from 0.10.2 on (`return_token_ids`)")
        if prompt is not None and list(prompt) != group.prompt:
            raise self._stopped(
                f"it read another prompt than it was given: {len(prompt)} tokens, {_begin(prompt)}, for "
                f"{len(group.prompt)}, {_begin(group.prompt)}"
            )
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in ids):
            raise self._stopped(
                f"its answers have token ids up to {max(ids)}, the model's are below {self.vocab_size}; it has another "
                "model or tokenizer"
            )
        num = next((place + 1 for place, token in enumerate(ids) if token in self.ends), len(ids))
        is_ended = bool(ids) and ids[num - 1] in self.ends
        if not is_ended and len(ids) != self.rollout.max_new_tokens:
            if choice.get("finish_reason") == "length":
                raise self._stopped(
                    f"it cuts answers at {len(ids)} tokens after a prompt of {len(group.prompt)}, where "
                    f"{self.rollout.max_new_tokens} may be written; start it with a larger --max-model-len"
                )
            raise _Wrong(f"an answer breaks off after {len(ids)} tokens ({choice.get('finish_reason')})")
        given = (choice.get("logprobs") or {}).get("token_logprobs")
        if given is not None and len(given) != len(ids):
            raise _Wrong(f"an answer has {len(ids)} tokens and {len(given)} log-probabilities")
        log_probs = [math.nan] * num if given is None else [_log_prob(value) for value in given[:num]]
        text, own = str(choice.get("text", "")), self.decode(ids[: num - is_ended])
        return _Answer(ids[:num], log_probs, _letters(text) == _letters(own) if _letters(own) else None, text)

    def _require_one_tokenizer(self, answers: Sequence[_Answer]) -> None:
        """Require the server to read at least one answer as this run's tokenizer does, once."""
        if self._has_one_tokenizer:
            return
        told = [answer for answer in answers if answer.is_alike is not None]
        self._has_one_tokenizer = any(answer.is_alike for answer in told)
        if told and not self._has_one_tokenizer:
            own = self.decode(told[0].ids)
            raise self._stopped(
                f"none of {len(told)} answers has the same text there and here, as {told[0].text[:40]!r} and "
                f"{own[:40]!r}; it has another tokenizer"
            )

    async def _require_own_temperature(self, http: aiohttp.ClientSession, group: _Group) -> None:
        """Require log-probabilities of the distribution that is drawn from, by those of one token at two temperatures.

        vLLM's default, `--logprobs-mode raw_logprobs`, has them before the temperature, and its answers do not say so.
        """
        gaps = []
        for temperature in (1.0, group.temperature):
            one = _Group(1, group.prompt, 0, temperature)

            async def once(one: _Group = one) -> list[float]:
                asked = {"max_tokens": 1, "logprobs": 2, "return_tokens_as_token_ids": True}
                answer = await self._complete(http, one, **asked)
                try:
                    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
                    return sorted(top.values(), reverse=True)[:2]
                except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                    raise _Wrong(f"an answer has no log-probabilities ({one_line(error)})") from error

            first, second = await self._repeated(http, once)
            gaps.append(first - second)
        expected = gaps[0] / group.temperature
        if abs(expected - gaps[0]) > ALIKE and abs(gaps[1] - gaps[0]) < abs(gaps[1] - expected):
            raise self._stopped(
                f"its log-probabilities are those before the temperature, of which rollout.temperature="
                f"{group.temperature:g} draws; start it with --logprobs-mode processed_logprobs"
            )
        self._has_one_temperature = True

    # ---- adapters ------------------------------------------------------------------------------------------------

    async def _load(self, http: aiohttp.ClientSession) -> None:
        async def once() -> None:
            await self._load_once(http)

        await self._repeated(http, once)

    async def _load_once(self, http: aiohttp.ClientSession) -> None:
        assert self._current is not None
        adapter = self._current
        try:
            await self._post(http, "/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.folder})
        except _Refused as error:
            if "already been loaded" not in error.text:
                if error.status == 404 and "No adapter" not in error.text:
                    raise self._stopped(f"it loads no adapters ({error}); {START_IT}") from error
                raise self._stopped(
                    f"it does not load {adapter.folder} ({error}); it must see that folder (rollout.adapter_folder) "
                    "and take its rank (--max-lora-rank)"
                ) from error
        self._loaded[adapter.name] = adapter

    async def _unload(self, http: aiohttp.ClientSession, names: Sequence[str]) -> None:
        for name in names:
            try:
                await self._post(http, "/v1/unload_lora_adapter", {"lora_name": name})
            except _Refused as error:
                if error.status != 404:
                    raise

    # ---- requests ------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return f"{KEY}={self.rollout.url}"

    def _stopped(self, why: str) -> TrainingStopped:
        return TrainingStopped(f"{self._place}; {why}; then the same command goes on.")

    def _run(self, request: Callable[[aiohttp.ClientSession], Awaitable[Result]]) -> Result:
        async def run() -> Result:
            key = os.environ.get(API_KEY)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connector = aiohttp.TCPConnector(limit=256)
            async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
                (found,) = await _together([request(http)], watch=self.watch)
                return found

        return asyncio.run(run())

    def _finish(self, request: Callable[[aiohttp.ClientSession], Awaitable[Result]], *, what: str) -> Result:
        """Return what a request gives within `max_seconds`."""
        seconds = self.rollout.max_seconds
        self._deadline, self._last_error = time.monotonic() + seconds, "it takes longer"

        async def limited(http: aiohttp.ClientSession) -> Result:
            async with asyncio.timeout(seconds):
                return await request(http)

        try:
            return self._run(limited)
        except (TimeoutError, _Again, _Wrong, _Refused) as error:
            cause = self._last_error if isinstance(error, TimeoutError) else str(error)
            limit = f" within rollout.max_seconds={seconds:g}" if isinstance(error, TimeoutError | _Again) else ""
            raise self._stopped(f"nothing {what}{limit}: {cause}; see the server's log") from error

    async def _repeated(self, http: aiohttp.ClientSession, once: Callable[[], Awaitable[Result]]) -> Result:
        """Repeat a request until it succeeds; wrong answers `TRIES` times."""
        num_wrong = 0
        for attempt in itertools.count():
            try:
                return await once()
            except _Wrong as error:
                num_wrong += 1
                self.counts["wrong"] += 1
                self._last_error = str(error)
                if num_wrong == TRIES:
                    raise
                if isinstance(error, _Unloaded):
                    log.info("%s; %s; it is loaded again", self._place, error)
                    await self._load(http)
            except _Again as error:
                self._last_error = str(error)
            self.counts["repeated"] += 1
            log.info("%s; %s; asked again", self._place, self._last_error)
            await asyncio.sleep(min(PAUSE_SECONDS * 2**attempt, MAX_PAUSE_SECONDS))
        raise AssertionError("unreachable")

    async def _post(self, http: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Any:
        # Half of what is left, so that an answer that was lost on its way leaves time for another.
        left = max(1.0, (self._deadline - time.monotonic()) / 2)
        limit = aiohttp.ClientTimeout(total=None if math.isinf(left) else left)
        return await self._answer(http.post(f"{self.url}{path}", json=body, timeout=limit), path)

    async def _get(self, http: aiohttp.ClientSession, path: str) -> Any:
        return await self._answer(http.get(f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=30)), path)

    async def _answer(self, request: Any, path: str) -> Any:
        """Return the JSON of an answer, or its text where it is none and a status alone is expected."""
        try:
            async with request as response:
                status, text = response.status, await response.text(errors="replace")
        except (aiohttp.InvalidURL, ValueError) as error:
            raise ConfigError(f"{self._place}; it is no address; write one as http://localhost:8000.") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Again(one_line(error)) from error
        if status in UNREACHED:
            raise _Again(f"HTTP {status}: {_message(text)}")
        if status >= 500:
            raise _Wrong(f"HTTP {status}: {_message(text)}")
        if status >= 400:
            raise _Refused(status, _message(text))
        if path.endswith("_lora_adapter"):
            return text
        try:
            return json.loads(text)
        except ValueError as error:
            raise _Wrong(f"its answer to {path} is no JSON: {text[:60]!r}") from error


class SharedSampler:
    """The sampler of a run: rank 0 asks the server, and every process gets the answers, by a file in the run's folder.

    Raises:
        ConfigError: the server does not fit the run.
    """

    def __init__(self, trainer: "Trainer", *, ends: Collection[int]) -> None:
        config, inputs, folder = trainer.config, trainer.inputs, trainer.outputs.folder
        self.runtime, rollout = trainer.runtime, config.rollout
        self.is_alone = self.runtime.world_size == 1 and self.runtime.hosts.size == 1
        self.shared = folder.path("answers")
        self.own: OutsideSampler | None = None
        if are_sharded_over_hosts(trainer.parameters, self.runtime):
            raise ConfigError(
                f"rollout.sampler={rollout.sampler} with hw.num_hosts={config.hw.num_hosts}; the trained tensors are "
                "sharded over hosts, and the server's adapter is written by one; use a mesh without fsdp over hosts."
            )
        if self.runtime.rank == 0:
            name = f"{config.name}-{hashlib.sha256(paths.absolute(folder.path()).encode()).hexdigest()[:6]}"
            model = trainer.model
            place = folder.path("adapters")
            self.own = OutsideSampler(
                rollout,
                base=model.source.reference,
                name=name,
                folder=place if rollout.adapter_folder is None else paths.join(rollout.adapter_folder, name),
                num_tokens=max(stage.geometry.seq_len for stage in inputs.stages),
                seed=config.seed,
                ends=ends,
                vocab_size=model.source.config.vocab_size,
                decode=lambda ids: str(inputs.tokenizer.decode(ids)),
                write=lambda folder, parameters: trainer.outputs.write_adapter(folder, model, to_host(parameters)),
                # Other processes cannot be asked while they wait for the answers.
                **({"watch": trainer.leave_if_requested} if self.is_alone else {}),
            )
        on_rank_zero(self.runtime, lambda: self._own.start())

    @property
    def _own(self) -> OutsideSampler:
        assert self.own is not None, "rank 0 has it"
        return self.own

    def prepare(self, parameters: Mapping[str, Tensor], version: int) -> None:
        """Let the server load the current parameters; every process calls it."""
        on_rank_zero(self.runtime, lambda: self._own.prepare(parameters, version))

    def sample(
        self, prompts: Sequence[list[int]], *, draws: Sequence[int], iteration: int, temperature: float | None = None
    ) -> Completions:
        """Return an answer to every prompt, as `OutsideSampler.sample`; every process calls it and gets all."""
        given: dict[str, Any] = {"draws": draws, "iteration": iteration, "temperature": temperature}
        found = on_rank_zero(self.runtime, lambda: self._own.sample(prompts, **given))
        if self.is_alone:
            assert found is not None
            return found
        path = paths.join(self.shared, "answers.safetensors")
        if found is not None:
            paths.make_dirs(self.shared)
            tensors = {name: torch.from_numpy(values) for name, values in vars(found).items()}
            paths.write_chunks_atomic(path, chunks_of(tensors))
        self.runtime.barrier("answered")
        read = tensors_in(bytearray(paths.read_bytes(path)))
        self.runtime.barrier("answers read")
        if found is not None:
            paths.remove_tree(self.shared)
        return Completions(**{name: tensor.numpy() for name, tensor in read.items()})

    def close(self) -> None:
        """Leave no adapter on the server, and none of its folders."""
        if self.own is not None:
            self.own.close()


async def _together(requests: Sequence[Awaitable[Result]], *, watch: Callable[[], None]) -> list[Result]:
    """Return what requests give, in order; the first error, also one of `watch`, ends all."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        pending = set(tasks)
        while pending:
            watch()
            done, pending = await asyncio.wait(pending, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seed(seed: int, draw: int) -> int:
    """Return a number below 2**62, to which vLLM adds the number of an answer."""
    return int.from_bytes(hashlib.sha256(f"{seed} {draw}".encode()).digest()[:8]) >> 2


def _log_prob(value: Any) -> float:
    """Return a log-probability; NaN where the server has none, or none that is finite."""
    return float(value) if isinstance(value, int | float) and value > LEAST else math.nan


def _letters(text: str) -> str:
    """Return text without what incremental decoding writes otherwise: blanks, and letters that are not whole."""
    return "".join(text.replace("\ufffd", "").split())


def _begin(ids: Sequence[int]) -> str:
    return f"{', '.join(map(str, ids[:4]))}, ..."


def _message(text: str) -> str:
    """Return the message of an error in OpenAI's form, or the text."""
    try:
        found = json.loads(text)
        message = (found.get("error") or found).get("message") or found.get("detail") or text
    except (ValueError, AttributeError):
        message = text
    return " ".join(str(message).split())[:300] or "no text"
