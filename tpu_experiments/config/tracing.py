"""How often Python traces the programs of a run on torch_xla.

Replaying a recorded graph is right only for steps that take nothing from Python: no branch on the step's number, no
random number, nothing read from the device. This project's own steps keep to that; of other code nobody can know, since
traces that come now and then may miss what changes between them. So a run with code of its user's own traces each step.
"""

from tpu_experiments.config.schema import Config

OWN = "tpu_experiments."
REPLAY_STEPS = 200
"""Steps from trace to trace where a run replays. An unrolled trace of 1.3 s adds 0.0065 s to a step of 0.55 s (7B)."""


def trace_interval(config: Config) -> int:
    """Return the mean number of calls from one trace of a program to the next.

    1 where the run has code of its user's own, and for folded layers on a TPU, whose trace is shorter than the step
    (8 to 53 %) and runs beside it. Unrolled layers trace longer than the device computes, and the CPU device computes
    on the cores that trace.
    """
    given = config.trainer.trace_every_steps
    if given is not None:
        return given
    if foreign_code(config):
        return 1
    return REPLAY_STEPS if config.model.stack == "unrolled" or config.hw.device == "cpu" else 1


def foreign_code(config: Config) -> list[str]:
    """Return the keys, with their values, that bring code of other packages into the steps of a run."""
    targets = {
        "trainer._target_": config.trainer._target_,
        "optim._target_": config.optim._target_,
        "model._target_": config.model._target_,
    }
    found = [f"{key}={target}" for key, target in targets.items() if not target.startswith(OWN)]
    found += [f"plugins={config.plugins}"] if config.plugins else []
    return found + (["model.remote_code=run"] if config.model.remote_code == "run" else [])


def tracing_problems(config: Config) -> list[str]:
    """Return a sentence where recorded steps are asked for and code of the user's own may change from step to step."""
    given, foreign = config.trainer.trace_every_steps, foreign_code(config)
    if given is None or given == 1 or not foreign:
        return []
    return [
        f"trainer.trace_every_steps={given} with {', '.join(foreign)}; steps with code of your own are traced one by "
        "one, because what it computes may change between two traces and would then train something else; leave "
        "trainer.trace_every_steps out, or set it to 1."
    ]
