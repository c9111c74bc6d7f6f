"""What a compiled program does beside XLA's own operations: Pallas kernels and transfers between chips."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Kernel:
    """One Pallas kernel; calls with the same name and shapes are counted together."""

    name: str
    """The Python function that built it, or `tpu_custom_call` where the kernel does not tell."""
    count: int
    """Calls in one run of the program, per chip."""
    flops: float | None
    """FLOPs of one call as the kernel's author states them (causal masks are usually left out); None where not."""
    num_bytes: float
    """Bytes of the operands and results of one call, each moved once."""
    operand_shapes: tuple[str, ...] = ()
    """What one call reads, for example `bf16[1,32,2048,128]`."""
    output_shapes: tuple[str, ...] = ()
    """What one call writes."""


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over groups of one size, per chip and run of the program."""

    kind: str
    """`all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`, ..."""
    count: int
    num_bytes: float
    """Over all calls: of the result for an all-gather, of the operand otherwise."""
    num_overlapped: int
    """Of `count`, those that run beside computation: asynchronous, with compute between start and end."""
    group_size: int
    """Chips that exchange with each other."""
    overlapped_bytes: float = 0
    """Of `num_bytes`: of those."""

    def plus(self, other: "Transfer", *, times: int = 1) -> "Transfer":
        """Both together, the other so many times."""
        return replace(
            self,
            count=self.count + times * other.count,
            num_bytes=self.num_bytes + times * other.num_bytes,
            num_overlapped=self.num_overlapped + times * other.num_overlapped,
            overlapped_bytes=self.overlapped_bytes + times * other.overlapped_bytes,
        )
