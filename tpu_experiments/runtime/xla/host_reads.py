"""Detection of device-to-host reads while a program is traced; each raises HostRead.

One trace serves many calls. A number that Python reads during it (`.item()`, `if tensor:`, `.cpu()`, `x[mask]`) splits
the program in two, blocks until the device is done, and would be baked into calls with other data.
"""

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpu_experiments.runtime.base import UnexpectedProgram

READERS = frozenset(
    {
        Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
        Tensor.__index__, Tensor.__complex__, Tensor.__array__, Tensor.__contains__, Tensor.__repr__, Tensor.__format__,
        Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose, Tensor.nonzero,
        torch.nonzero, Tensor.masked_select, torch.masked_select, Tensor.unique, torch.unique,
        torch.linalg.solve_triangular, torch.ops.aten.linalg_solve_triangular.default,
    }
)  # fmt: skip
"""Functions that read their first argument, or whose result has a data-dependent shape. Triangular systems
(transformers' gated delta rule) are solved on the host, where torch_xla 2.9.0 ends the process with a segmentation
fault."""
REMEDY = (
    "a program is traced once for many calls, so nothing in it may depend on numbers of the device: compute with "
    "tensors (torch.where in place of a branch or a mask as an index), or read it between the steps, as `evaluate` may"
)
INSTALLED = ("site-packages", "dist-packages")


class HostRead(UnexpectedProgram):
    """A program reads a tensor on the host while it is traced; nothing of that call was run on the device."""


class NoHostReads(TorchFunctionMode):
    """Mode in which a torch function that copies device values to the host raises HostRead.

    It costs 2 to 4 us for each call of torch in Python, 2 % of a trace.
    """

    def __init__(self, name: str, *, device_type: str, count_reads: Callable[[], int]) -> None:
        """Watch the tracing of the program `name`.

        Args:
            count_reads: returns the number of operations so far that fell back to the host's CPU.
        """
        super().__init__()
        self.name, self.device_type, self.count_reads = name, device_type, count_reads

    def __enter__(self) -> "NoHostReads":
        self._num_before = self.count_reads()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Check for reads in the backward pass too, whose operations pass through no torch function in Python.

        Raises:
            HostRead: there was one.
        """
        super().__exit__(kind, error, trace)
        if kind is None and self.count_reads() != self._num_before:
            raise HostRead(f"{self.name} reads a tensor on the host while it is traced; {REMEDY}")

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`.

        Raises:
            HostRead: it reads a device tensor on the host.
        """
        if func in READERS and self._is_of_device(args[:1]):
            raise self._refusal(func)
        num_before = self.count_reads()
        out = func(*args, **(kwargs or {}))
        is_copied = isinstance(out, Tensor) and out.device.type == "cpu" and self._is_of_device(args)
        if self.count_reads() != num_before or is_copied:
            raise self._refusal(func)
        return out

    def _is_of_device(self, args: tuple[Any, ...]) -> bool:
        # By exact type: the fake tensors that torch differentiates a layer with have a device and no data.
        return any(type(arg) in (Tensor, nn.Parameter) and arg.device.type == self.device_type for arg in args)

    def _refusal(self, func: Callable[..., Any]) -> HostRead:
        name = getattr(func, "__name__", str(func))
        return HostRead(f"{self.name} reads a tensor on the host while it is traced ({name}{_place()}); {REMEDY}")


def _place() -> str:
    """Return ` at folder/file.py:14`, the innermost line outside installed packages, or an empty string."""
    for frame in reversed(traceback.extract_stack()[:-1]):
        if frame.filename == __file__ or any(folder in frame.filename for folder in INSTALLED):
            continue
        return f" at {'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"
    return ""
