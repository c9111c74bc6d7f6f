"""FLOPs of matrix products in the two forms that the TPU compiler writes: `dot` and `convolution`.

A multiply and an add count as two. Batch dimensions of a convolution are windows, and only pairs that meet count: a
batched product becomes a convolution whose dilated input meets each kernel position once (`window={size=32 stride=31
lhs_dilate=32}`), and counting its full window would multiply by the batch size. Same rule as XLA's
HloCostAnalysis::HandleConvolution.
"""

import functools
import math
import re

from tpu_experiments.planning.hlo.text import Computation, Instruction, Shape


def dot_flops(instruction: Instruction, *, within: Computation) -> int:
    """Return the FLOPs of one execution; 0 for anything but `dot` and `convolution`."""
    if instruction.opcode not in {"dot", "convolution"}:
        return 0
    result = instruction.shapes[0]
    left, right = (within.by_name[name].shapes[0] for name in instruction.operands[:2])
    if instruction.opcode == "convolution":
        return convolution_flops(instruction, result=result, left=left, right=right)
    contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    return 2 * result.num_elements * math.prod(left.dims[int(d)] for d in contracted.split(",") if d)


def convolution_flops(instruction: Instruction, *, result: Shape, left: Shape, right: Shape) -> int:
    """Return the FLOPs of a convolution by its `dim_labels`, for example `0bf_0io->0bf`, and `window`."""
    labels = instruction.attribute(r"dim_labels=(\w+_\w+->\w+)")
    if labels is None:
        raise ValueError(f"convolution={instruction.name}; it has no dim_labels; the printer of XLA may have changed")
    left_labels, right_labels, result_labels = re.split("_|->", labels)
    groups = [int(instruction.attribute(rf"{kind}_group_count=(\d+)") or 1) for kind in ("feature", "batch")]
    batch = left.dims[left_labels.index("b")] // groups[1]
    input_feature = left.dims[left_labels.index("f")] // groups[0]
    output_feature = result.dims[result_labels.index("f")]
    meetings = 1
    for axis, bounds in enumerate(windows(instruction, num_axes=len(labels.split("->")[1]) - 2)):
        label = str(axis)
        meetings *= meeting_pairs(
            left.dims[left_labels.index(label)],
            right.dims[right_labels.index(label)],
            result.dims[result_labels.index(label)],
            *bounds,
        )
    return 2 * batch * input_feature * output_feature * meetings


def windows(instruction: Instruction, *, num_axes: int) -> list[tuple[int, int, int, int]]:
    """Return the window along each spatial axis.

    Each is (stride, padding below, dilation of the input, dilation of the kernel).
    """
    text = instruction.attribute(r"window=\{([^}]*)\}") or ""
    fields = dict(part.split("=") for part in text.split())

    def along(key: str, axis: int, default: str) -> int:
        listed = fields.get(key)
        return int((listed.split("x")[axis] if listed else default).split("_")[0])

    return [
        (along("stride", a, "1"), along("pad", a, "0"), along("lhs_dilate", a, "1"), along("rhs_dilate", a, "1"))
        for a in range(num_axes)
    ]


@functools.cache
def meeting_pairs(
    input_size: int,
    kernel_size: int,
    result_size: int,
    stride: int,
    pad: int,
    input_dilation: int,
    kernel_dilation: int,
) -> int:
    """Count the pairs (kernel position, result position) along one axis that read the input, not padding."""
    pairs = 0
    for kernel in range(kernel_size):
        offset = kernel * kernel_dilation - pad
        # result r reads dilated position r * stride + offset, which must be 0, dilation, ..., (size - 1) * dilation
        first = max(0, -(offset // stride))
        last = min(result_size - 1, ((input_size - 1) * input_dilation - offset) // stride)
        if input_dilation == 1:
            pairs += max(0, last - first + 1)
        else:
            pairs += sum((r * stride + offset) % input_dilation == 0 for r in range(first, last + 1))
    return pairs
