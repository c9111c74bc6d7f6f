"""How long a whole run is: its steps, and what a machine is paid for beside them."""

from collections.abc import Mapping, Sequence

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.schema import Config
from tpu_experiments.planning.money import RunLength, StageLength
from tpu_experiments.planning.timing import StepTime

READ_GIB_PER_SECOND = 0.25  # weights from a bucket or the Hub; assumed
SETUP_SECONDS = 180.0  # environment and start of a TPU VM; assumed
EVALUATION_SHARE = 1 / 3
"""Of a training step's time for the same rows: forward alone."""


def run_length(
    config: Config,
    stages: Sequence[Stage],
    *,
    steps: Mapping[str, int | None],
    times: Mapping[str, StepTime | None],
    base_gib: float,
) -> tuple[RunLength | None, list[str]]:
    """The run's length, and what was assumed; None where the steps or the time of a stage are not known.

    Args:
        steps: optimizer steps of every stage.
        times: of one step of every stage.
        base_gib: frozen weights of one chip.
    """
    lengths = []
    for stage in stages:
        time, num_steps = times[stage.name], steps[stage.name]
        if time is None or num_steps is None:
            return None, []
        tokens = num_steps * stage.geometry.global_rows * stage.geometry.seq_len
        lengths.append(StageLength(stage.name, num_steps, time.total_s, tokens, stage.epochs))
    total = sum(length.steps for length in lengths)
    every = config.trainer.eval_every_steps
    num_evaluations = 2 + (total // every if every else 0)
    longest = max(lengths, key=lambda length: length.step_seconds)
    rows = max(stage.geometry.global_rows for stage in stages)
    one = longest.step_seconds * config.trainer.max_eval_rows / rows * EVALUATION_SHARE
    notes = [
        f"an evaluation takes a third of a training step's time for its {config.trainer.max_eval_rows} rows (assumed)",
        f"weights are read at {READ_GIB_PER_SECOND} GiB/s and a machine starts in {SETUP_SECONDS:.0f} s (assumed)",
        "compile seconds of the TPU host are not added; checkpoints of adapters are written beside the steps",
    ]
    setup = SETUP_SECONDS + base_gib * config.hw.num_devices / READ_GIB_PER_SECOND
    return RunLength(tuple(lengths), eval_seconds=num_evaluations * one, setup_seconds=setup), notes
