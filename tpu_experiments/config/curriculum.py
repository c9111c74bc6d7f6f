"""Resolution of the configured curriculum into stages with all values set, with their batch geometry.

Pure arithmetic, so that the checks, the trainer and the plan all use the same stages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpu_experiments.config.defaults import LANES, fitting_rows, rows_of
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.schema import (
    Config,
    ExitTestConfig,
    ScheduleConfig,
    ScheduleFreeAdamWConfig,
    StageConfig,
    StageScheduleConfig,
)

FULL_LR = 0.1
"""Best learning rate of full fine-tuning relative to that of LoRA (Schulman et al., LoRA Without Regret, 2025)."""
LENGTHS = ("steps", "tokens", "tokens_per_parameter", "epochs")
"""Keys of a stage that set its length."""
MIN_TOKENS = 8
"""Fewest tokens of a row."""


@dataclass(frozen=True)
class Geometry:
    """Division of one global batch: `global_rows = accumulation * micro_rows * num_shards`."""

    global_rows: int
    micro_rows: int
    accumulation: int
    num_shards: int
    """Devices, or groups of `sharding.mesh.tensor` devices, that rows are split over."""
    seq_len: int


@dataclass(frozen=True)
class Stage:
    """One stage with all values resolved; exactly one of its four lengths is set."""

    name: str
    index: int
    sources: tuple[str, ...]
    geometry: Geometry
    steps: int | None
    epochs: float | None
    lr: float
    schedule: ScheduleConfig
    optimizer: str
    tokens: int | None = None
    tokens_per_parameter: float | None = None
    replay: float = 0.0
    replay_sources: tuple[str, ...] = ()
    """Replayed sources; not empty if `replay` is above 0."""
    weights: tuple[float, ...] = ()
    """`data.<name>.weight` of each of several sources, in their order; empty without weights or with one source.
    `replay_weights` are those of the replayed sources."""
    replay_weights: tuple[float, ...] = ()
    learn: str = "answers"
    trainable: tuple[str, ...] = ()
    weight_decay: float | None = None
    """Decay of this stage; None where no stage has one of its own, and `optim.weight_decay` is part of the program."""
    exit: ExitTestConfig = field(default_factory=ExitTestConfig)

    @property
    def watches(self) -> bool:
        """Return whether evaluations may end the stage or select its final parameters."""
        return self.exit.eval_loss is not None or self.exit.patience is not None or self.exit.ends_with == "best"


def resolve_stages(config: Config) -> list[Stage]:
    """Resolve every stage that has a source.

    Raises:
        ConfigError: a source is unknown, no stage has a source, several lengths are set, an exit test has no
            evaluations, weights or replay are inconsistent, or a batch does not divide; lists the problems of all
            stages together.
    """
    chosen = {name: _stage_sources(config, name, stage) for name, stage in config.curriculum.stages.items()}
    if not any(chosen.values()):
        raise ConfigError(
            f"curriculum={config.curriculum.name}; no stage has a source among data="
            f"[{', '.join(config.data)}]; select a source of the kind a stage asks for, or curriculum=single."
        )
    names = [name for name, sources in chosen.items() if sources]
    problems = [problem for name in names for problem in _stage_problems(config, name)]
    problems += _weight_problems(config, chosen)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return [_settle(config, name, index, chosen) for index, name in enumerate(names)]


def skipped_stages(config: Config) -> list[str]:
    """Return the names of the stages without a selected source of their kind."""
    return [name for name, stage in config.curriculum.stages.items() if not _stage_sources(config, name, stage)]


def batch_geometry(
    config: Config, *, global_rows: int, seq_len: int, key: str, micro_rows: int | None = None
) -> Geometry:
    """Divide a global batch over the devices, and a device's rows into micro-batches.

    `micro_rows` None chooses the largest micro-batch of up to `model.micro_tokens`. `key` names the setting in an
    error.

    Raises:
        ConfigError: the batch does not divide by the devices, or a device's rows by the micro-batch.
    """
    shards = num_shards(config)
    split_over = f"hw.num_devices={config.hw.num_devices}"
    if shards < config.hw.num_devices:
        split_over = f"{shards}, the devices of {split_over} along sharding.mesh.data and fsdp"
    if global_rows % shards:
        below = global_rows // shards * shards
        fits = f"{below} or {below + shards}" if below else f"{shards}"
        raise ConfigError(f"{key}={global_rows} is not a multiple of {split_over} (hw={config.hw.name}); use {fits}.")
    per_device = global_rows // shards
    micro = micro_rows or fitting_rows(per_device, seq_len=seq_len, at_most=config.model.micro_tokens)
    if per_device % micro:
        fits = ", ".join(str(n) for n in range(1, per_device + 1) if per_device % n == 0)
        raise ConfigError(
            f"trainer.micro_batch_rows={config.trainer.micro_batch_rows} does not divide the {per_device} rows that "
            f"each of {split_over} takes of {key}={global_rows}; use one of {fits}."
        )
    return Geometry(global_rows, micro, per_device // micro, shards, seq_len)


def _stage_sources(config: Config, name: str, stage: StageConfig) -> tuple[str, ...]:
    lists = {"sources": stage.sources, "replay_sources": stage.replay_sources, "exit.sources": stage.exit.sources}
    for key, sources in lists.items():
        for source in sources:
            if source not in config.data:
                raise ConfigError(
                    f"curriculum.stages.{name}.{key}=[{', '.join(sources)}]; {source} is not selected by data=. "
                    f"{suggest(source, config.data)}"
                )
    if stage.sources:
        return tuple(stage.sources)
    return tuple(n for n, source in config.data.items() if stage.kind in ("any", source.kind))


def _stage_problems(config: Config, name: str) -> list[str]:
    stage = config.curriculum.stages[name]
    key = f"curriculum.stages.{name}"
    problems = _length_problems(stage, key) + _exit_problems(config, stage, key) + _schedule_problems(config, name)
    if stage.replay and not stage.replay_sources and name == next(iter(config.curriculum.stages)):
        problems.append(
            f"{key}.replay={stage.replay}; no stage is before it whose data could be replayed; name replay_sources, or "
            "set it to 0."
        )
    problems += [
        f"{key}.replay_sources has {source}, which is one of the stage's own sources; leave it out."
        for source in stage.replay_sources
        if source in _stage_sources(config, name, stage)
    ]
    try:
        _stage_geometry(config, name)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _length_problems(stage: StageConfig, key: str) -> list[str]:
    given = {n: getattr(stage, n) for n in LENGTHS if getattr(stage, n) is not None}
    if len(given) > 1:
        shown = " and ".join(f"{key}.{name}={value}" for name, value in given.items())
        return [f"{shown}; only one can end the stage; set the other to null."]
    return []


def _exit_problems(config: Config, stage: StageConfig, key: str) -> list[str]:
    test, every = stage.exit, config.trainer.eval_every_steps
    asked = {"eval_loss": test.eval_loss, "patience": test.patience}
    shown = [f"{key}.exit.{name}={value}" for name, value in asked.items() if value is not None]
    shown += [f"{key}.exit.ends_with=best"] if test.ends_with == "best" else []
    if shown and every == 0:
        return [
            f"{shown[0]} uses evaluations, and trainer.eval_every_steps=0 makes none between the first and the last "
            "step; set trainer.eval_every_steps=."
        ]
    return []


def _stage_geometry(config: Config, name: str) -> Geometry:
    stage = config.curriculum.stages[name]
    own_batch = stage.global_batch_rows is not None
    of_run = rows_of(config)
    rows, seq_len = stage.global_batch_rows or of_run.global_rows, stage.seq_len or of_run.seq_len
    if seq_len % stage.shorter or seq_len // stage.shorter < MIN_TOKENS:
        fits = [str(n) for n in range(1, seq_len // MIN_TOKENS + 1) if seq_len % n == 0]
        raise ConfigError(
            f"curriculum.stages.{name}.shorter={stage.shorter} does not divide rows of {seq_len} tokens into rows of "
            f"{MIN_TOKENS} or more; use one of {', '.join(fits)}."
        )
    return batch_geometry(
        config,
        global_rows=rows * stage.shorter,
        seq_len=seq_len // stage.shorter,
        micro_rows=config.trainer.micro_batch_rows and config.trainer.micro_batch_rows * stage.shorter,
        key=f"curriculum.stages.{name}.global_batch_rows" if own_batch else _key_of_rows(config),
    )


def _key_of_rows(config: Config) -> str:
    """Return the setting that the rows of a step are from, where the stage has none."""
    is_of_rollout = config.objective.samples_rollouts and config.trainer.global_batch_rows is None
    return "rollout.prompts x samples / updates" if is_of_rollout else "trainer.global_batch_rows"


def _settle(config: Config, name: str, index: int, chosen: Mapping[str, tuple[str, ...]]) -> Stage:
    stage, own = config.curriculum.stages[name], chosen[name]
    replayed = tuple(stage.replay_sources) or _sources_before(name, chosen)
    return Stage(
        name=name,
        index=index,
        sources=own,
        geometry=_stage_geometry(config, name),
        steps=stage.steps,
        epochs=_epochs(config, stage, sources=own),
        lr=_lr(config, stage),
        schedule=_schedule(config, stage),
        optimizer=stage.optimizer,
        tokens=stage.tokens,
        tokens_per_parameter=stage.tokens_per_parameter,
        replay=stage.replay if replayed else 0.0,
        replay_sources=replayed if stage.replay else (),
        weights=_weights(config, own),
        replay_weights=_weights(config, replayed) if stage.replay else (),
        learn=stage.learn,
        trainable=tuple(stage.trainable),
        weight_decay=_weight_decay(config, stage),
        exit=stage.exit,
    )


def _weight_decay(config: Config, stage: StageConfig) -> float | None:
    """Return the decay of a stage, where any of them has one of its own."""
    if all(each.weight_decay is None for each in config.curriculum.stages.values()):
        return None
    return config.optim.weight_decay if stage.weight_decay is None else stage.weight_decay


def _weights(config: Config, sources: Sequence[str]) -> tuple[float, ...]:
    """Return the weights of several sources; empty if one lacks a weight, or for a single source."""
    weights = [config.data[name].weight for name in sources]
    found = tuple(weight for weight in weights if weight is not None)
    return found if len(found) == len(sources) > 1 else ()


def _weight_problems(config: Config, chosen: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return problems of source weights that a stage cannot apply, or that no stage uses."""
    problems, used = [], set[str]()
    for name, own in chosen.items():
        stage = config.curriculum.stages[name]
        replayed = (tuple(stage.replay_sources) or _sources_before(name, chosen)) if stage.replay else ()
        for key, sources in (
            (f"curriculum.stages.{name}", own),
            (f"curriculum.stages.{name}.replay_sources", replayed),
        ):
            given = [source for source in sources if config.data[source].weight is not None]
            without = [source for source in sources if source not in given]
            if given and without:
                problems.append(
                    f"data.{given[0]}.weight={config.data[given[0]].weight}; {key} takes {', '.join(sources)}, and "
                    f"{', '.join(without)} has no weight; give every source of a stage one, or none."
                )
            used |= set(given if len(sources) > 1 else [])
    every = {source for own in chosen.values() for source in own}
    problems += [
        f"data.{source}.weight={config.data[source].weight}; no stage of curriculum={config.curriculum.name} draws "
        f"from {source} beside another source, so the weight would do nothing; use curriculum=single, or leave it out."
        for source in config.data
        if source in every and source not in used and config.data[source].weight is not None
    ]
    if used and config.loader.order == "written":
        problems.append(
            f"loader.order=written with data.{min(used)}.weight={config.data[min(used)].weight}; epochs are written "
            "with every row once; use loader.order=permutation."
        )
    return problems


def _lr_of_model(config: Config) -> float:
    """Return the peak learning rate for adapters on the model; a tenth of it for all pretrained weights."""
    trains_pretrained = config.lora.r == 0 and config.model.init == "pretrained" and config.model.size == "full"
    return config.model.lr * (FULL_LR if trains_pretrained else 1.0) * config.objective.lr_factor


def _epochs(config: Config, stage: StageConfig, *, sources: Sequence[str]) -> float | None:
    """Return the epochs of a stage; if its length is unset, the fewest that its sources ask for."""
    if all(getattr(stage, name) is None for name in LENGTHS):
        return min(config.data[name].epochs for name in sources)
    return stage.epochs


def _schedule(config: Config, stage: StageConfig) -> ScheduleConfig:
    """Return the run's schedule with the values that the stage sets, and its `min_lr` as `floor`."""
    found = _with_stage(config.schedule, stage.schedule)
    return found if found.min_lr is None else replace(found, floor=found.min_lr / _lr(config, stage))


def _with_stage(own: ScheduleConfig, of_stage: StageScheduleConfig) -> ScheduleConfig:
    """Return the run's schedule with the values that the stage sets.

    One that the run sets by another key, as a warm-up in steps or as a share, gives way to the stage's.
    """
    given = {name: value for name, value in vars(of_stage).items() if value is not None}
    for key, other in (("warmup_steps", "warmup_ratio"), ("warmup_ratio", "warmup_steps"), ("floor", "min_lr")):
        if key in given and other not in given:
            given[other] = None
    return replace(own, **given)


OF_SHAPE = {
    "decay_shape": "wsd",
    "cycles": "cosine_with_restarts",
    "power": "polynomial",
    "timescale": "inverse_sqrt",
}
"""Keys of a schedule that one shape alone reads, with that shape."""


def _schedule_problems(config: Config, name: str) -> list[str]:
    """Return what contradicts itself in a stage's schedule, or would do nothing."""
    stage, own, key = config.curriculum.stages[name], config.schedule, f"curriculum.stages.{name}.schedule"
    found, lr, problems, unset = _with_stage(own, stage.schedule), _lr(config, stage), [], ScheduleConfig()
    if found.warmup_steps is not None and found.warmup_ratio is not None:
        place = "schedule" if stage.schedule.warmup_steps is None else key
        problems.append(
            f"{place}.warmup_steps={found.warmup_steps} and {place}.warmup_ratio={found.warmup_ratio:g}; both set the "
            "length of the warm-up; set one of them to null."
        )
    if stage.schedule.floor is not None and stage.schedule.min_lr is not None:
        problems.append(
            f"{key}.floor={stage.schedule.floor:g} and {key}.min_lr={stage.schedule.min_lr:g}; both set the end of the "
            "decay; leave one of them out."
        )
    if found.min_lr is not None and found.min_lr > lr:
        place = "schedule" if stage.schedule.min_lr is None else key
        problems.append(
            f"{place}.min_lr={found.min_lr:g} is above the peak of stage {name}, {lr:g}; set at most that, or raise "
            "optim.lr."
        )
    if found.min_lr and found.name == "constant":
        problems.append(f"schedule.min_lr={found.min_lr:g} with the schedule constant of stage {name}; it never falls.")
    if config.optim._target_ == ScheduleFreeAdamWConfig._target_ and found.name != "constant":
        place = "schedule" if stage.schedule.name is None else f"{key}.name"
        problems.append(
            f"{place}={found.name} with optim=schedule_free_adamw, whose average is in the place of a decay (arXiv "
            f"2405.15682); use {place}=constant, or optim=adamw."
        )
    shapes = {_with_stage(own, each.schedule).name for each in config.curriculum.stages.values()}
    for part, shape in OF_SHAPE.items():
        given = getattr(stage.schedule, part)
        if given is not None and found.name != shape:
            problems.append(f"{key}.{part}={given} with the schedule {found.name}; it is a key of {shape} alone.")
        if getattr(own, part) != getattr(unset, part) and shape not in shapes:
            problems.append(
                f"schedule.{part}={getattr(own, part)} with schedule={own.name}; it is a key of {shape} alone."
            )
    return problems


def _lr(config: Config, stage: StageConfig) -> float:
    """Return the peak learning rate of a stage."""
    return stage.lr or config.optim.lr or _lr_of_model(config)


def _sources_before(name: str, chosen: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the distinct sources of the earlier stages, without the stage's own."""
    names = list(chosen)
    before = dict.fromkeys(source for other in names[: names.index(name)] for source in chosen[other])
    return tuple(source for source in before if source not in chosen[name])


def long_warmups(stages: Sequence[Stage], steps: Mapping[str, int]) -> list[str]:
    """Return a warning for each stage whose warm-up leaves no step at the peak of its learning rate.

    Args:
        steps: optimizer steps of each stage, by name.
    """
    return [
        f"{_warmup(stage.schedule)} with {steps[stage.name]} steps in stage {stage.name}: "
        "the rate rises over all of them and never falls; set a smaller number, or null for 3 % of the stage"
        for stage in stages
        if max(stage.schedule.warmup_steps or 0, math.ceil((stage.schedule.warmup_ratio or 0) * steps[stage.name]))
        >= steps[stage.name]
    ]


def _warmup(schedule: ScheduleConfig) -> str:
    """Return the key of a schedule that sets the warm-up, with its value."""
    key = "warmup_steps" if schedule.warmup_ratio is None else "warmup_ratio"
    return f"schedule.{key}={getattr(schedule, key)}"


def uneven_rows(stages: Sequence[Stage]) -> list[str]:
    """Return a warning for each row length that a TPU pads internally."""
    lengths = dict.fromkeys(stage.geometry.seq_len for stage in stages)
    return [
        f"rows of {length} tokens are no multiple of {LANES}, the width of a TPU's tiles, so they are computed as "
        f"{-(-length // LANES) * LANES}; use that many (trainer.seq_len, or seq_len of the stage)"
        for length in lengths
        if length % LANES
    ]
