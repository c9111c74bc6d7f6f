"""A stage that trains some parameters alone: the others, and what the optimizer keeps of them, stay bit for bit."""

import pytest
import torch

from tests.training.tiny import Run, configured, random_batch
from tpu_experiments.checkpoint.state import flat
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.stacked import is_stack, unstacked
from tpu_experiments.training.step import TRAINS, masks_by_parameter, require_trainable_patterns, trainable_mask

pytestmark = pytest.mark.xla
TINY = ("model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")
IN_8_BITS = ("lora.r=64", "optim=adamw8bit")
"""Adapters large enough for 8-bit moments, whose blocks have other dimensions than the parameter."""
SOME = ["*.layers.1.*", "*.q_proj.lora_A"]


def is_some(name):
    return ".layers.1." in name or name.endswith(".q_proj.lora_A")


def stages(make_config, patterns):
    return resolve_stages(make_config(*TINY, f"curriculum.stages.text.trainable=[{','.join(map(repr, patterns))}]"))


def make_run(make_config, runtime, *more):
    config = make_config(*TINY, f"hw.runtime={runtime}", *more)
    if runtime == "eager":
        return Run(config, EagerRuntime(config.hw), updates=configured(config))
    from tpu_experiments.runtime.xla.device import XlaRuntime

    device = XlaRuntime(config.hw, sharding=config.sharding, trace_every=50)
    return Run(config, device, updates=configured(config))


def host(tensors):
    return unstacked({name: t.detach().cpu().clone() for name, t in tensors.items()})


def slots(run):
    return {name: slots for name, slots in run.state.items() if name}


CASES = [("eager", IN_8_BITS), ("xla", ())]
MORE_CASES = [pytest.param(*case, marks=pytest.mark.slow) for case in (("eager", ()), ("xla", IN_8_BITS))]


@pytest.mark.parametrize(("runtime", "more"), [*CASES, *MORE_CASES])
def test_the_others_stay_as_they_are(make_config, runtime, more):
    run = make_run(make_config, runtime, *more)
    types = {t.dtype for state in slots(run).values() for t in state.values()}
    assert (torch.uint8 in types) is bool(more)
    assert any(map(is_stack, run.parameters)) is (runtime == "xla"), "layers of a stack are chosen one by one"
    all_stages = stages(make_config, SOME)
    chosen = {TRAINS: trainable_mask(SOME, run.parameters, stages=all_stages)}
    everything = {TRAINS: trainable_mask((), run.parameters, stages=all_stages)}
    run.losses([random_batch(0) | everything])  # B is not zero any more, and moments are there
    before, moments = host(run.parameters), host(flat(slots(run)))
    run.losses([random_batch(1) | chosen, random_batch(2) | chosen])
    after, later = host(run.parameters), host(flat(slots(run)))
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(filter(is_some, before))
    changed = {name for name in moments if not torch.equal(moments[name], later[name])}
    assert changed == {name for name in moments if is_some(name.partition("/")[0])}


def test_what_is_chosen_is_trained_as_if_the_others_had_no_gradient(make_config):
    """The clipped norm is that of the chosen ones: the same as a step on their gradients alone."""
    run, plain = make_run(make_config, "eager"), make_run(make_config, "eager")
    trains = trainable_mask(SOME, run.parameters, stages=stages(make_config, SOME))
    _, _, output = run.step(run.parameters, run.state, random_batch(0) | {TRAINS: trains})
    grads, _ = plain.step.gradients(plain.parameters, random_batch(0), output.num_supervised)
    norm = torch.stack([g.square().sum() for n, g in zip(plain.parameters, grads, strict=True) if is_some(n)]).sum()
    torch.testing.assert_close(output.grad_norm, norm.sqrt())


def test_without_a_choice_the_batch_has_none(make_config):
    assert trainable_mask((), ["a"], stages=resolve_stages(make_config())) is None


def test_the_numbers_follow_the_layers_of_a_stack():
    parameters = {"model.layers.0:3:1.q.lora_A": torch.zeros(3, 4, 2), "head": torch.zeros(5)}
    masks = masks_by_parameter(torch.tensor([0.0, 1.0, 0.0, 1.0]), parameters)
    assert masks["model.layers.0:3:1.q.lora_A"].shape == (3, 1, 1)
    assert masks["model.layers.0:3:1.q.lora_A"].flatten().tolist() == [False, True, False]
    assert masks["head"].tolist() is True


def test_a_pattern_that_matches_nothing_is_refused(make_config):
    names = ["model.layers.0.self_attn.q_proj.lora_A", "model.layers.0.self_attn.q_proj.lora_B"]
    require_trainable_patterns(stages(make_config, ["*.q_proj.*"]), names)
    with pytest.raises(ConfigError, match=r"curriculum.stages.text.trainable has '\*.qproj.\*', which matches none"):
        require_trainable_patterns(stages(make_config, ["*.qproj.*"]), names)
