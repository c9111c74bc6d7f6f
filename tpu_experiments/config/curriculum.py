"""From the configured curriculum to stages with every value settled, and the batch geometry of each.

Pure arithmetic, so that the checks, the trainer and the plan all read the same stages.
"""

from dataclasses import dataclass

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.schema import Config, ScheduleConfig, StageConfig


@dataclass(frozen=True)
class Geometry:
    """How one global batch is cut: `global_rows = accumulation * micro_rows * num_shards`."""

    global_rows: int
    micro_rows: int
    accumulation: int
    num_shards: int
    """Devices, or groups of `sharding.mesh.tensor` devices, that rows are split over."""
    seq_len: int


@dataclass(frozen=True)
class Stage:
    """One stage with every value settled; exactly one of `steps` and `epochs` is set."""

    name: str
    index: int
    sources: tuple[str, ...]
    geometry: Geometry
    steps: int | None
    epochs: float | None
    lr: float
    schedule: ScheduleConfig
    optimizer: str


def resolve_stages(config: Config) -> list[Stage]:
    """Settle every stage that has a source.

    Raises:
        ConfigError: unknown source, no stage left, neither or both of steps and epochs, batch not divisible; all
            problems of all stages together.
    """
    chosen = {name: _stage_sources(config, name, stage) for name, stage in config.curriculum.stages.items()}
    if not any(chosen.values()):
        raise ConfigError(
            f"curriculum={config.curriculum.name}; no stage has a source among data="
            f"[{', '.join(config.data)}]; select a source of the kind a stage asks for, or curriculum=single."
        )
    names = [name for name, sources in chosen.items() if sources]
    problems = [problem for name in names for problem in _stage_problems(config, name)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return [_settle(config, name, index, chosen[name]) for index, name in enumerate(names)]


def skipped_stages(config: Config) -> list[str]:
    """Names of the stages that are left out because no selected source is of their kind."""
    return [name for name, stage in config.curriculum.stages.items() if not _stage_sources(config, name, stage)]


def batch_geometry(config: Config, *, global_rows: int, seq_len: int, key: str) -> Geometry:
    """Cut a global batch over the devices; `key` names the setting in an error.

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
    micro = config.trainer.micro_batch_rows or per_device
    if per_device % micro:
        fits = ", ".join(str(n) for n in range(1, per_device + 1) if per_device % n == 0)
        raise ConfigError(
            f"trainer.micro_batch_rows={micro} does not divide the {per_device} rows that each of "
            f"{split_over} takes of {key}={global_rows}; use one of {fits}."
        )
    return Geometry(global_rows, micro, per_device // micro, shards, seq_len)


def _stage_sources(config: Config, name: str, stage: StageConfig) -> tuple[str, ...]:
    for source in stage.sources:
        if source not in config.data:
            raise ConfigError(
                f"curriculum.stages.{name}.sources=[{', '.join(stage.sources)}]; {source} is not selected by data=. "
                f"{suggest(source, config.data)}"
            )
    if stage.sources:
        return tuple(stage.sources)
    return tuple(n for n, source in config.data.items() if stage.kind in ("any", source.kind))


def _stage_problems(config: Config, name: str) -> list[str]:
    stage = config.curriculum.stages[name]
    key = f"curriculum.stages.{name}"
    problems = []
    if stage.steps is None and stage.epochs is None:
        problems.append(f"{key}.steps=null and {key}.epochs=null; the stage has no end; set one of the two.")
    if stage.steps is not None and stage.epochs is not None:
        problems.append(
            f"{key}.steps={stage.steps} and {key}.epochs={stage.epochs}; only one can end the stage; set the other "
            "to null."
        )
    try:
        _stage_geometry(config, name)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _stage_geometry(config: Config, name: str) -> Geometry:
    stage = config.curriculum.stages[name]
    own_batch = stage.global_batch_rows is not None
    return batch_geometry(
        config,
        global_rows=stage.global_batch_rows or config.trainer.global_batch_rows,
        seq_len=stage.seq_len or config.trainer.seq_len,
        key=f"curriculum.stages.{name}.global_batch_rows" if own_batch else "trainer.global_batch_rows",
    )


def _settle(config: Config, name: str, index: int, sources: tuple[str, ...]) -> Stage:
    stage = config.curriculum.stages[name]
    return Stage(
        name=name,
        index=index,
        sources=sources,
        geometry=_stage_geometry(config, name),
        steps=stage.steps,
        epochs=stage.epochs,
        lr=stage.lr or config.optim.lr or config.model.lr,
        schedule=stage.schedule or config.schedule,
        optimizer=stage.optimizer,
    )
