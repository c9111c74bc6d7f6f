"""Inputs of a run: tokenizer, prepared data, stages, and the batches of each stage.

`RunInputs` is created once, before any device is initialised, and passed to every process.
"""

import logging
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.curriculum import Geometry, Stage, resolve_stages, skipped_stages
from tpu_experiments.config.data_schema import QUESTION_ROWS, DataSourceConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import cache_folder
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.data.batches import (
    Batch,
    OrderedRows,
    StageRows,
    WrittenRows,
    fixed_batches,
    trimmed,
    with_all_tokens_learnt,
)
from tpu_experiments.data.prepare import Preparation, prepare
from tpu_experiments.data.prepared import Key, PreparedSource
from tpu_experiments.data.prompts import Prompt, Prompts
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.data.rows import Rows, RowSource, padding
from tpu_experiments.data.steps.epochs import WrittenEpoch
from tpu_experiments.data.steps.tokenized import Read
from tpu_experiments.data.store.stream import CacheSettings
from tpu_experiments.data.teacher import StoredTeacher, Wanted, read_teacher
from tpu_experiments.data.tokens.tokenizer import add_tokens, closing_texts, load_tokenizer, tokenizer_hash
from tpu_experiments.data.weights import WeightedRows, row_shares
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.bitnet import MIX
from tpu_experiments.models.parts.dropout import drops_by_rows, random_words
from tpu_experiments.models.passes.generation import program_shapes as decoder_shapes
from tpu_experiments.objectives.base import objective_class, prepared_arrays, samples
from tpu_experiments.optim.schedules import multiplier
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.training.cached_sampler import Lengths
from tpu_experiments.training.evaluation import host_tensors
from tpu_experiments.training.questions import Question
from tpu_experiments.training.reference import ReferencedRows, Values
from tpu_experiments.training.start import StartPoint

log = logging.getLogger(__name__)
MIB, GIB = 2**20, 2**30
DEFAULT_READER = DataSourceConfig.__dataclass_fields__["_target_"].default
"""Default reader, which reads file by file in many processes; a custom reader is read sequentially."""


def tokenizer_location(config: Config) -> str:
    """Return the tokenizer's folder or Hub id: the shipped one for a tiny model, else the model's own."""
    if config.model.tokenizer_path:
        return config.model.tokenizer_path
    return "tpu_experiments/samples/tokenizer" if config.model.size == "tiny" else config.model.path


def load_run_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run, with its chat template.

    Raises:
        ConfigError: there is none, or it does not match the settings.
    """
    tokenizer = load_tokenizer(
        tokenizer_location(config),
        revision=config.model.revision,
        chat_template_path=config.model.chat_template_path,
        chat_format=config.model.chat_format,
        remote_code=config.model.remote_code,
    )
    add_tokens(tokenizer, config.model.added_tokens)
    return closing_texts(tokenizer) if config.objective.reads_labels else tokenizer


def prepared_folder(config: Config) -> str:
    """Return the folder of prepared data."""
    return config.prepare.folder or paths.join(config.output_dir, "prepared")


def prepare_sources(
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase,
    stages: list[Stage],
    is_lookup: bool = False,
    verify: Literal["rows", "all"] = "rows",
) -> dict[str, PreparedSource]:
    """Return the rows of every source at every row length, prepared now or reused.

    `verify` is that of `Preparation`.

    Raises:
        NotPrepared: some are missing, and `is_lookup` forbids preparing them.
        ConfigError: a source that cannot be read, is empty, or leaves no row to train or hold out; or single answers
            with labels that the objective does not read, or that are all good or all bad.
    """
    sources = prepare(
        config.data,
        data_size=config.data_size,
        seq_lens=sorted({stage.geometry.seq_len for stage in stages}),
        preparation=replace(preparation_settings(config, tokenizer=tokenizer, is_lookup=is_lookup), verify=verify),
    )
    _require_answers(config, sources)
    return sources


def stored_teachers(
    config: Config, *, tokenizer: PreTrainedTokenizerBase, sources: dict[str, PreparedSource], stages: list[Stage]
) -> dict[Key, StoredTeacher]:
    """Return the predictions of a teacher for the rows of training and of evaluations; none for other objectives.

    Raises:
        ConfigError: some are missing, or belong to other rows, or to another tokenizer.
    """
    entries = config.objective.teacher_entries()
    if not entries:
        return {}
    temperature, converts = config.objective.teacher_temperature(), config.objective.converts_temperature()
    wanted = Wanted(entries, temperature, converts, tokenizer_hash(tokenizer))
    found, cache = {}, cache_settings(config)
    for key, (rows, _) in referred_rows(RunInputs(tokenizer, sources, stages), config).items():
        teacher = config.data[key[0]].teacher
        if teacher is None:  # of a pack; training/given.py says more
            raise ConfigError(
                f"data.{key[0]}.teacher=null; objective={config.objective.name} learns from one; name it."
            )
        with explain_storage_errors(teacher):
            found[key] = read_teacher(
                teacher, key, source=sources[key[0]], num_rows=rows.num_rows, wanted=wanted, cache=cache
            )
    return found


def _require_answers(config: Config, sources: Mapping[str, PreparedSource]) -> None:
    """Require single answers with labels to go with the objective, and to be of both labels."""
    manifests = {name: next(iter(source.manifests.values())) for name, source in sources.items()}
    found = {name: m["noticed"]["answers"] for name, m in manifests.items() if "answers" in m.get("noticed", {})}
    if found and not config.objective.reads_single:
        name = next(iter(found))
        raise ConfigError(
            f"data.{name} with objective={config.objective.name}; its rows are single answers with a label, "
            f"{sum(found[name].values()):,} to train on, and it compares the two answers of a pair; use objective=kto, "
            "or rows of a chosen and a rejected answer."
        )
    good, bad = (sum(counts[label] for counts in found.values()) for label in ("good", "bad"))
    if len(found) == len(sources) and not (good and bad):
        which = "good" if good else "bad"
        raise ConfigError(
            f"data.{next(iter(found))}; all {good + bad:,} answers to train on are labelled {which}, and "
            f"objective={config.objective.name} learns what sets good ones apart from bad ones; add rows of the other "
            "label" + (", or learn from these by objective=next_token with kind=chat." if good else ".")
        )


def cache_settings(config: Config) -> CacheSettings:
    """Return the limits on local copies and buffers of remote folders."""
    return CacheSettings(
        folder=cache_folder("shards"),
        max_bytes=int(config.loader.cache_gib * GIB),
        read_ahead_bytes=config.loader.read_ahead_mib * MIB,
    )


def preparation_settings(config: Config, *, tokenizer: PreTrainedTokenizerBase, is_lookup: bool = False) -> Preparation:
    """Return how and where the sources of a config are prepared."""
    folder = prepared_folder(config)
    labels = config.objective.known_labels() if config.objective.reads_labels else None
    return Preparation(
        config.prepare,
        folder,
        tokenizer,
        own_readers(config),
        cache_settings(config) if paths.is_remote(folder) else None,
        is_lookup,
        is_labelled=config.objective.reads_labels,
        labels=None if labels is None else tuple(labels),
        arrays=prepared_arrays(config),
        reads_margin=config.objective.reads_margin(),
        needs_answers=not config.objective.samples_rollouts,
    )


@dataclass(frozen=True)
class PromptRows:
    """Prompts as rows of which nothing is learnt; a `RowSource`."""

    prompts: Sequence[Prompt]
    seq_len: int

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    def take(self, index_M: NDArray[np.int64] | slice) -> Rows:
        """Return the rows at `index_M`, shape (M, T)."""
        chosen = np.arange(self.num_rows)[index_M].tolist()
        rows = padding(len(chosen), seq_len=self.seq_len)
        for row, number in enumerate(chosen):
            ids = self.prompts[number].ids
            rows.ids_NT[row, : len(ids)] = ids
            rows.positions_NT[row, : len(ids)] = np.arange(len(ids))
            rows.segments_NT[row, : len(ids)] = 1
        return rows


def own_readers(config: Config) -> dict[str, Read]:
    """Return the readers of the user's own, by source."""
    return {
        name: locate(source._target_, key=f"data.{name}")
        for name, source in config.data.items()
        if source._target_ != DEFAULT_READER
    }


def stages_with_data(config: Config) -> list[Stage]:
    """Return the stages that have a source; the others are logged."""
    for name in skipped_stages(config):
        log.info("stage %s is skipped: data=%s has no source of its kind", name, list(config.data))
    return resolve_stages(config)


WEIGHTED_STAGE = 2**17
"""Offset of the stage number, times the source's index, in the seed of a weighted source's order, so that sources of
equal size have different orders."""
REPLAY_STAGE = 2**16
"""Offset of the stage number in the seed of the order of its replayed rows, so that it differs from that of its own."""
HELD_OUT_STREAM = 2**63
"""First index of held-out batches for the random words of an objective; those of training are below."""
NOISE_STREAM = 2**192
"""First Philox counter of the noise words of dropout; the orders of rows use counters from 0."""


Shapes = set[tuple[int, ...]]


@dataclass
class RunInputs:
    """Tokenizer, prepared rows and stages; picklable, and the same in every process."""

    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, PreparedSource]
    stages: list[Stage]
    written: dict[int, list[WrittenEpoch]] = field(default_factory=dict)
    """Written epochs by the index of their stage; used with `loader.order=written`."""
    questions: dict[str, list[Question]] = field(default_factory=dict)
    """Held-out questions of every set, by its name."""
    lengths: Lengths | None = None
    """Lengths of what is written with a cache; None where every token takes a pass over the window."""
    start: StartPoint | None = None
    """Source of a warm start; None without one, and for a run that resumes from its own checkpoint."""
    num_parameters: int | None = None
    """Parameters of the model without adapters; None where no stage has `tokens_per_parameter`."""
    prompts: dict[str, Prompts] = field(default_factory=dict)
    """Prompts by the name of their stage, where the model writes its own rows."""
    reference: dict[Key, Values] | None = None
    """Values by the model as it starts, once they are known; None where rows carry none (training/reference.py)."""
    teachers: dict[Key, StoredTeacher] = field(default_factory=dict)
    """Stored predictions of a teacher, where rows carry some (data/teacher.py)."""

    def rows(self, name: str, split: str, seq_len: int) -> RowSource:
        """Return the rows of a source's split, with their reference or a teacher's predictions if they carry some."""
        store = self.sources[name].store(split, seq_len)
        if (name, split, seq_len) in self.teachers:
            return self.teachers[name, split, seq_len].told(store)
        if self.reference is None:
            return store
        return ReferencedRows(store, self.reference.get((name, split, seq_len)))

    @property
    def audit_hashes(self) -> dict[str, str]:
        """Return the audit hash of the data by `<source>@<row length>`, and the hash of what a teacher says of it."""
        taught = {f"{name} ({split}, teacher)@{length}": t.digest for (name, split, length), t in self.teachers.items()}
        own = {key: value for source in self.sources.values() for key, value in source.audit_hashes.items()}
        return own | taught

    @property
    def prompt_kind(self) -> str:
        """Return `chat` when a chat source is trained on, else `text`."""
        return "chat" if any(source.kind == "chat" for source in self.sources.values()) else "text"

    @property
    def eval_seq_len(self) -> int:
        """Return the row length of all evaluations, the longest of the stages."""
        return max(stage.geometry.seq_len for stage in self.stages)


@dataclass(frozen=True)
class StepInfo:
    """Host-side facts about the batch of one step."""

    stage_step: int
    lr: float
    labels: list[str]
    """`source:row` of every row of this process."""
    global_labels: list[str]
    """`source:row` of every row of the global batch."""
    num_tokens: int
    """Tokens of the global batch that are not padding."""
    is_last: bool
    """Whether the stage ends with it."""
    examples: tuple[int, int] | None = None
    """Learnt tokens of the global batch and its pairs or answers; None where tokens alone are counted."""


def _examples(batch: Batch, config: Config) -> tuple[int, int] | None:
    if not config.objective.reads_pairs:
        return None
    answers = batch.num_answers
    return batch.num_supervised, answers if config.objective.reads_single else answers // 2


def stage_rows(inputs: RunInputs, stage: Stage, *, config: Config) -> ReplayedRows:
    """Return the training rows of a stage in the order of `loader.order`; replayed rows are permuted.

    Where the model writes its own rows, they are the prompts.

    Raises:
        ConfigError: the stage needs more epochs than were written.
    """
    if config.objective.samples_rollouts:
        prompts = PromptRows(inputs.prompts[stage.name].train, stage.geometry.seq_len)
        name = ", ".join(stage.sources)
        return ReplayedRows(StageRows([prompts], names=[name], seed=config.seed, stage_index=stage.index))
    rows = shuffled_rows(inputs, stage, seed=config.seed)
    if config.loader.order == "permutation":
        return rows
    epochs = inputs.written.get(stage.index, [])
    num_rows = stage_steps(rows, stage, inputs=inputs, config=config) * stage.geometry.global_rows
    positions = num_rows - rows.num_replayed(num_rows)
    written = WrittenRows(
        [epoch.rows for epoch in epochs],
        origins=[epoch.origins_N for epoch in epochs],
        names=stage.sources,
        counts=rows.own.counts,
        num_positions=positions if stage.epochs is None else min(positions, rows.total_for(stage.epochs)),
    )
    return replace(rows, own=written)


def shuffled_rows(inputs: RunInputs, stage: Stage, *, seed: int) -> ReplayedRows:
    """Return the training rows of a stage, permuted anew in each epoch."""

    seq_len = stage.geometry.seq_len

    def rows_of(names: Sequence[str], stage_index: int, *, weights: Sequence[float]) -> OrderedRows:
        parts = [inputs.rows(name, "train", seq_len) for name in names]
        if not weights:
            return StageRows(parts, names=names, seed=seed, stage_index=stage_index)
        each = [
            StageRows([part], names=[name], seed=seed, stage_index=stage_index + WEIGHTED_STAGE * number)
            for number, (part, name) in enumerate(zip(parts, names, strict=True), start=1)
        ]
        return WeightedRows(each, shares=_row_shares(inputs, names, weights=weights, seq_len=seq_len))

    own = rows_of(stage.sources, stage.index, weights=stage.weights)
    if not stage.replay:
        return ReplayedRows(own)
    replayed = rows_of(stage.replay_sources, REPLAY_STAGE + stage.index, weights=stage.replay_weights)
    return ReplayedRows(own, replayed, Fraction(str(stage.replay)))


def _row_shares(inputs: RunInputs, names: Sequence[str], *, weights: Sequence[float], seq_len: int) -> list[Fraction]:
    splits = [inputs.sources[name].manifests[seq_len]["splits"]["train"] for name in names]
    return row_shares(weights, tokens_per_row=[Fraction(split["tokens"], split["rows"]) for split in splits])


def weights_text(rows: ReplayedRows, stage: Stage, *, num_steps: int) -> str:
    """Describe the rows that a stage draws from each source by its weight; empty without weights."""
    if not isinstance(rows.own, WeightedRows):
        return ""
    num_rows = num_steps * stage.geometry.global_rows
    num_own = num_rows - rows.num_replayed(num_rows)
    num_own = num_own if stage.epochs is None else min(num_own, rows.total_for(stage.epochs))
    drawn = zip(stage.sources, stage.weights, rows.own.drawn(num_own), rows.own.counts, strict=True)
    return ", ".join(
        f"{100 * weight / sum(stage.weights):.3g} % of the tokens from {name} ({count:,} of its {total:,} rows, "
        f"{count / total:.2f} times all)"
        for name, weight, count, total in drawn
    )


def stage_steps(rows: ReplayedRows, stage: Stage, *, inputs: RunInputs, config: Config) -> int:
    """Return the optimizer steps of a stage that does not end early."""
    steps, global_rows = stage.steps, stage.geometry.global_rows
    if stage.epochs is not None and config.objective.samples_rollouts:
        steps = config.rollout.updates * rows.steps_for(stage.epochs, global_rows=config.rollout.prompts)
    elif stage.epochs is not None:
        steps = rows.steps_for(stage.epochs, global_rows=global_rows)
    tokens = stage_tokens(stage, num_parameters=inputs.num_parameters)
    if tokens is not None:
        steps = math.ceil(tokens / (global_rows * tokens_per_row(inputs, stage)))
    assert steps is not None
    return min(steps, config.trainer.max_stage_steps or steps)


def stage_tokens(stage: Stage, *, num_parameters: int | None) -> float | None:
    """Return the tokens that a stage's length is given by; None for one given in steps or epochs.

    Args:
        num_parameters: `parameters_of_lengths` of the run's model.
    """
    if stage.tokens_per_parameter is None:
        return stage.tokens
    assert num_parameters is not None, "`parameters_of_lengths` counts them"
    return stage.tokens_per_parameter * num_parameters


def parameters_of_lengths(stages: Sequence[Stage], *, source: Callable[[], HuggingFaceModel]) -> int | None:
    """Count the model's parameters, without adapters, where a stage's length depends on them; no weight is read.

    Args:
        source: makes the model's source, if that is so.
    """
    if all(stage.tokens_per_parameter is None for stage in stages):
        return None
    return sum(p.numel() for p in source().empty().parameters())


def num_steps(inputs: RunInputs, stage: Stage, *, config: Config) -> int:
    """Return `stage_steps` for the rows of `stage_rows`."""
    return stage_steps(stage_rows(inputs, stage, config=config), stage, inputs=inputs, config=config)


def steps_by_stage(inputs: RunInputs, *, config: Config) -> dict[str, int]:
    """Return `num_steps` of every stage by name, in order."""
    return {stage.name: num_steps(inputs, stage, config=config) for stage in inputs.stages}


def tokens_per_row(inputs: RunInputs, stage: Stage) -> float:
    """Return the mean tokens per row of a stage, without padding."""
    own, replayed = (
        _mean_tokens(inputs, names, stage.geometry.seq_len, weights=weights)
        for names, weights in ((stage.sources, stage.weights), (stage.replay_sources, stage.replay_weights))
    )
    return (1 - stage.replay) * own + stage.replay * replayed


def _mean_tokens(inputs: RunInputs, names: Sequence[str], seq_len: int, *, weights: Sequence[float]) -> float:
    splits = [inputs.sources[name].manifests[seq_len]["splits"]["train"] for name in names]
    if weights:
        shares = _row_shares(inputs, names, weights=weights, seq_len=seq_len)
        return float(sum(share * split["tokens"] / split["rows"] for share, split in zip(shares, splits, strict=True)))
    return sum(split["tokens"] for split in splits) / max(1, sum(split["rows"] for split in splits))


class BatchedRows(Protocol):
    """What steps are fed from: rows of prepared data in their order, or of a rollout."""

    def batch(self, step: int, *, global_rows: int, num_total: int | None = None) -> Batch:
        """Return the batch of a step of the stage, as `OrderedRows.batch` does."""
        ...

    def total_for(self, epochs: float) -> int | None:
        """Return the number of positions in that many epochs; None where all have rows."""
        ...


def step_batches(
    rows: BatchedRows,
    stage: Stage,
    *,
    num_steps: int,
    config: Config,
    first: int,
    stop: int | None = None,
    process: tuple[int, int],
    added: Mapping[str, Tensor],
    draws: bool,
    skipped_steps: Collection[int] = (),
) -> Iterator[tuple[StepInfo, dict[str, Tensor]]]:
    """Yield the batches of a stage from step `first` up to `stop`, or its last; `process` is (rank, world size).

    A batch depends on its step alone: a resumed run, on whatever devices, continues with the next row. The steps
    `skipped_steps` count in the schedule and have no batch. `added` goes into every batch (training/step.py).

    Args:
        draws: whether every row has a random word.
    """
    geometry = stage.geometry
    total = None if stage.epochs is None else rows.total_for(stage.epochs)
    last = next((step for step in range(num_steps - 1, first, -1) if step not in skipped_steps), first)
    for step in range(first, num_steps if stop is None else stop):
        if step in skipped_steps:
            continue
        lr = stage.lr * multiplier(stage.schedule, step=step, num_steps=num_steps)
        whole = trim_padding(rows.batch(step, global_rows=geometry.global_rows, num_total=total), config=config)
        whole = with_all_tokens_learnt(whole) if stage.learn == "all" else whole
        whole = with_step_noise(whole, stage.index, step, config=config) if draws else whole
        mine = whole.slice_process(*process)
        info = StepInfo(step, lr, mine.labels, whole.labels, whole.num_tokens, step == last, _examples(whole, config))
        mix = quantised_share(config, stage=stage.index, step=step)
        tensors = training_tensors(mine, geometry, lr=lr, mix=mix, inputs=config.objective.inputs())
        yield info, {**tensors, **added}


def training_tensors(
    batch: Batch,
    geometry: Geometry,
    *,
    lr: float,
    mix: float | None = None,
    inputs: Mapping[str, float] | None = None,
) -> dict[str, Tensor]:
    """Return a process's rows as (A, R, T) int32, noise as (A, R), learning rate as (1,) float32.

    Args:
        mix: `quantised_share`, the same for every row: (A, R) float32.
        inputs: settings of the objective that rows carry, (A, R) float32 each.
    """
    host = host_tensors(batch, inputs=inputs)
    tensors = {name: tensor.reshape(geometry.accumulation, -1, *tensor.shape[1:]) for name, tensor in host.items()}
    if mix is not None:
        tensors[MIX] = torch.full(tensors["ids"].shape[:2], mix, dtype=torch.float32)
    return tensors | {"lr": torch.tensor([lr], dtype=torch.float32)}


def quantised_share(config: Config, *, stage: int, step: int) -> float | None:
    """Return the share of quantised values at a step of a stage; None in a run without such a warm-up.

    It rises linearly from 0 at the first step to 1 after `model.linear_warmup_steps` of the first stage.
    """
    num_steps = config.model.linear_warmup_steps
    if not num_steps:
        return None
    return min(1.0, step / num_steps) if stage == 0 else 1.0


def first_mix(config: Config) -> float | None:
    """Return the share of quantised values for the first gradients, which compares them as they are trained at last."""
    return None if quantised_share(config, stage=0, step=0) is None else 1.0


def has_noise(config: Config, module: nn.Module) -> bool:
    """Return whether training rows have a random word each: for dropout, of adapters or the model's own, or draws."""
    return (config.lora.r > 0 and config.lora.dropout > 0) or objective_class(config).draws or drops_by_rows(module)


def with_step_noise(batch: Batch, stage: int, step: int, *, config: Config) -> Batch:
    """Return the global batch with a random word for every row.

    Words depend on seed, stage, step and the row's index in the global batch: on no device, process or micro-batch.
    """
    return with_noise(batch, seed=config.seed, index=stage << 32 | step, is_spread=objective_class(config).spread_draws)


def with_noise(batch: Batch, *, seed: int, index: int, is_spread: bool = False) -> Batch:
    """Return the batch with a random word for every row, a function of the seed, the batch's index and the row's.

    Args:
        is_spread: the words of a batch are equally spaced behind the first one, modulo 2**32, so that their values are
            those of a low-discrepancy sampler (arXiv 2107.00630); each by itself is uniform.
    """
    key = np.array([seed % 2**64, index], np.uint64)
    words_G = random_words(batch.num_rows, key=key, counter=NOISE_STREAM)
    if is_spread:
        places_G = (np.arange(batch.num_rows, dtype=np.uint64) << np.uint64(32)) // np.uint64(batch.num_rows)
        words_G = words_G[:1] + places_G.astype(np.uint32).view(np.int32)
    return replace(batch, noise_G=words_G)


def trim_padding(batch: Batch, *, config: Config) -> Batch:
    """Trim positions that are padding in all rows of the global batch, with `prepare.packing=none`."""
    return trimmed(batch, multiple=config.loader.pad_multiple) if config.prepare.packing == "none" else batch


def evaluation_batches(inputs: RunInputs, config: Config) -> dict[str, Iterable[Batch]]:
    """Return every source's held-out batches of one shape, at most `trainer.max_eval_rows` rows in all."""
    per_source = most_held_out(inputs, config)
    global_rows = evaluation_rows(inputs.stages)
    held_out = {name: inputs.rows(name, "evaluation", inputs.eval_seq_len) for name in inputs.sources}
    return {
        name: with_held_out_noise(
            name,
            (
                trim_padding(b, config=config)
                for b in fixed_batches(rows.take(slice(0, per_source)), global_rows=global_rows)
            ),
            config=config,
        )
        for name, rows in held_out.items()
        if rows.num_rows
    }


def most_held_out(inputs: RunInputs, config: Config) -> int:
    """Return the largest number of a source's rows in evaluations."""
    return max(1, config.trainer.max_eval_rows // len(inputs.sources))


def referred_rows(inputs: RunInputs, config: Config) -> dict[Key, tuple[RowSource, int]]:
    """Return the rows of training and of evaluations without a reference, and those of a batch of its pass.

    It is a micro-batch of the stage on every device, whose logits fit.
    """
    found: dict[Key, tuple[RowSource, int]] = {}
    for stage in inputs.stages:
        geometry = stage.geometry
        for name in (*stage.sources, *stage.replay_sources):
            rows = inputs.sources[name].store("train", geometry.seq_len)
            found[name, "train", geometry.seq_len] = rows, geometry.micro_rows * geometry.num_shards
    for name, source in inputs.sources.items():
        held_out = source.store("evaluation", inputs.eval_seq_len)
        few = held_out.take(slice(0, most_held_out(inputs, config)))
        if few.num_rows:
            found[name, "evaluation", inputs.eval_seq_len] = few, evaluation_rows(inputs.stages)
    return found


def with_held_out_noise(name: str, batches: Iterable[Batch], *, config: Config) -> Iterable[Batch]:
    """Yield batches with the same random words in every evaluation, where the objective draws."""
    if not objective_class(config).draws:
        return batches
    first = HELD_OUT_STREAM + (zlib.crc32(name.encode()) << 24)
    return (
        with_noise(batch, seed=config.seed, index=first + number, is_spread=objective_class(config).spread_draws)
        for number, batch in enumerate(batches)
    )


def evaluation_rows(stages: Sequence[Stage]) -> int:
    """Return the rows of an evaluation batch.

    They are a micro-batch of the first stage with the longest rows, on every device.
    """
    longest = max((stage.geometry for stage in stages), key=lambda geometry: geometry.seq_len)
    return longest.micro_rows * longest.num_shards


def program_shapes(inputs: RunInputs, config: Config, *, world_size: int) -> dict[str, set[tuple[int, ...]]]:
    """Return each program's shapes of token ids in one process, for a whole run, by program name.

    Training takes (A, R, T) of each stage; evaluation one (R, T); the sample its window, and so do questions. With a
    cache both are read and written by one program each.
    """
    geometries = [stage.geometry for stage in inputs.stages]
    rows = evaluation_rows(inputs.stages) // world_size
    return {
        "train": {(g.accumulation, g.micro_rows * g.num_shards // world_size, g.seq_len) for g in geometries},
        "evaluate": {(rows, inputs.eval_seq_len)},
        "reference": _reference_shapes(inputs, config, world_size=world_size),
        **_text_shapes(inputs, config, rollouts=_rollout_shapes(inputs, config, world_size=world_size)),
    }


def _text_shapes(inputs: RunInputs, config: Config, *, rollouts: dict[str, Shapes]) -> dict[str, Shapes]:
    """Return the shapes of rollouts, samples and questions."""
    if inputs.lengths is None:
        window = config.sample.window
        sampled: Shapes = {(len(config.sample.all_prompts), window)} if samples(config) else set()
        asked: Shapes = {(QUESTION_ROWS, window)} if config.questions else set()
        return {**rollouts, "sample": sampled, "ask": asked}
    merged: dict[str, Shapes] = {"merge averages" if config.optim.is_averaged else "merge": {()}}
    own = inputs.lengths.shapes | merged
    return {name: rollouts.get(name, set()) | own.get(name, set()) for name in (*rollouts, *own)}


TOKENS_PER_CALL = 32
"""Tokens of answers that one call of a program writes; whether all have ended is looked at behind each."""
BUCKET = 64
"""Prompts are padded to a multiple of it, or to the largest length that leaves room for an answer."""


def prompt_bucket(inputs: RunInputs, config: Config) -> int:
    """Return the length that all prompts of a run are padded to."""
    most = max(config.rollout.prompt_tokens(stage.geometry.seq_len) for stage in inputs.stages)
    if not inputs.prompts:  # of a plan, whose data is not prepared
        return most
    each = (prompt for found in inputs.prompts.values() for prompt in (*found.train, *found.held_out))
    return min(most, -(-max(len(prompt.ids) for prompt in each) // BUCKET) * BUCKET)


def scores_rollouts(config: Config) -> bool:
    """Return whether the model scores a rollout before it learns from it.

    For one update, the log-probabilities of the own sampler at temperature 1 are those of the model in float32. In
    bf16 it writes with weights that were rounded with the adapter in them.
    """
    rollout = config.rollout
    is_exact = rollout.sampler == "own" and rollout.temperature == 1 and config.model.dtype == "float32"
    return rollout.updates > 1 or not is_exact


def _rollout_shapes(inputs: RunInputs, config: Config, *, world_size: int) -> dict[str, set[tuple[int, ...]]]:
    if not config.objective.samples_rollouts:
        return {}
    geometries = [stage.geometry for stage in inputs.stages]
    found: dict[str, set[tuple[int, ...]]] = {}
    if config.objective.reads_start() or scores_rollouts(config):
        found["score"] = {(g.micro_rows * g.num_shards // world_size, g.seq_len) for g in geometries}
    if config.rollout.sampler == "own":
        rollout, bucket = config.rollout, prompt_bucket(inputs, config)
        found["merge"] = {()}
        if config.optim.is_averaged:
            found["merge averages"] = {()}
        how = {"max_new_tokens": rollout.max_new_tokens, "tokens_per_call": TOKENS_PER_CALL}
        found |= decoder_shapes([bucket], num_rows=rollout.num_rows, **how)
    return found


def _reference_shapes(inputs: RunInputs, config: Config, *, world_size: int) -> set[tuple[int, ...]]:
    if not config.objective.reads_reference():
        return set()
    geometries = [stage.geometry for stage in inputs.stages]
    own = {(g.micro_rows * g.num_shards // world_size, g.seq_len) for g in geometries}
    return own | {(evaluation_rows(inputs.stages) // world_size, inputs.eval_seq_len)}


def expected_programs(inputs: RunInputs, config: Config) -> int:
    """Count the compiled programs of a run: one per training shape, evaluation, sample and questions.

    None are compiled in plain torch.
    """
    if config.hw.runtime == "eager":
        return 0
    return sum(len(shapes) for shapes in program_shapes(inputs, config, world_size=1).values())
