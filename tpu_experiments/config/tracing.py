"""Interval at which Python traces the programs of a run on torch_xla.

Replaying a recorded graph is correct only for steps that depend on no Python state: no branch on the step number, no
random number, no value read from the device. This project's own steps satisfy that. Other code cannot be checked, since
occasional traces may miss changes between them, so a run with custom code traces every step.
"""

from tpu_experiments.config.schema import Config

OWN = "tpu_experiments."
REPLAY_STEPS = 200
"""Steps between two traces of a run that replays: an unrolled trace of 1.3 s then adds 0.0065 s to a 0.55 s step
(7B)."""


def trace_interval(config: Config) -> int:
    """Return the mean number of calls from one trace of a program to the next.

    It is 1 for a run with custom code, and for folded layers on a TPU, whose trace takes 8 to 53 % of the step and runs
    in parallel. A trace of unrolled layers takes longer than the device's step, the CPU device computes on the same
    cores that trace, and a step on the model's own answers waits for them, so these replay.
    """
    given = config.trainer.trace_every_steps
    if given is not None:
        return given
    if foreign_code(config):
        return 1
    waits = config.model.stack == "unrolled" or config.hw.device == "cpu" or config.objective.samples_rollouts
    return REPLAY_STEPS if waits else 1


def foreign_code(config: Config) -> list[str]:
    """Return the keys, with their values, that bring code of other packages into the steps of a run."""
    targets = {
        "trainer._target_": config.trainer._target_,
        "objective._target_": config.objective._target_,
        "optim._target_": config.optim._target_,
        "model._target_": config.model._target_,
    }
    found = [f"{key}={target}" for key, target in targets.items() if not target.startswith(OWN)]
    found += [f"plugins={config.plugins}"] if config.plugins else []
    return found + (["model.remote_code=run"] if config.model.remote_code == "run" else [])


def tracing_problems(config: Config) -> list[str]:
    """Return a problem if replay is configured for a run with custom code, which may change between steps."""
    given, foreign = config.trainer.trace_every_steps, foreign_code(config)
    if given is None or given == 1 or not foreign:
        return []
    return [
        f"trainer.trace_every_steps={given} with {', '.join(foreign)}; steps with code of your own are traced one by "
        "one, because what it computes may change between two traces and would then train something else; leave "
        "trainer.trace_every_steps out, or set it to 1."
    ]
