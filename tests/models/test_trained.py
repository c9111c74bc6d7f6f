"""Fingerprints tell a changed tensor; the effect of an adapter is the norm of what it adds."""

import pytest
import torch

from tpu_experiments.checkpoint.errors import UnprovenError
from tpu_experiments.checkpoint.progress import Progress
from tpu_experiments.checkpoint.proof import InitialTensors
from tpu_experiments.models.adapters.lora import MAX_ELEMENTS, effects, fingerprint, fingerprints, num_changed


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_one_bit_of_an_adapter_is_seen():
    tensor = drawn(32, 1024)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    tensor[17, 1000] = torch.nextafter(tensor[17, 1000], torch.tensor(9.0))
    assert fingerprint(tensor) != before


def test_of_a_large_tensor_evenly_spaced_elements_are_checked():
    tensor = torch.zeros(5 * MAX_ELEMENTS)
    before = fingerprint(tensor)
    tensor[1::5] = 1
    assert fingerprint(tensor) == before
    tensor[5 * 1234] = 1
    assert fingerprint(tensor) != before


def test_a_stack_has_the_fingerprints_of_its_layers():
    stack = drawn(3, 4, 5)
    marks = fingerprints("model.layers.0:6:2.q.lora_A", stack)
    assert marks == {f"model.layers.{2 * i}.q.lora_A": fingerprint(stack[i]) for i in range(3)}
    changed = {f"model.layers.{2 * i}.q.lora_A": stack[i] + (i == 1) for i in range(3)}
    assert num_changed(changed, marks) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_effect_is_the_norm_of_the_product(dtype):
    a, b = drawn(4, 30).to(dtype), drawn(50, 4, seed=1).to(dtype)
    found = effects({"m.lora_A": a, "m.lora_B": b, "n.lora_A": a, "n.lora_B": torch.zeros_like(b)}, start={})
    assert found["m"] == pytest.approx(float((b.double() @ a.double()).norm()), rel=1e-12)
    assert found["n"] == 0.0


def test_effect_of_pissa_is_what_has_changed():
    start = {"m.lora_A": drawn(4, 30), "m.lora_B": drawn(50, 4, seed=1)}
    assert effects(start, start=start) == {"m": 0.0}
    trained = {name: t + 1e-6 * drawn(*t.shape, seed=2) for name, t in start.items()}
    product = [t["m.lora_B"].double() @ t["m.lora_A"].double() for t in (trained, start)]
    assert effects(trained, start=start)["m"] == pytest.approx(float((product[0] - product[1]).norm()), rel=1e-9)


def test_lengths_of_rows_are_an_effect_although_the_product_is_zero():
    start = {"m.lora_A": drawn(4, 30), "m.lora_B": torch.zeros(50, 4), "m.lora_magnitude_vector": drawn(50)}
    initial = InitialTensors({name: fingerprint(tensor) for name, tensor in start.items()})
    progress = Progress(step=3, peak_lr=1e-3)
    with pytest.raises(UnprovenError, match="every one of the 3 trained tensors has its initial value"):
        initial.verify(start, progress)
    with pytest.raises(UnprovenError, match="B A is zero in all 1 adapted modules"):
        initial.verify(start | {"m.lora_A": drawn(4, 30, seed=1)}, progress)
    found = initial.verify(start | {"m.lora_magnitude_vector": drawn(50, seed=1)}, progress)
    assert (found["modules"], found["with_effect"], found["changed"]) == (1, 1, 1)
