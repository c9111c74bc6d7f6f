"""Operations of a compiled program beside XLA's own: Pallas kernels and transfers between chips."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Kernel:
    """One Pallas kernel; calls with the same name and shapes are counted together."""

    name: str
    """The Python function that built it, or `tpu_custom_call` where that is unknown."""
    count: int
    """Calls in one run of the program, per chip."""
    flops: float | None
    """FLOPs of one call as the kernel's author states them (usually without regard to causal masks); None where not
    stated."""
    num_bytes: float
    """Bytes of the operands and results of one call, each moved once."""
    operand_shapes: tuple[str, ...] = ()
    """Arrays that one call reads, for example `bf16[1,32,2048,128]`."""
    output_shapes: tuple[str, ...] = ()
    """Arrays that one call writes."""


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over groups of one size, per chip and run of the program."""

    kind: str
    """`all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`, ..."""
    count: int
    num_bytes: float
    """Bytes over all calls: of the result for an all-gather, of the operand otherwise."""
    num_overlapped: int
    """Those of `count` that run beside computation: asynchronous, with compute between start and end."""
    group_size: int
    """Chips that exchange with each other."""
    overlapped_bytes: float = 0
    """The part of `num_bytes` that the overlapped ones move."""

    def plus(self, other: "Transfer", *, times: int = 1) -> "Transfer":
        """Return both together, the other one counted `times` times."""
        return replace(
            self,
            count=self.count + times * other.count,
            num_bytes=self.num_bytes + times * other.num_bytes,
            num_overlapped=self.num_overlapped + times * other.num_overlapped,
            overlapped_bytes=self.overlapped_bytes + times * other.overlapped_bytes,
        )
