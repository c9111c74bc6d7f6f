"""A device without enough memory is told in a sentence that names smaller settings, and other errors are not."""

from collections.abc import Callable

import pytest
import torch

from tpu_experiments.config.bugs import bug_sentence, lacks_device_memory
from tpu_experiments.config.schema import Config

OF_A_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 148.38 GiB. GPU 0 has a total capacity of 139.80 GiB of which 130.92 GiB is "
    "free. Including non-PyTorch memory, this process has 8.87 GiB memory in use."
)
OF_A_TPU = RuntimeError(
    "Bad StatusOr access: RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 12.31G at the "
    "bottom of memory. That was not possible."
)


def test_a_gpu_is_told_smaller_settings(make_config: Callable[..., Config]) -> None:
    config = make_config("hw=gpu", "trainer.micro_batch_rows=8", "trainer.loss_chunk_tokens=null", "model.remat=none")
    said = bug_sentence(OF_A_GPU, config=config)
    assert said.startswith("hw=gpu; the memory of the device is used up (Tried to allocate 148.38 GiB); try")
    wanted = ("trainer.loss_chunk_tokens=2048", "model.remat=layer_inputs", "trainer.micro_batch_rows=4", "base=nf4")
    assert all(word in said for word in wanted)


def test_what_is_small_already_is_not_advised(make_config: Callable[..., Config]) -> None:
    config = make_config("hw=gpu", "model.base=nf4", "trainer.micro_batch_rows=1", "model.remat=layer_inputs")
    said = bug_sentence(OF_A_GPU, config=config)
    assert "try, the mildest first, a smaller trainer.seq_len, or a larger machine" in said


@pytest.mark.parametrize("task", ["train", "generate"])
def test_a_tpu_is_told_int8(make_config: Callable[..., Config], task: str) -> None:
    config = make_config("hw=v5e1", f"task={task}", "model.base=dense")
    said = bug_sentence(OF_A_TPU, config=config)
    assert "Attempting to reserve 12.31G" in said
    assert "model.base=int8" in said


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OF_A_GPU, True),
        (OF_A_TPU, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("429 RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests'"), False),
    ],
)
def test_other_errors_are_left_alone(error: Exception, expected: bool, make_config: Callable[..., Config]) -> None:
    assert lacks_device_memory(error) == expected
    assert ("memory of the device" in bug_sentence(error, config=make_config())) == expected
