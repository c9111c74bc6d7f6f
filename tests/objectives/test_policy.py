"""The loss of answers against its formulas, over micro-batches and devices, and by chunks."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.objectives.policy_rollouts import MAX_NEW, SAMPLES, made_rollout, rows_of, sampler_logps
from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.config.objectives.policy import PolicyConfig
from tpu_experiments.models.huggingface import config_from_arch
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.policy import Policy, divisors

VOCAB = 48
ARCH = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ARCH |= {"num_key_value_heads": 1, "vocab_size": VOCAB, "intermediate_size": 24, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_from_arch(ARCH), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return made


def rows_with(objective: Policy, module: torch.nn.Module, *, seed: int = 0, shift: float = 0.3) -> dict[str, Tensor]:
    """The rows of a rollout whose old model differs by up to `shift`."""
    given = made_rollout(seed, vocab=VOCAB)
    rows = rows_of(given, seq_len=24, learns_cut=False)
    own = objective.logps(module, dict(module.named_parameters()), rows)
    generator = np.random.Generator(np.random.Philox(key=seed))

    def near() -> Tensor:
        return own + torch.from_numpy(generator.uniform(-shift, shift, own.shape).astype(np.float32))

    old, start = near(), near()
    divisor = divisors(objective.loss, rows["learn"].sum(1).numpy(), max_new_tokens=MAX_NEW)
    return rows | {
        "advantage": torch.from_numpy(generator.normal(size=len(own)).astype(np.float32)),
        "divisor": torch.from_numpy(divisor),
        "old_logps": old,
        "sampler_logps": sampler_logps(given, old),
        "start_logps": start,
    }


def by_hand(rows: dict[str, Tensor], own: Tensor, settings: dict[str, object]) -> float:
    """The loss in float64, answer by answer."""
    low, high, beta, most = 0.1, 0.2, float(settings.get("beta", 0.0)), 1.5
    losses, lengths = [], []
    for row in range(len(own)):
        at = [int(t) for t in torch.nonzero(rows["learn"][row])]
        lengths.append(len(at))
        a = float(rows["advantage"][row])
        logs = [float(own[row, t] - rows["old_logps"][row, t]) for t in at]
        if settings["loss"] == "rloo":
            ratio = math.exp(sum(logs))
            losses.append(-min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a))
            continue
        if settings.get("ratio") == "sequence" and at:
            logs = [sum(logs) / len(at)] * len(at)
        total = 0.0
        for t, log in zip(at, logs, strict=True):
            ratio = math.exp(log)
            weight = math.exp(float(rows["old_logps"][row, t] - rows["sampler_logps"][row, t]))
            weight = 1.0 if math.isnan(weight) else min(weight, most)
            more = float(rows["start_logps"][row, t] - own[row, t])
            total -= weight * min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
            total += beta * (math.exp(more) - more - 1)
        losses.append(total / max(len(at), 1) if settings["loss"] == "grpo" else total)
    num = len(own)
    match settings["loss"]:
        case "bnpo" | "dapo":
            return sum(losses) / sum(lengths)
        case "dr_grpo":
            return sum(losses) / (num * MAX_NEW)
    return sum(losses) / num


SETTINGS = [
    {"loss": "grpo", "beta": 0.2},
    {"loss": "dapo"},
    {"loss": "dr_grpo"},
    {"loss": "bnpo", "beta": 0.1},
    {"loss": "grpo", "ratio": "sequence"},
    {"loss": "rloo"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_the_loss_is_its_formula_whatever_the_micro_batches(module, settings) -> None:
    objective = Policy(**settings, epsilon=0.1, epsilon_high=0.2, max_weight=1.5)
    rows, parameters = rows_with(objective, module), dict(module.named_parameters())
    expected = by_hand(rows, objective.logps(module, parameters, rows), settings)
    padding = {name: torch.zeros_like(value[:2]) for name, value in rows.items()}
    whole = {name: torch.cat([value, padding[name]]) for name, value in rows.items()}
    whole["advantage"][-2:] = 5.0  # a row of padding has no part whatever it says
    for size in (18, 3):
        parts = [{k: v[i : i + size] for k, v in whole.items()} for i in range(0, 18, size)]
        found = sum(objective.row_loss(module, parameters, part)[0].sum() for part in parts)
        assert float(found.detach() / sum(objective.count(part) for part in parts)) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_gradients_are_those_of_all_logits_at_once(module, settings) -> None:
    names, leaves = zip(*module.named_parameters(), strict=True)

    def gradients(chunk_tokens: int | None) -> list[Tensor]:
        objective = Policy(**settings, max_weight=1.5, computing=Computing(chunk_tokens))
        sums_R, _ = objective.row_loss(module, dict(zip(names, leaves, strict=True)), rows)
        return list(torch.autograd.grad(sums_R.sum() / objective.count(rows), leaves))

    rows = rows_with(Policy(**settings), module)
    for one, other in zip(gradients(None), gradients(40), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_the_models_own_log_probabilities_have_a_ratio_of_one_and_its_gradient(module) -> None:
    """The gradient is then that of -A log p, although no ratio is clipped and the loss is -A."""
    objective = Policy(loss="dapo", old="own", max_weight=100.0)
    rows = rows_with(objective, module)
    rows |= {"sampler_logps": objective.logps(module, dict(module.named_parameters()), rows)}
    leaves = dict(module.named_parameters())
    loss_R, divisor_R, report_RK = objective.reported_loss(module, leaves, rows)
    measures = objective.measures(report_RK.sum(0).tolist())
    assert measures["ratio"] == 1.0
    assert (measures["clip_ratio/low"], measures["clip_ratio/high"]) == (0.0, 0.0)
    assert measures["weight"] == pytest.approx(1.0, abs=1e-6)
    lengths_R = rows["learn"].sum(1)
    loss = float(loss_R.detach().sum() / divisor_R.sum())
    assert loss == pytest.approx(float(-(rows["advantage"] * lengths_R).sum() / lengths_R.sum()), abs=1e-6)
    found = torch.autograd.grad(objective.row_loss(module, leaves, rows)[0].sum(), list(leaves.values()))
    logits = module(rows["ids"].long()).logits[:, :-1].log_softmax(-1)
    logps = logits.gather(-1, rows["ids"][:, 1:, None].long())[..., 0]
    plain = -(logps * rows["learn"][:, 1:] * rows["advantage"][:, None]).sum()
    for one, other in zip(found, torch.autograd.grad(plain, list(leaves.values())), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_measures_are_means_over_tokens(module) -> None:
    objective = Policy(loss="grpo", epsilon=0.1, beta=0.1, max_weight=1.5)
    rows, parameters = rows_with(objective, module), dict(module.named_parameters())
    *_, report_RK = objective.reported_loss(module, parameters, rows)
    measures = objective.measures(report_RK.sum(0).tolist())
    ratio_NT = torch.exp(objective.logps(module, parameters, rows) - rows["old_logps"])
    learnt_NT, advantage_N1 = rows["learn"] > 0, rows["advantage"][:, None]
    num = int(learnt_NT.sum())
    low = int((learnt_NT & (ratio_NT < 0.9) & (advantage_N1 < 0)).sum())
    high = int((learnt_NT & (ratio_NT > 1.1) & (advantage_N1 > 0)).sum())
    assert min(low, high) > 3
    assert measures["clip_ratio/low"] == pytest.approx(low / num)
    assert measures["clip_ratio/high"] == pytest.approx(high / num)
    assert measures["ratio"] == pytest.approx(float(ratio_NT[learnt_NT].mean()), rel=1e-5)
    assert measures["learnt_tokens"] == pytest.approx(num / len(ratio_NT))
    assert 0 < measures["kl"] < 0.1
    own_NT = objective.logps(module, parameters, rows)
    assert measures["entropy"] == pytest.approx(float(-own_NT[learnt_NT].mean()), rel=1e-5)
    assert not report_RK.requires_grad
    none = objective.measures([0.0] * 8)
    assert "kl" in none
    assert not any(none.values())


def test_what_rows_count_for() -> None:
    tokens_N = np.array([3, 0, 5, 4])
    assert divisors("bnpo", tokens_N, max_new_tokens=8).tolist() == [3, 0, 5, 4]
    assert divisors("dapo", tokens_N, max_new_tokens=8).tolist() == [3, 3, 3, 3]
    assert divisors("dr_grpo", tokens_N, max_new_tokens=8).tolist() == [8, 8, 8, 8]
    assert divisors("grpo", tokens_N, max_new_tokens=8).tolist() == [1, 1, 1, 1]
    assert len(divisors("rloo", tokens_N, max_new_tokens=8)) == SAMPLES


def test_rloo_is_not_divided_by_the_spread_of_a_group() -> None:
    prepare = PrepareConfig()
    assert PolicyConfig(name="grpo").problems(prepare) == []
    assert PolicyConfig(name="grpo", loss="rloo", scale="none").problems(prepare) == []
    (problem,) = PolicyConfig(name="grpo", loss="rloo").problems(prepare)
    assert problem.startswith("scale=group with loss=rloo;")
