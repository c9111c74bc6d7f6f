"""Defaults that depend on model, data and run length: row length, rows per step and logging intervals.

Pure arithmetic: the checks and the plan use the lengths configured for a source, a run the lengths that it measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.schema import Config

AUTO = "auto"
OPEN = ("seq_len", "global_batch_rows")
"""Keys of `trainer` whose values may be derived from the data."""
LANES = 128
"""Lanes of a TPU tile (jax.dev, Pallas TPU details); shorter rows are padded to this length internally."""
SMALL_STEP_TOKENS = 8192
"""Fewest tokens that a step is reduced to for small data: QLoRA's 16 rows of 512 (arXiv 2305.14314, table 9)."""
STEPS_OF_AN_EPOCH = 40
"""Fewest steps of an epoch, unless steps would be below `SMALL_STEP_TOKENS`; three epochs are then 120 updates."""


@dataclass(frozen=True)
class Lengths:
    """Known lengths of a source's documents, in tokens of the model's tokenizer."""

    row: int | None
    """Length that its rows should have at least; None if unknown."""
    total: int | None
    """Tokens of all documents; None if unknown."""
    held: int | None = None
    """Length of the longest documents that these rows are to hold whole; None if unknown."""


@dataclass(frozen=True)
class Rows:
    """Tokens per row, and rows per optimizer step over all devices."""

    seq_len: int
    global_rows: int


def is_open(config: Config) -> bool:
    """Return whether row length or rows per step are left to the data."""
    return config.trainer.seq_len == AUTO or config.trainer.global_batch_rows is None


def rows_of(config: Config, measured: Mapping[str, Lengths] | None = None) -> Rows:
    """Return the rows of a run, by the lengths of its sources where they are open.

    Args:
        measured: lengths by source; by default those given in `data.<name>`.
    """
    lengths = _known(config) if measured is None else measured
    trainer = config.trainer
    seq_len = trainer.seq_len if isinstance(trainer.seq_len, int) else _row_tokens(config, lengths)
    if config.objective.samples_rollouts:
        return Rows(seq_len, trainer.global_batch_rows or config.rollout.step_rows)
    return Rows(seq_len, trainer.global_batch_rows or _global_rows(config, lengths, seq_len=seq_len))


def with_lengths(config: Config, measured: Mapping[str, Lengths] | None) -> Config:
    """Return the config with all open values set; arguments as of `rows_of`."""
    rows = rows_of(config, measured)
    return replace(config, trainer=replace(config.trainer, seq_len=rows.seq_len, global_batch_rows=rows.global_rows))


def fitting_rows(per_device: int, *, seq_len: int, at_most: int) -> int:
    """Return the largest divisor of a device's rows with at most `at_most` tokens, at least 1."""
    return max(n for n in range(1, per_device + 1) if per_device % n == 0 and (n == 1 or n * seq_len <= at_most))


def _known(config: Config) -> dict[str, Lengths]:
    if config.data_size == "sample":
        return {}
    return {name: Lengths(source.p95_tokens, source.total_tokens) for name, source in config.data.items()}


def _row_tokens(config: Config, lengths: Mapping[str, Lengths]) -> int:
    """Return a multiple of `LANES` with room for what the rows of every source should hold, limited by the model."""
    known = [lengths[name].row if name in lengths else None for name in config.data]
    longest = None if None in known else max((n for n in known if n is not None), default=None)
    if config.objective.samples_rollouts:
        prompt = config.rollout.max_prompt_tokens or longest  # a conversation's, with the answer that it has
        longest = None if prompt is None else prompt + config.rollout.max_new_tokens
    limits = [config.model.row_tokens, *_position_limits(config)]
    wanted = limits if longest is None else [-(-longest // LANES) * LANES, *limits]
    return min(wanted)


def _position_limits(config: Config) -> list[int]:
    arch = {**config.model.arch, **(config.model.tiny_arch if config.model.size == "tiny" else {})}
    limit = arch.get("max_position_embeddings")
    return [limit] if isinstance(limit, int) else []


def _global_rows(config: Config, lengths: Mapping[str, Lengths], *, seq_len: int) -> int:
    """Return a power of two per data shard, so that micro-batches of any size divide it."""
    tokens = config.model.step_tokens
    if tokens > SMALL_STEP_TOKENS:
        totals = [found.total for found in lengths.values() if found.total is not None]
        few = min(totals) // STEPS_OF_AN_EPOCH if len(totals) == len(config.data) else tokens
        tokens = min(tokens, max(SMALL_STEP_TOKENS, few))
    shards = num_shards(config)
    per_device = max(1, tokens // (seq_len * shards))
    return shards * 2 ** (per_device.bit_length() - 1)


# ---- intervals ----------------------------------------------------------------------------------------------

ROUND = (1, 2, 5)
ASKED_EVERY = 50
"""Fewest steps between two evaluations that ask questions: 120 of them without a cache take as long as 8 steps."""


EVALUATIONS = 10
"""Evaluations of a run between its first step and its last, about, where they cost no more than `EVALUATION_BUDGET`."""
MOST_STEPS_APART = 1000
FORWARD_SHARE = 1 / 3
"""Share of a training step's time that an evaluation of the same tokens takes, being forward alone."""
EVALUATION_BUDGET = 0.1
"""Largest share of the time of all steps that evaluations take by default; half of it for samples at evaluations."""


@dataclass(frozen=True)
class Costs:
    """Costs of one evaluation and one sample in training steps, by the tokens that pass through the model."""

    evaluation: float
    sample: float
    num_ends: int
    """Evaluations that are always made: before the first step and after the last of each stage."""


@dataclass(frozen=True)
class Intervals:
    """Steps between log records, evaluations and checkpoints.

    For evaluations and checkpoints, 0 means none between the first step and the last.
    """

    log: int
    evaluate: int
    save: int
    samples: bool = True
    """Whether evaluations during training write samples."""
    capped: str = ""
    """What was reduced to keep within `EVALUATION_BUDGET`; empty if nothing was."""


def costs_of(
    config: Config, *, step_tokens: float, eval_tokens: float, num_stages: int, writes_samples: bool = True
) -> Costs:
    """Return the costs of evaluating.

    Args:
        step_tokens: mean tokens of a training step, padding included.
        eval_tokens: tokens of one evaluation, without rows of padding, whose number depends on the devices.
        writes_samples: whether the objective writes text at all.
    """
    sample = config.sample
    sampled = len(sample.all_prompts) * sample.window * sample.max_new_tokens if writes_samples else 0
    share = FORWARD_SHARE / step_tokens
    return Costs(share * eval_tokens, share * sampled, num_ends=1 + num_stages)


def intervals_of(config: Config, *, total_steps: int, costs: Costs | None = None) -> Intervals:
    """Return the configured intervals, with round numbers of steps in place of null.

    With `costs`, evaluations that nobody asked for take at most `EVALUATION_BUDGET` of the steps' time. Those that end
    a stage, choose a checkpoint, prune a sweep or ask questions are asked for.
    """
    log, evaluate, save = config.trainer.log_every_steps, config.trainer.eval_every_steps, config.checkpoint.every_steps
    evaluated = max(ASKED_EVERY if config.questions else 1, _one_digit(total_steps / EVALUATIONS))
    samples = config.sample.at != "ends"
    capped: list[str] = []
    costs = costs or Costs(0.0, 0.0, 0)
    num = total_steps // (evaluated if evaluate is None else evaluate or total_steps + 1)
    if config.sample.at == "auto" and num * costs.sample > EVALUATION_BUDGET / 2 * total_steps:
        samples = False
        capped.append(
            f"a sample costs about {costs.sample:.2g} steps, so none is written during training (sample.at=evaluations "
            "writes them)"
        )
    each = costs.evaluation + (costs.sample if samples else 0.0)
    left = EVALUATION_BUDGET * total_steps - costs.num_ends * costs.evaluation
    if evaluate is None and num * each > left and not _uses_evaluations(config):
        fewer = int(max(left, 0.0) / each)
        evaluated = math.ceil(total_steps / (fewer + 1)) if fewer else 0
        every = f"every {evaluated} steps" if fewer else "only before the first step and after each stage"
        capped.append(
            f"an evaluation costs about {each:.2g} steps of {total_steps}, so one is made {every} "
            "(trainer.eval_every_steps= sets it)"
        )
    return Intervals(
        log=_round(total_steps / 20, at_most=100) if log is None else log,
        evaluate=evaluated if evaluate is None else evaluate,
        save=max(50, _round(total_steps / 20, at_most=500)) if save is None else save,
        samples=samples,
        capped="; ".join(capped),
    )


def _uses_evaluations(config: Config) -> bool:
    """Return whether the run itself depends on its evaluations."""
    exits = (stage.exit for stage in config.curriculum.stages.values())
    ends = any(test.eval_loss is not None or test.patience is not None or test.ends_with == "best" for test in exits)
    return ends or config.checkpoint.keep_best > 0 or config.sweeping.prune != "none" or bool(config.questions)


def _one_digit(steps: float) -> int:
    """Return the steps rounded to one digit, at least 1 and at most `MOST_STEPS_APART`."""
    limited = min(steps, MOST_STEPS_APART)
    unit = 10 ** max(0, int(math.log10(max(limited, 1.0))))
    return max(1, math.floor(limited / unit + 0.5) * unit)


def _round(steps: float, *, at_most: int) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, ... that exceeds neither limit, at least 1."""
    limit = max(1.0, min(steps, at_most))
    return max(n * 10**power for n in ROUND for power in range(7) if n * 10**power <= limit)
