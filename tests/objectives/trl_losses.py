"""Train by TRL's own losses and by ours, side by side in float32, and print how far they are apart as JSON.

It is a process of its own: TRL beside torch_xla takes its device, so it runs with USE_TORCH_XLA=0.
Usage: USE_TORCH_XLA=0 python -m tests.objectives.trl_losses MODEL [STEPS]
"""

import copy
import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.objectives.preference_pairs import (
    Pair,
    labelled,
    made_pairs,
    of_dpo,
    of_kto,
    of_orpo,
    of_reward,
    packed,
    with_margins,
    with_reference,
)
from tpu_experiments.models.huggingface import config_from_arch
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.kto import Kto
from tpu_experiments.objectives.preference import Preference
from tpu_experiments.objectives.reward import Reward

VOCAB = 64
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": VOCAB, "intermediate_size": 48, "head_dim": 16, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": SIZES,
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "gemma2": SIZES | {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
}
"""A head of its own, a tied one, and a tied one with a soft cap."""
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss": "sigmoid"},
    "robust": {"loss": "robust", "label_smoothing": 0.2},
    "hinge": {"loss": "hinge", "beta": 0.5},
    "ipo": {"loss": "ipo", "beta": 0.5},
    "sigmoid_norm": {"loss": "sigmoid_norm", "beta": 2.0},
    "rpo": {"loss": "sigmoid", "sft_weight": 0.7},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.25},
    "simpo_sft": {"loss": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.25, "sft_weight": 0.5},
    "orpo": {"loss": "orpo", "beta": 0.3},
    "kto": {"loss": "kto", "beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    "reward": {"loss": "reward"},
    "centred": {"loss": "reward", "center_rewards_coefficient": 0.2},
    "margin": {"loss": "reward", "margin": True},
}
RATE = 0.02
PAIRS = 5
MARGINS = torch.tensor([0.5, 0.0, 2.0, -1.25, 1.0])
"""Of the pairs, where a loss has margins."""


def model_of(name: str, *, is_scored: bool) -> Any:
    """The model with random weights, whose logits differ by more than rounding, with a scalar head or the usual one."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = config_from_arch({"model_type": name, **MODELS[name]})
    config._attn_implementation = "eager"
    if is_scored:
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if is_scored else AutoModelForCausalLM
    module = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module


def of_trl(name: str, module: Any, reference: Any) -> Any:
    """A function from pairs to TRL's loss, by the method of its trainer."""
    settings = LOSSES[name]
    loss, beta = settings["loss"], settings.get("beta", 0.1)
    alone = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    common = {"accelerator": alone, "beta": beta, "label_smoothing": settings.get("label_smoothing", 0.0)}
    common |= {"aux_loss_enabled": False, "is_encoder_decoder": False, "padding_value": 0, "pad_token_id": 0}
    if loss in ("simpo", "orpo"):
        kind = ORPOTrainer if loss == "orpo" else CPOTrainer
        trainer = object.__new__(kind)
        vars(trainer).update(common, loss_type=loss, alpha=0.0, cpo_alpha=settings.get("sft_weight", 0.0))
        trainer.simpo_gamma = settings.get("gamma_beta_ratio", 0.0) * beta
        return lambda pairs: trainer.get_batch_loss_metrics(module, of_orpo(pairs), "train")[0]
    if loss == "reward":
        trainer = object.__new__(RewardTrainer)
        vars(trainer).update(common, model=module, _total_train_tokens=0, _tp_size=1)
        trainer.args = SimpleNamespace(center_rewards_coefficient=settings.get("center_rewards_coefficient"))
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        margins = {"margin": MARGINS} if settings.get("margin") else {}
        return lambda pairs: trainer.compute_loss(module, of_reward(pairs) | margins)
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    add_fused_lm_head(module, outputs=outputs)
    add_fused_lm_head(reference, outputs=outputs)
    if loss == "kto":
        trainer = object.__new__(KTOTrainer)
        vars(trainer).update(common, model=module, ref_model=reference, precompute_ref_logps=False, calculate_KL=True)
        vars(trainer).update(settings, loss_type=loss, _total_train_tokens=0, _tp_size=1)
        trainer.args = SimpleNamespace(gradient_checkpointing_kwargs=None)
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        return lambda pairs: trainer._compute_loss(module, of_kto(labelled(pairs)), False)
    trainer = object.__new__(DPOTrainer)
    vars(trainer).update(common, model=module, ref_model=reference, ld_alpha=None, precompute_ref_logps=False)
    vars(trainer).update(f_divergence_type="reverse_kl", use_weighting=False, _total_train_tokens=0, _tp_size=1)
    weight = settings.get("sft_weight", 0.0)
    trainer.loss_types, trainer.loss_weights = ([loss, "sft"], [1.0, weight]) if weight else ([loss], [1.0])
    trainer.args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return lambda pairs: trainer._compute_loss(module, of_dpo(pairs), False)


def of_ours(name: str, module: Any) -> Any:
    """A function from pairs to our loss over packed rows; the reference is the module as it is now."""
    settings, start = dict(LOSSES[name]), copy.deepcopy(module)
    kind: Any = {"kto": Kto, "reward": Reward}.get(settings["loss"], Preference)
    is_kto = kind is Kto
    if kind is not Preference:
        del settings["loss"]
    objective = kind(**settings, computing=Computing(chunk_tokens=24))

    def loss_of(pairs: list[Pair]) -> Tensor:
        # z is that of a row here, of a batch in TRL: all answers in one row.
        rows = packed(labelled(pairs), per_row=PAIRS, seq_len=96) if is_kto else packed(pairs, per_row=2, seq_len=64)
        rows |= with_margins(rows, MARGINS) if settings.get("margin") else {}
        own = dict(module.named_parameters())
        if is_kto or getattr(objective, "has_reference", False):
            values = objective.reference_values(start, dict(start.named_parameters()), rows)
            rows = with_reference(rows, values)
        sums, _ = objective.row_loss(module, own, rows)
        total = objective.count(rows)
        return (sums.sum(0) / total).sum() if total.ndim else sums.sum() / total

    return loss_of


def stepped(module: nn.Module, loss: Tensor, *, rate: float = RATE) -> tuple[float, dict[str, Tensor]]:
    """Take a step of gradient descent, and return loss and gradients."""
    names, own = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, own)
    with torch.no_grad():
        for parameter, grad in zip(own, grads, strict=True):
            parameter.sub_(rate * grad)
    return loss.item(), dict(zip(names, grads, strict=True))


def compared(model: str, name: str, *, steps: int) -> dict[str, float]:
    """The largest differences of losses and gradients over the steps, and what moved."""
    is_scored = LOSSES[name]["loss"] == "reward"
    ours, theirs = (model_of(model, is_scored=is_scored) for _ in range(2))
    our_loss, their_loss = of_ours(name, ours), of_trl(name, theirs, copy.deepcopy(theirs))
    # TRL's ORPO learns the prompt as well, and we what the paper does: equal for prompts of one token.
    prompt = 1 if LOSSES[name]["loss"] == "orpo" else 6
    found = {"loss": 0.0, "gradient": 0.0, "largest_gradient": 0.0}
    for step in range(steps):
        pairs = made_pairs(step, count=PAIRS, vocab=VOCAB, prompt=prompt)
        own, grads = stepped(ours, our_loss(pairs))
        other, expected = stepped(theirs, their_loss(pairs))
        found["loss"] = max(found["loss"], abs(own - other))
        differences = [float((grads[name] - grad).abs().max()) for name, grad in expected.items()]
        found["gradient"] = max(found["gradient"], *differences)
        largest = max(float(grad.abs().max()) for grad in expected.values())
        found["largest_gradient"] = max(found["largest_gradient"], largest)
        found.setdefault("first", other)
        found["last"] = other
    return found


def main(model: str, steps: str = "20") -> None:
    """Print the differences of every loss."""
    torch.set_num_threads(1)
    print(json.dumps({name: compared(model, name, steps=int(steps)) for name in LOSSES}))


if __name__ == "__main__":
    main(*sys.argv[1:])
