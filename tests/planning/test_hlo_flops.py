"""FLOPs of products in the forms the TPU compiler gives them; each equals 2 x batch x M x N x K."""

import itertools

import pytest

from tests.planning.hlo_programs import computation, module
from tpu_experiments.planning.hlo.flops import meeting_pairs
from tpu_experiments.planning.hlo.program import read_program


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "expected"),
    [
        ("bf16[64,32]", "bf16[16,32]", "bf16[64,16]", "convolution|dim_labels=bf_oi->bf", 2 * 64 * 16 * 32),
        (
            "f32[4,64,128]", "bf16[4,128,32]", "f32[4,64,32]",
            "convolution|window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf", 2 * 4 * 64 * 32 * 128,
        ),
        (
            "bf16[64,2,8]", "bf16[16,2,8]", "bf16[64,16,1]",
            "convolution|window={size=2}, dim_labels=b0f_o0i->bf0", 2 * 64 * 16 * (2 * 8),
        ),
        (
            "bf16[64,16,1]", "bf16[2,8,16]", "bf16[64,2,8]",
            "convolution|window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f", 2 * 64 * (2 * 8) * 16,
        ),
        (
            "bf16[8,64,16,1]", "bf16[2,4,16,1]", "bf16[8,64,2,4]",
            "convolution|window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
            2 * 8 * 64 * (2 * 4) * 16,
        ),
        (
            "f32[3,64,32]", "f32[3,32,16]", "f32[3,64,16]",
            "dot|lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
            2 * 3 * 64 * 16 * 32,
        ),
    ],
)  # fmt: skip
def test_products(left: str, right: str, result: str, attributes: str, expected: int) -> None:
    opcode, rest = attributes.split("|")
    lines = [f"a = {left} parameter(0)", f"b = {right} parameter(1)", f"ROOT c = {result} {opcode}(%a, %b), {rest}"]
    assert read_program(module(computation("main", *lines, entry=True))).dot_flops == expected


def test_pairs_that_meet_are_those_found_one_by_one() -> None:
    sizes = itertools.product((1, 4, 5), (1, 3), (1, 2, 6), (1, 2), (0, 1, 2), (1, 3), (1, 2))
    for size, kernel, result, stride, pad, input_dilation, kernel_dilation in sizes:
        positions = set(range(0, size * input_dilation, input_dilation))
        expected = sum(
            r * stride + k * kernel_dilation - pad in positions for r in range(result) for k in range(kernel)
        )
        assert meeting_pairs(size, kernel, result, stride, pad, input_dilation, kernel_dilation) == expected
