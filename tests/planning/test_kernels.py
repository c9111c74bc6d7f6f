"""FLOPs of Pallas kernels that state them, of attention that does not, and of what cannot be told."""

import pytest

from tpu_experiments.planning.hlo.kernels import direction_of, with_flops
from tpu_experiments.planning.hlo.text import Kernel

MASK = ("s8[1,4,4]", "s32[4,2048,128]")
ROWS = ("bf16[6,32,8192,128]", "bf16[6,8,8192,128]", "bf16[6,8,8192,128]")
WHOLE = 2.0 * 6 * 32 * 8192 * 8192 * 128  # one product over all scores


def test_stated_flops_are_taken_as_they_are() -> None:
    kernel = Kernel("any", 3, 5e9, 1e6)
    assert with_flops([kernel]) == ((kernel,), ())


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("_splash_attention_forward", 2),
        ("_splash_attention_bwd_dkv", 4),
        ("_splash_attention_bwd_dq", 3),
        ("flash_attention_bwd", 7),
    ],
)
def test_attention_that_states_nothing_is_counted_from_its_shapes(name: str, products: int) -> None:
    (kernel,), (note,) = with_flops([Kernel(name, 32, None, 1e6, (*MASK, *ROWS))])
    assert kernel.flops == products * WHOLE / 2
    assert note == f"kernel {name} states no FLOPs; they are those of causal attention of its shapes"


def test_keys_may_lie_along_the_lanes() -> None:
    (kernel,), _ = with_flops([Kernel("attention", 1, None, 0, ("bf16[4,64,128]", "bf16[4,128,96]"))])
    assert kernel.flops == 2 * 2.0 * 4 * 64 * 96 * 128 / 2


@pytest.mark.parametrize("kernel", [Kernel("tpu_custom_call", 1, None, 1e6, ROWS), Kernel("attention", 1, None, 1e6)])
def test_what_cannot_be_known_is_said(kernel: Kernel) -> None:
    (known,), (note,) = with_flops([kernel])
    assert known.flops is None
    assert note.endswith("its FLOPs are unknown; only the time of its bytes is in the estimate")


def test_direction_is_in_the_name() -> None:
    assert direction_of("_flash_attention_dkv_kernel") == "backward_dkv"
    assert direction_of("attention") == "forward"
