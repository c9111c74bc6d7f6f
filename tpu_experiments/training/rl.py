"""Training on answers that the model writes itself, by their rewards (objectives/policy.py).

An iteration samples answers to some prompts, has them rewarded, and writes the whole as one file, before the first of
its optimizer steps. Everything behind that file follows from it, so a run that was killed anywhere ends in the same
bytes: it reads the file, or, without one, draws the same answers from the same parameters again. Rewards are users'
code, which may differ from call to call: none is computed again. A checkpoint has the SHA-256 of every file.

Legend: N answers, P prompts, T tokens of a row, F rewards.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from tpu_experiments.checkpoint.errors import TrainingStopped, on_rank_zero
from tpu_experiments.checkpoint.state import to_host
from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config, TrainerConfig
from tpu_experiments.config.targets import locate
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.data.batches import Batch, one_batch
from tpu_experiments.data.prompts import Prompt
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.data.rows import Rows
from tpu_experiments.export.generation import ends_of
from tpu_experiments.models.passes.generation import Completions, Decoder, Sampling
from tpu_experiments.rewards.advantages import Advantages, advantages
from tpu_experiments.rewards.pool import Answer, RewardPool, Rewards
from tpu_experiments.runtime.stacked import stacked
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile
from tpu_experiments.storage.tensors import chunks_of, tensors_in
from tpu_experiments.training.batches import TOKENS_PER_CALL, StepInfo, prompt_bucket, scores_rollouts
from tpu_experiments.training.evaluation import Evaluation, evaluating
from tpu_experiments.training.guard import RollBack
from tpu_experiments.training.meters import Reading
from tpu_experiments.training.reference import ReferencePass
from tpu_experiments.training.rollout_page import PAGE, answer_lines, rollout_page, shown_iterations
from tpu_experiments.training.rollouts import Rollout, RolloutStore
from tpu_experiments.training.trainer import Trainer

log = logging.getLogger(__name__)
FOLDER = "rollouts"
START_FILE = "start.safetensors"
"""Trained tensors as the run began, in the folder of rollouts; where the objective compares with them."""


class PolicyObjective(Protocol):
    """What an objective has that learns from rewarded answers."""

    scale: str
    leaves_one_out: bool
    beta: float
    reward_beta: float

    def logps(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probability of every learnt token at the token itself, 0 elsewhere, (R, T)."""
        ...

    def divisors(self, tokens_N: NDArray[np.int64], *, max_new_tokens: int) -> NDArray[np.float32]:
        """Return what each answer counts for in the number that the loss is divided by."""
        ...


class Sampler(Protocol):
    """What writes answers."""

    def prepare(self, parameters: Mapping[str, Tensor], version: int) -> None:
        """Take the parameters, or the averages that evaluations use, after `version` optimizer steps of the run."""
        ...

    def sample(
        self, prompts: Sequence[list[int]], *, draws: Sequence[int], iteration: int, temperature: float | None = None
    ) -> Completions:
        """Return an answer to every prompt; every process calls it and gets all.

        Args:
            draws: a number for each prompt, which determines what is drawn.
            temperature: in the place of the setting's; 0 takes the likeliest tokens.
        """
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class OwnSampler:
    """Answers by the parameters that are being trained, on their devices; every process writes all of them."""

    def __init__(self, trainer: Trainer, *, ends: frozenset[int]) -> None:
        config, inputs, self._copy = trainer.config, trainer.inputs, trainer.copy
        self._averages = trainer.evaluated_parameters if config.optim.is_averaged else None
        self._between, self._ends, self._rollout = trainer.leave_if_requested, ends, config.rollout
        self._bucket = prompt_bucket(inputs, config)
        self._decoder = Decoder(
            self._copy.module,
            runtime=trainer.runtime,
            choice=ChoiceConfig(do_sample=True, top_k=0),
            num_rows=config.rollout.num_rows,
            max_new_tokens=config.rollout.max_new_tokens,
            tokens_per_call=TOKENS_PER_CALL,
            seed=config.seed,
            weights=lambda: self._copy.tensors,
            is_alone=False,
        )

    def prepare(self, parameters: Mapping[str, Tensor], version: int) -> None:
        """Copy the weights, with the adapters in them, until `sample` has ended."""
        self._copy.refresh(is_average=parameters is self._averages)

    def close(self) -> None:
        """Do nothing: all of it ends with the process."""

    def sample(
        self, prompts: Sequence[list[int]], *, draws: Sequence[int], iteration: int, temperature: float | None = None
    ) -> Completions:
        """Return an answer to every prompt, as `Sampler` says."""
        sampling = Sampling(self._rollout.temperature if temperature is None else temperature)
        parts, size = [], self._decoder.num_rows
        for begin in range(0, len(prompts), size):
            self._between()
            part = slice(begin, begin + size)
            how: dict[str, Any] = {"bucket": self._bucket, "ends": self._ends, "sampling": sampling}
            parts.append(self._decoder.complete(prompts[part], draws=draws[part], **how))
        self._copy.release()  # the memory is that of a step's activations
        arrays = ("ids_BN", "log_probs_BN", "lengths_B")
        return Completions(*(np.concatenate([getattr(part, name) for part in parts]) for name in arrays))


@dataclass(frozen=True)
class RolloutRows:
    """Rows of a rollout, of which each step of an iteration takes a part, in order."""

    rows: Rows
    labels: Sequence[str]
    first: int
    """First step of the iteration, counted in its stage."""

    def batch(self, step: int, *, global_rows: int, num_total: int | None = None) -> Batch:
        """Return the rows of a step of the stage."""
        part = slice((step - self.first) * global_rows, (step - self.first + 1) * global_rows)
        return one_batch(self.rows.take(part), labels=list(self.labels[part]), global_rows=global_rows)

    def total_for(self, epochs: float) -> int | None:
        """Return None: every row is one."""
        return None


def trainer_class(config: Config) -> Any:
    """Return the class of `trainer._target_`; the default for an objective that samples its rows is `PolicyTrainer`.

    Raises:
        ConfigError: another class than one derived from that, for such an objective.
    """
    kind: Any = locate(config.trainer._target_, key="trainer")
    if not config.objective.samples_rollouts:
        return kind
    if config.trainer._target_ == TrainerConfig._target_:
        return PolicyTrainer
    if not issubclass(kind, PolicyTrainer):
        raise ConfigError(
            f"trainer._target_={config.trainer._target_} with objective={config.objective.name}; the model writes its "
            "own rows, which that trainer does not know; derive it from tpu_experiments.training.rl.PolicyTrainer."
        )
    return kind


class PolicyTrainer(Trainer):
    """A run whose rows are answers of the model, in iterations of `rollout.updates` steps."""

    sampler: Sampler
    objective: Any

    def build(self) -> None:
        """Create the parts of a run, and those of its rollouts."""
        super().build()
        config = self.config
        self.guard.settings = replace(config.trainer.guard, spike_factor=None)  # its losses are around 0
        self.policy: PolicyObjective = self.objective
        self.score = ReferencePass(self, values_of=self.policy.logps, name="score")
        self.seconds: dict[int, dict[str, float]] = {}
        """Seconds of an iteration by part before its updates, of those of this process."""
        self.facts: dict[int, dict[str, float]] = {}
        """What log records say of an iteration."""
        self.teaches = True
        """Whether the answers of the current iteration differ in what they are worth."""
        self.start_score: ReferencePass | None = None
        if self.outputs is not None:  # None in a plan
            self.store = RolloutStore(self.outputs.folder.path(FOLDER))
            rollout = config.rollout
            limit = rollout.reward_memory_gib
            self.rewards = RewardPool(
                rollout.rewards,
                workers=rollout.reward_workers,
                max_bytes=None if limit is None else int(limit * 2**30),
            )
            on_rank_zero(self.runtime, self.rewards.check)
            self.sampler = self.build_sampler()

    def build_sampler(self) -> Sampler:
        """Create what writes answers."""
        if self.config.rollout.sampler == "own":
            return OwnSampler(self, ends=self.ends)
        from tpu_experiments.training.outside_sampler import SharedSampler  # imports aiohttp, in 0.2 s

        return SharedSampler(self, ends=self.ends)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Return the tokens that end an answer.

        Raises:
            ConfigError: there are none.
        """
        source = self.model.source
        found = ends_of(self.inputs.tokenizer, kind="chat", config=source.config, folder=source.folder)
        if not found.ids:
            raise ConfigError(
                f"model={self.config.model.name} with objective={self.config.objective.name}; no token of its "
                "tokenizer ends an answer; name a chat format with one, model.chat_format=."
            )
        return found.ids

    def run(self) -> None:
        """Run, and end the processes of rewards."""
        try:
            super().run()
        finally:
            for part in ("rewards", "sampler"):
                if hasattr(self, part):
                    getattr(self, part).close()

    # ---- iterations -----------------------------------------------------------------------------------------

    def train_stage(self, stage: Stage, rows: ReplayedRows, *, num_steps: int) -> None:
        """Train the remaining steps of a stage, iteration by iteration."""
        self.progress.stages[-1].epochs = None  # passes are over prompts, and their losses say nothing
        updates = self.config.rollout.updates
        with self.watch.measure("train"), self.count_work():
            self.meters.begin(stage.geometry)
            while (step := self.progress.stage_step) < num_steps and not self.progress.stages[-1].ended_by:
                first = step - step % updates
                stop = min(first + updates, num_steps)
                if self.progress.skipped_steps(num_steps).issuperset(range(step, stop)):
                    self.progress.advance(stop)
                    continue
                found = self.rollout(stage, rows, first=first)
                self.teaches = bool(found.advantage_N.any())
                self.feed_steps(stage, self.rows_of(found, stage, first=first), num_steps=num_steps, stop=stop)
            self.wait_and_record()
            self.raise_requested_rollback()
        if not self.progress.peak_lr:
            log.warning(
                "rollout.rewards; in %d steps no answer was worth more than another to the same prompt, so nothing was "
                "learnt; start from a model that is sometimes right (start.run=), ask easier questions, or add a "
                "reward that tells these answers apart",
                self.progress.step,
            )

    def queue_step(self, info: StepInfo, batch: Mapping[str, Tensor]) -> None:
        """Queue one step; one whose answers are all worth the same need not change anything."""
        before = self.progress.peak_lr
        super().queue_step(info, batch)
        if not self.teaches:
            self.progress.peak_lr = before

    def rollout(self, stage: Stage, rows: ReplayedRows, *, first: int) -> Rollout:
        """Return the rollout whose first step of the stage is `first`: what is written, or sampled and written now."""
        number = self.progress.step - self.progress.stage_step + first
        with self.idle(), self.watch.measure("rollout"):
            self.raise_requested_rollback()  # which would remove these answers
            found = self.stored(number)
            if self.runtime.any_process(found is None):
                if self.progress.stage_step != first:
                    raise TrainingStopped(
                        f"{self.store.path(number)}; it is missing, and the parameters that wrote these answers are "
                        "gone; restore the file, or start again under another name."
                    )
                made = self.sampled(stage, rows, first=first, number=number)
                on_rank_zero(self.runtime, lambda: self.store.write(made))
                self.runtime.barrier("rollout")
                found = self.stored(number)
            assert found is not None, "it is written"
            self.progress.rollouts[str(number)] = found.sha256
        return found

    def stored(self, number: int) -> Rollout | None:
        """Return a rollout that is written, whole and as the checkpoint has it; None where there is none.

        One that no checkpoint names is none where it was sampled behind another number of rollbacks.

        Raises:
            TrainingStopped: it is damaged, or another than the checkpoint names.
        """
        sha256 = self.progress.rollouts.get(str(number))
        try:
            found = self.store.read(number, sha256=sha256)
        except DamagedFile as error:
            raise TrainingStopped(str(error)) from error
        is_ours = found is None or sha256 is not None or found.rollbacks == self.progress.guard.rollbacks
        return found if is_ours else None

    def sampled(self, stage: Stage, rows: ReplayedRows, *, first: int, number: int) -> Rollout:
        """Sample an iteration with the current parameters, have it rewarded, and score it where the loss reads that."""
        config, rollout, prompts = self.config, self.config.rollout, self.inputs.prompts[stage.name].train
        index_P = prompt_indices(rows, first // rollout.updates, num=rollout.prompts)
        index_N = np.repeat(index_P, rollout.samples)
        chosen = [prompts[index] for index in index_N.tolist()]
        with self.part("sample", number):
            self.sampler.prepare(self.parameters, self.progress.step)
            with evaluating(self.model.module):
                draws = [number << 24 | row for row in range(len(chosen))]
                written = self.sampler.sample([prompt.ids for prompt in chosen], draws=draws, iteration=number)
        made = self.unrewarded(chosen, written, index_N=index_N, number=number, seq_len=stage.geometry.seq_len)
        with self.part("score", number):
            made = self.scored(made, stage)
        with self.part("reward", number):
            found = on_rank_zero(self.runtime, lambda: self.rewarded(chosen, made))
        if found is None:  # on other ranks, which read what rank 0 writes
            return made
        rewards, own = found
        learnt_N = made.learnt(masks_cut=rollout.masks_cut).sum(1)
        return replace(
            made,
            rewards_NF=rewards.values_NF,
            reward_names=rewards.names,
            advantage_N=own.values_N,
            divisor_N=self.policy.divisors(learnt_N, max_new_tokens=config.rollout.max_new_tokens),
        )

    def unrewarded(
        self,
        prompts: Sequence[Prompt],
        written: Completions,
        *,
        index_N: NDArray[np.int64],
        number: int,
        seq_len: int,
    ) -> Rollout:
        """Return the answers as rows, without rewards."""
        num = len(prompts)
        ids_NT, logps_NT = np.zeros((num, seq_len), np.int32), np.zeros((num, seq_len), np.float32)
        before_N = np.array([len(prompt.ids) for prompt in prompts], np.int32)
        for row, prompt in enumerate(prompts):
            begin, size = len(prompt.ids), int(written.lengths_B[row])
            ids_NT[row, :begin] = prompt.ids
            ids_NT[row, begin : begin + size] = written.ids_BN[row, :size]
            logps_NT[row, begin : begin + size] = written.log_probs_BN[row, :size]
        lengths_N = (before_N + written.lengths_B).astype(np.int32)
        is_cut_N = ~np.isin(ids_NT[np.arange(num), lengths_N - 1], list(self.ends))
        return Rollout(
            iteration=number,
            version=self.progress.step,
            ids_NT=ids_NT,
            lengths_N=lengths_N,
            prompt_lengths_N=before_N,
            is_cut_N=is_cut_N,
            sampler_logps_NT=logps_NT,
            advantage_N=np.zeros(num, np.float32),
            divisor_N=np.zeros(num, np.float32),
            rewards_NF=np.zeros((num, 0)),
            reward_names=(),
            prompt_index_N=index_N.astype(np.int32),
            rollbacks=self.progress.guard.rollbacks,
        )

    def scored(self, made: Rollout, stage: Stage) -> Rollout:
        """Return the rollout with log-probabilities by the model now, and by the model as the run started."""
        if not scores_rollouts(self.config):
            made = replace(made, old_logps_NT=made.sampler_logps_NT)
        else:
            made = replace(made, old_logps_NT=self.logps_by(self.score, made, stage))
        if self.config.objective.reads_start():
            made = replace(made, start_logps_NT=self.logps_by(self.by_start, made, stage))
        return made

    def logps_by(self, computed: ReferencePass, made: Rollout, stage: Stage) -> NDArray[np.float32]:
        """Return log-probabilities of the answers' tokens at the tokens themselves, (N, T)."""
        rows = replace(made.rows(masks_cut=False, pad_id=0), more={})
        size = stage.geometry.micro_rows * stage.geometry.num_shards
        parts = list(computed.run(rows, global_rows=size))
        return np.concatenate(parts)[: rows.num_rows].astype(np.float32)

    @property
    def by_start(self) -> ReferencePass:
        """Return the pass with the trained tensors as the run began, which are written before the first step."""
        if self.start_score is None:
            path = paths.join(self.store.folder, START_FILE)
            if self.progress.step == 0 and not self.progress.rollouts:
                chunks = chunks_of(to_host(self.parameters))
                on_rank_zero(self.runtime, lambda: write_whole(path, b"".join(chunks)))
                self.runtime.barrier("start")
            try:
                content = bytearray(paths.read_bytes(path))
            except FileNotFoundError:
                raise TrainingStopped(
                    f"{path}; the trained tensors as the run began are missing, which its answers are compared with "
                    "(objective.beta); restore the file, or start again under another name."
                ) from None
            digest = hashlib.sha256(content).hexdigest()
            if self.progress.rollouts.setdefault(START_FILE, digest) != digest:
                raise TrainingStopped(f"{path}; it was changed since the run began; restore it, or start again.")
            host = tensors_in(content)
            place = self.runtime.place
            start = {name: place(stacked(host, name).clone(), name=name) for name in self.parameters}
            self.start_score = ReferencePass(self, parameters=start, values_of=self.policy.logps, name="score")
        return self.start_score

    def rewarded(self, prompts: Sequence[Prompt], made: Rollout) -> tuple[Rewards, Advantages]:
        """Return rewards and advantages of the answers, and tell what went wrong.

        Raises:
            TrainingStopped: none has a reward.
        """
        rewards = self.rewards.score(self.answers_of(prompts, [made.answer_ids(row) for row in range(len(prompts))]))
        sentence = rewards.sentence()
        if sentence is not None:
            log.warning("step %d: %s", self.progress.step, sentence)
        total_N = rewards.total()
        if np.isnan(total_N).all():
            raise TrainingStopped(
                f"{sentence} Nothing can be learnt from that; mend the functions of rollout.rewards, and the same "
                "command goes on."
            )
        if self.policy.reward_beta:
            own_NT, start_NT = made.old_logps_NT, made.start_logps_NT
            assert own_NT is not None, "it is scored"
            assert start_NT is not None, "it is scored"
            total_N = total_N - self.policy.reward_beta * (own_NT - start_NT).sum(1, dtype=np.float64)
        samples = self.config.rollout.samples
        how: dict[str, Any] = {"scale": self.policy.scale, "leaves_one_out": self.policy.leaves_one_out}
        return rewards, advantages(total_N, samples=samples, **how)

    def answers_of(self, prompts: Sequence[Prompt], ids: Sequence[list[int]]) -> list[Answer]:
        """Return answers as rewards see them: text without special tokens."""
        decode = self.inputs.tokenizer.decode
        texts = [str(decode(own, skip_special_tokens=True)) for own in ids]
        return [Answer(prompt.text, text, prompt.row) for prompt, text in zip(prompts, texts, strict=True)]

    def rows_of(self, found: Rollout, stage: Stage, *, first: int) -> RolloutRows:
        """Return the rows that the steps of an iteration learn from."""
        rows = found.rows(masks_cut=self.config.rollout.masks_cut, pad_id=0)
        more = {array.name: rows.more[array.name] for array in self.objective.sampled}  # in the order of a plan
        prefix = ", ".join(stage.sources)
        labels = [f"{prefix}:{index}" for index in found.prompt_index_N.tolist()]
        self.facts[found.iteration] = self.facts_of(found)
        return RolloutRows(replace(rows, more=more), labels, first)

    @contextmanager
    def part(self, name: str, number: int) -> Iterator[None]:
        """Measure the seconds of a part of an iteration."""
        began = time.perf_counter()
        yield
        self.seconds.setdefault(number, {})[name] = time.perf_counter() - began

    # ---- records and evaluations ----------------------------------------------------------------------------

    def meters_of(self, reading: Reading) -> dict[str, float]:
        """Return the meters of a record, and the seconds of an iteration by part, means over those of this process."""
        spent, self.seconds = self.seconds, {}
        names = dict.fromkeys(name for parts in spent.values() for name in parts)
        means = {name: np.mean([parts[name] for parts in spent.values() if name in parts]) for name in names}
        return super().meters_of(reading) | {f"perf/{name}_seconds": float(mean) for name, mean in means.items()}

    def measures_of(self, reading: Reading) -> dict[str, float]:
        """Return the objective's measures of the steps, and means over their rollouts."""
        updates, stage = self.config.rollout.updates, self.progress.stages[-1]
        offset = self.progress.step - stage.steps
        steps = [step for step, _ in reading.losses] + [skipped.step for skipped in reading.skipped]
        numbers = sorted({offset + (step - 1 - offset) // updates * updates for step in steps})
        for number in numbers:  # an earlier process may have trained on it
            if number not in self.facts and (found := self.stored(number)) is not None:
                self.facts[number] = self.facts_of(found)
        facts = [self.facts[number] for number in numbers if number in self.facts]
        self.facts = {number: own for number, own in self.facts.items() if number >= numbers[-1]}
        names = dict.fromkeys(name for own in facts for name in own)
        means = {name: float(np.nanmean([own[name] for own in facts if name in own])) for name in names}
        return super().measures_of(reading) | means

    def facts_of(self, found: Rollout) -> dict[str, float]:
        """Return what a log record says of a rollout."""
        weights = [reward.weight for reward in self.config.rollout.rewards.values()]
        return facts_of(found, weights=weights, samples=self.config.rollout.samples)

    def evaluate(self) -> Evaluation:
        """Evaluate held-out rows, and the rewards of the likeliest answers to held-out prompts."""
        found = super().evaluate()
        prompts = self.inputs.prompts[self.inputs.stages[-1].name].held_out[: self.config.trainer.max_eval_rows]
        if not prompts:
            return found
        self.sampler.prepare(self.evaluated_parameters, self.progress.step)
        with evaluating(self.model.module):
            asked, step = [prompt.ids for prompt in prompts], self.progress.step
            written = self.sampler.sample(asked, draws=[0] * len(asked), iteration=step, temperature=0.0)
        ids = [own[:size].tolist() for own, size in zip(written.ids_BN, written.lengths_B, strict=True)]
        rewards = on_rank_zero(self.runtime, lambda: self.rewards.score(self.answers_of(prompts, ids)))
        if rewards is None:
            return found
        if sentence := rewards.sentence():
            log.warning("held-out answers: %s", sentence)
        with np.errstate(invalid="ignore"):
            means = {"reward": np.nanmean(rewards.total())} | {
                f"rewards/{name}": np.nanmean(rewards.values_NF[:, number]) for number, name in enumerate(rewards.names)
            }
        is_cut = [not own or own[-1] not in self.ends for own in ids]
        means |= {"completions/clipped_ratio": np.mean(is_cut)}
        return replace(found, measures=found.measures | {name: float(value) for name, value in means.items()})

    def evaluate_stage(self, stage: Stage) -> None:
        """Evaluate a stage, and show some answers with their rewards."""
        super().evaluate_stage(stage)
        if self.runtime.rank == 0:
            self.show_answers(stage)

    def show_answers(self, stage: Stage) -> None:
        """Write the page of some rollouts of a stage, and log a prompt of the newest with its best and worst answer."""
        numbers = [
            number for number in self.store.iterations() if number >= self.progress.step - self.progress.stage_step
        ]
        found = [each for number in shown_iterations(numbers) if (each := self.stored(number)) is not None]
        if not found:
            return
        prompts, tokenizer = self.inputs.prompts[stage.name].train, self.inputs.tokenizer
        name = str(self.config.name)
        text = rollout_page(found, prompts=prompts, tokenizer=tokenizer, name=name)
        write_whole(self.outputs.folder.path(PAGE), text.encode())
        for line in answer_lines(found[0], prompts=prompts, tokenizer=tokenizer):
            log.info("%s", line)

    def roll_back(self, request: RollBack) -> None:
        """Restore the last good checkpoint, and remove what was sampled behind it."""
        super().roll_back(request)
        on_rank_zero(self.runtime, lambda: self.store.remove_after(max(map(int, self.numbers), default=-1)))
        self.facts.clear()

    @property
    def numbers(self) -> list[str]:
        """Return the rollouts that the progress names."""
        return [name for name in self.progress.rollouts if name != START_FILE]


def prompt_indices(rows: ReplayedRows, iteration: int, *, num: int) -> NDArray[np.int64]:
    """Return the prompts of an iteration of a stage, (P,), which pass through their epochs in the rows' order."""
    own: Any = rows.own
    places = [divmod(place, own.num_rows) for place in range(iteration * num, (iteration + 1) * num)]
    return np.array([own.order(epoch)[offset] for epoch, offset in places], np.int64)


def facts_of(found: Rollout, *, weights: Sequence[float], samples: int) -> dict[str, float]:
    """Return what a log record says of a rollout, by the names that TRL has for it."""
    values_NF = found.rewards_NF
    total_N = values_NF @ np.asarray(weights)
    spreads = [_std(total_S) for total_S in total_N.reshape(-1, samples)]
    tokens_N = found.lengths_N - found.prompt_lengths_N
    advantage_PS = found.advantage_N.reshape(-1, samples)
    facts = {"reward": _mean(total_N), "reward_std": _mean(np.array(spreads))}
    facts |= {f"rewards/{name}/mean": _mean(values_NF[:, number]) for number, name in enumerate(found.reward_names)}
    facts |= {f"rewards/{name}/std": _std(values_NF[:, number]) for number, name in enumerate(found.reward_names)}
    return facts | {
        "frac_reward_zero_std": float((~advantage_PS.any(axis=1)).mean()),
        "advantage_abs": float(np.abs(found.advantage_N).mean()),
        "completions/mean_length": float(tokens_N.mean()),
        "completions/max_length": float(tokens_N.max()),
        "completions/clipped_ratio": float(found.is_cut_N.mean()),
        "no_reward": float(np.isnan(values_NF).any(axis=1).mean()),
    }


def _mean(values_N: NDArray[np.float64]) -> float:
    known = values_N[~np.isnan(values_N)]
    return float(known.mean()) if len(known) else np.nan


def _std(values_N: NDArray[np.float64]) -> float:
    known = values_N[~np.isnan(values_N)]
    return float(known.std(ddof=1)) if len(known) > 1 else np.nan


def write_whole(path: str, data: bytes) -> None:
    """Write a file atomically, in a folder that is made."""
    paths.make_dirs(paths.folder_of(path))
    paths.write_bytes_atomic(path, data)
