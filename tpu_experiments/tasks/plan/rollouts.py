"""Plan the iterations of a run on its own answers: which programs they take, and their seconds."""

from dataclasses import replace
from typing import Any

from tpu_experiments.config.curriculum import Stage, resolve_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import DecodeConfig, PlanTaskConfig
from tpu_experiments.models.passes.generation import calls_of
from tpu_experiments.planning.decoding import Decoding
from tpu_experiments.planning.iteration import Iteration, iteration_of
from tpu_experiments.planning.plan import Plan, Shortage
from tpu_experiments.training.batches import TOKENS_PER_CALL, RunInputs, prompt_bucket, scores_rollouts


def writes_rollouts(config: Config) -> bool:
    """Return whether the run writes its answers by programs of its own."""
    return config.objective.samples_rollouts and config.rollout.sampler == "own"


def num_scores(config: Config) -> int:
    """Return how often each row of a rollout is scored before it is learnt from."""
    if not config.objective.samples_rollouts:
        return 0
    return int(scores_rollouts(config)) + int(config.objective.reads_start())


def answers_of(config: Config, settings: DecodeConfig) -> DecodeConfig:
    """Return the answers that a plan counts: those of a rollout, of a run that writes some, else `task.decode`'s."""
    if not writes_rollouts(config):
        return settings
    nothing: Any = None  # the prompts are as long as a row leaves room for, until they are read
    inputs = RunInputs(nothing, {}, resolve_stages(config))
    return DecodeConfig(
        rows=config.rollout.num_rows,
        prompt_tokens=prompt_bucket(inputs, config),
        max_new_tokens=config.rollout.max_new_tokens,
        tokens_per_call=calls_of(config.rollout.max_new_tokens, tokens_per_call=TOKENS_PER_CALL)[1],
        top_k=0,
    )


def planned_iteration(
    config: Config,
    stage: Stage,
    *,
    decoding: Decoding | None,
    score_batch_seconds: float | None,
    step_seconds: float | None,
) -> Iteration | None:
    """Return an iteration of a stage; None of other runs, and where a part of it does not fit or is not planned.

    Args:
        score_batch_seconds: of a micro-batch on every device.
    """
    if not writes_rollouts(config) or decoding is None or step_seconds is None:
        return None
    times, rollout, geometry = num_scores(config), config.rollout, stage.geometry
    if times and score_batch_seconds is None:
        return None
    batches = -(-rollout.num_rows // (geometry.micro_rows * geometry.num_shards))
    return iteration_of(
        decoding,
        prompts=rollout.prompts,
        samples=rollout.samples,
        updates=rollout.updates,
        reward_seconds=config.task.reward_seconds if isinstance(config.task, PlanTaskConfig) else 0.0,
        score_seconds=times * batches * (score_batch_seconds or 0.0),
        step_seconds=step_seconds,
    )


def short_of_answers(plan: Plan, config: Config) -> Plan | None:
    """Return the plan of a run whose rollouts do not fit beside its training, with the reason; None if they fit."""
    found = plan.decoding
    if found is None or found.fits or not writes_rollouts(config):
        return None
    message = f"{found.rows:,} answers at once do not fit beside what training keeps on a chip"
    remedies = (f"rollout.prompts={max(1, config.rollout.prompts // 2)}", "rollout=vllm (a server writes the answers)")
    shortage = Shortage(message, used_gib=found.beside_gib, limit_gib=found.limit_gib, remedies=remedies)
    return replace(plan, fits=False, shortage=shortage)


def notes_of(config: Config) -> list[str]:
    """Return what the figures of a run on its own answers do not have in them."""
    if not config.objective.samples_rollouts:
        return []
    if not writes_rollouts(config):
        return ["answers are written by a server: its time and its price are not in these figures"]
    notes = ["prompts are counted as long as rows leave room for; answers as if none ended before its last token"]
    if isinstance(config.task, PlanTaskConfig) and not config.task.reward_seconds:
        notes.append("rewards are counted as if they took no time (task.reward_seconds)")
    return notes
