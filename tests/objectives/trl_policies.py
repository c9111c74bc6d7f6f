"""Train by the losses of TRL's GRPOTrainer and RLOOTrainer and by ours, side by side, and print how far they are apart.

TRL gets the same prompts, answers, rewards and sampler's log-probabilities as we do, and makes everything else of them
by its own methods: masks of answers cut off, log-probabilities of the old model and the start, advantages, weights. It
is a process of its own: TRL beside torch_xla takes its device, so it runs with USE_TORCH_XLA=0.
Usage: USE_TORCH_XLA=0 python -m tests.objectives.trl_policies MODEL
"""

import contextlib
import copy
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.objectives.policy_rollouts import EOS, MAX_NEW, SAMPLES, Rollout, made_rollout, rows_of, sampler_logps
from tests.objectives.trl_losses import VOCAB, model_of, stepped
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.policy import SUMS, Policy, divisors
from tpu_experiments.rewards.advantages import advantages

WEIGHTS = (1.0, 0.5)
MAX_WEIGHT = 1.4
ROLLOUTS, UPDATES, MICRO_ROWS = 3, 4, 3
HALF = 2 * SAMPLES
CLIP = {"epsilon": 0.1, "epsilon_high": 0.15}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo"},
    "grpo_kl": {"loss": "grpo", "beta": 0.3},
    "dapo": {"loss": "dapo", "scale": "batch"},
    "dapo_cut": {"loss": "dapo", "learns_cut": True},
    "dr_grpo": {"loss": "dr_grpo", "scale": "none"},
    "bnpo": {"loss": "bnpo", "beta": 0.1},
    "gspo": {"loss": "grpo", "ratio": "sequence", "beta": 0.2},
    "corrected": {"loss": "dapo", "corrects": True},
    "corrected_gspo": {"loss": "bnpo", "ratio": "sequence", "corrects": True, "beta": 0.1},
    "rloo": {"loss": "rloo", "scale": "none"},
    "rloo_kl": {"loss": "rloo", "scale": "batch", "beta": 0.2},
}
RATES = {"rloo": 0.002}
"""Of gradient descent; the ratios of whole answers move further. After a step both have the same weights again."""


class _Grpo(GRPOTrainer):
    """TRL's, with answers and rewards that are given."""

    given: Rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        logps = None
        if self.use_vllm:
            logps = [row[: len(a)].tolist() for row, a in zip(self.sampled, self.given.answers, strict=True)]
        return self.given.prompts, self.given.answers, None, [""] * len(prompts), logps, {}, None, []

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return torch.from_numpy(self.given.rewards_NF).float()


class _Rloo(RLOOTrainer):
    """The same."""

    given: Rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return self.given.prompts, self.given.answers, [""] * len(prompts)

    def _calculate_rewards(self, *_: Any) -> Tensor:
        return torch.from_numpy(self.given.rewards_NF).float()


def of_trl(settings: dict[str, Any], module: Any, start: Any) -> Any:
    """TRL's trainer with these settings, without what it trains by."""
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    add_fused_lm_head(module, outputs=outputs)
    add_fused_lm_head(start, outputs=outputs)
    is_rloo, corrects = settings["loss"] == "rloo", settings.get("corrects", False)
    trainer = object.__new__(_Rloo if is_rloo else _Grpo)
    alone = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=False)
    alone.gather = alone.gather_for_metrics = lambda x: x
    alone.reduce, alone.autocast = lambda x, reduction: x, contextlib.nullcontext
    args = SimpleNamespace(per_device_train_batch_size=64, report_to=[], gradient_checkpointing_kwargs=None, delta=None)
    # Two parts of a rollout are learnt in turn, so each update has half of its answers.
    args.steps_per_generation, args.gradient_accumulation_steps, args.use_bias_correction_kl = 2, 1, False
    vars(trainer).update(model=module, ref_model=start, accelerator=alone, args=args, environment_factories=None)
    vars(trainer).update(environments=None, tools=None, pad_to_multiple_of=None, aux_loss_enabled=False)
    vars(trainer).update(_tokenizer=SimpleNamespace(pad_token_id=0), eos_token_ids=[EOS], eos_token_id=EOS)
    vars(trainer).update(mask_truncated_completions=not settings.get("learns_cut", False), num_iterations=2)
    vars(trainer).update(num_generations=SAMPLES, reward_weights=torch.tensor(WEIGHTS), reward_funcs=[None, None])
    vars(trainer).update(reward_func_names=["first", "second"], scale_rewards=settings.get("scale", "group"))
    vars(trainer).update(multi_objective_aggregation="sum_then_normalize", reward_clip_range=None)
    vars(trainer).update(normalize_advantages=settings.get("scale") == "batch", beta=settings.get("beta", 0.0))
    vars(trainer).update(loss_type=settings["loss"], epsilon_low=CLIP["epsilon"], epsilon_high=CLIP["epsilon_high"])
    vars(trainer).update(importance_sampling_level=settings.get("ratio", "token"), top_entropy_quantile=1.0)
    vars(trainer).update(off_policy_mask_threshold=None, max_completion_length=MAX_NEW, _entropy_bonus_enabled=False)
    vars(trainer).update(use_vllm=corrects, vllm_importance_sampling_correction=corrects)
    vars(trainer).update(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_min=None)
    vars(trainer).update(vllm_importance_sampling_clip_max=MAX_WEIGHT, current_gradient_accumulation_steps=1)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer._logs = defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)}
    trainer._pending_extra_logs, trainer._pending_metrics, trainer.log_multimodal = {}, {}, False
    return trainer


def our_rows(settings: dict[str, Any], objective: Policy, module: Any, start: Any, given: Rollout) -> dict[str, Tensor]:
    """The rows of a rollout with everything that the loss reads."""
    rows = rows_of(given, seq_len=32, learns_cut=settings.get("learns_cut", False))
    old = objective.logps(module, dict(module.named_parameters()), rows)
    begin = objective.logps(start, dict(start.named_parameters()), rows)
    total_N, is_rloo = given.rewards_NF @ WEIGHTS, settings["loss"] == "rloo"
    if is_rloo:
        total_N = total_N - settings.get("beta", 0.0) * (old - begin).sum(1).numpy().astype(np.float64)
    scale = settings.get("scale", "group")
    found = advantages(total_N, samples=SAMPLES, scale=scale, leaves_one_out=is_rloo)
    return rows | {
        "advantage": torch.from_numpy(found.values_N),
        "divisor": torch.from_numpy(divisors(settings["loss"], rows["learn"].sum(1).numpy(), max_new_tokens=MAX_NEW)),
        "old_logps": old,
        "sampler_logps": sampler_logps(given, old) if settings.get("corrects") else old,
        "start_logps": begin,
    }


def micro_batches(rows: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The rows in parts; a last one that is short is filled with padding."""
    missing = -len(rows["ids"]) % MICRO_ROWS
    whole = {k: torch.cat([v, torch.zeros(missing, *v.shape[1:], dtype=v.dtype)]) for k, v in rows.items()}
    for start in range(0, len(whole["ids"]), MICRO_ROWS):
        yield {name: value[start : start + MICRO_ROWS] for name, value in whole.items()}


def compared(model: str, name: str) -> dict[str, float]:
    """The largest differences of advantages, losses and gradients, and the shares that were clipped."""
    settings = LOSSES[name]
    ours, theirs = model_of(model, is_scored=False), model_of(model, is_scored=False)
    start = copy.deepcopy(ours)
    own = {k: v for k, v in settings.items() if k not in ("corrects", "learns_cut", "scale")}
    objective = Policy(**own, **CLIP, max_weight=MAX_WEIGHT, computing=Computing(chunk_tokens=24))
    trainer = of_trl(settings, theirs, copy.deepcopy(theirs))
    theirs.train()
    rate = RATES.get(settings["loss"], 0.04)
    found: dict[str, float] = defaultdict(float)
    for number in range(ROLLOUTS):
        given = trainer.given = made_rollout(number, vocab=VOCAB)
        rows = our_rows(settings, objective, ours, start, given)
        lengths = [len(prompt) for prompt in given.prompts]
        trainer.sampled = [row[at : at + MAX_NEW] for row, at in zip(rows["sampler_logps"], lengths, strict=True)]
        batch = trainer._generate_and_score_completions([{"prompt": ""}] * len(given.prompts))
        difference = float((batch["advantages"] - rows["advantage"]).abs().max())
        found["advantage"] = max(found["advantage"], difference)
        for update in range(UPDATES):
            part = slice(0, HALF) if update % 2 == 0 else slice(HALF, None)
            half = {k: v[part] if v.ndim else v for k, v in batch.items()}
            ours.load_state_dict(theirs.state_dict())
            other, expected = stepped(theirs, trainer._compute_loss(theirs, half), rate=rate)
            parts = list(micro_batches({k: v[part] for k, v in rows.items()}))
            parameters = dict(ours.named_parameters())
            sums = sum(objective.reported_loss(ours, parameters, each)[2].sum(0) for each in parts)
            found |= {key: found[key] + float(value) for key, value in zip(SUMS[1:], sums[1:], strict=True)}
            total = sum(objective.count(each) for each in parts)
            loss = sum(objective.row_loss(ours, parameters, each)[0].sum() for each in parts) / total
            mine, grads = stepped(ours, loss, rate=rate)
            found["loss"] = max(found["loss"], abs(mine - other))
            differences = [float((grads[key] - grad).abs().max()) for key, grad in expected.items()]
            found["gradient"] = max(found["gradient"], *differences)
            largest = max(float(grad.abs().max()) for grad in expected.values())
            found["largest_gradient"] = max(found["largest_gradient"], largest)
            found["largest_loss"] = max(found["largest_loss"], abs(other))
    found["flat"] = sum(trainer._metrics["train"]["frac_reward_zero_std"])
    return found


def main(model: str) -> None:
    """Print the differences of every loss."""
    torch.set_num_threads(1)
    print(json.dumps({name: compared(model, name) for name in LOSSES}))


if __name__ == "__main__":
    main(*sys.argv[1:])
