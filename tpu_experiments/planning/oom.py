"""The TPU compiler's complaints as sentences: out of memory in numbers and the config's words, and everything else.

The message is the one a rented TPU gives; its figures are rounded to two decimals of their unit. The compiler compares
twice: the program alone, whose report lists "arguments 0B", and where that fits, the program with its arguments. "Used"
never holds outputs of their own, nor arrays that stay on the chip and are no argument: a program that compiles may
still not fit beside them."""

import math
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.planning.hlo.text import shapes_in

GIB = 2**30
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"(\d+(?:\.\d+)?)([BKMGT])"
ARGUMENTS = re.compile(rf"^ +arguments +{SIZE}", re.MULTILINE)
HEADLINE = re.compile(rf"Ran out of memory in memory space (\w+)\. Used {SIZE} of {SIZE} \w+\.")
ONE_ALLOCATION = re.compile(
    r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\) :: [^\[]*\[shape = '([^']*)'(.*)"
)
TEMPORARIES_ALONE = re.compile(
    rf"Ran out of memory on (\w+), the total memory required for HLO temporaries \({SIZE}\) exceeds available \w+ "
    rf"\({SIZE}\)"
)
"""libtpu 0.0.42.1, without a list of buffers."""
BUFFER = re.compile(rf"^ *\d+\. Size: {SIZE}\s*$", re.MULTILINE)
MAX_LORA_RANK = 512  # a side up to this, beside a side of the model, is taken for an adapter's rank


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers the compiler lists."""

    bytes: int
    """Size with padding."""
    shape: tuple[int, ...]
    """Dimensions, per chip; empty for a scalar or where the message has none."""
    dtype: str
    """Element type, for example `bf16`."""
    kind: str
    """`argument`, `temporary` or `output`."""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class OutOfMemory:
    """Memory of a program that does not fit, per chip."""

    memory_space: str
    """`hbm`; `vmem` where a kernel's blocks are too large."""
    used_gib: float
    """Memory that the program would need, as far as the compiler got."""
    limit_gib: float
    """Memory available to programs: HBM minus what the runtime reserves."""
    buffers: tuple[Buffer, ...]
    """The largest ones, largest first."""
    message: str
    """First line of the compiler's message."""
    arguments_gib: float = 0.0
    """Part of `used_gib` that is arguments; 0 where the program alone does not fit."""


def is_out_of_memory(message: str) -> bool:
    """Return whether an error of the compiler is one that `read_out_of_memory` parses."""
    return any(form.search(message) for form in (ONE_ALLOCATION, HEADLINE, TEMPORARIES_ALONE))


def read_out_of_memory(message: str) -> OutOfMemory:
    """Parse the exception's text.

    Raises:
        ValueError: it is another error.
    """
    alone = ONE_ALLOCATION.search(message)
    if alone:
        return one_allocation(*alone.groups(), message=first_line(message))
    headline = HEADLINE.search(message) or TEMPORARIES_ALONE.search(message)
    if headline is None:
        error_text = (message.strip().splitlines() or ["<empty>"])[0][:200]
        raise ValueError(f"message={error_text!r}; not the TPU compiler's out-of-memory report; show it as it is")
    used, limit = (bytes_of_size(*headline.group(at, at + 1)) for at in (2, 4))
    arguments = ARGUMENTS.search(message)
    starts = [match.start() for match in BUFFER.finditer(message)]
    ends = [*starts[1:], len(message)]
    entries = [message[start:end] for start, end in zip(starts, ends, strict=False)]  # without starts one end is left
    return OutOfMemory(
        memory_space=headline[1].lower(),
        used_gib=used / GIB,
        limit_gib=limit / GIB,
        buffers=tuple(read_buffer(entry) for entry in entries),
        message=first_line(message),
        arguments_gib=bytes_of_size(*arguments.groups()) / GIB if arguments else 0.0,
    )


def first_line(message: str) -> str:
    """Return the line that names the memory."""
    return next(line.strip() for line in message.splitlines() if "memory" in line)


def one_allocation(size: str, limit: str, shape: str, rest: str, *, message: str) -> OutOfMemory:
    """Parse the other form of the message, for a single buffer that is larger than the memory.

    Its bytes are exact, and it lists that buffer only.
    """
    space, tag = (re.search(pattern, rest) for pattern in (r"space=(\w+)", r"tag = '([^']*)'"))
    array = shapes_in(shape)[0]
    label = tag[1] if tag else ""
    buffer = Buffer(
        bytes=int(size),
        shape=array.dims,
        dtype=array.dtype,
        kind="argument" if "argument" in label or "parameter" in label else "temporary",
    )
    used, available = int(size) / GIB, int(limit) / GIB
    return OutOfMemory(
        memory_space=space[1] if space else "hbm",
        used_gib=used,
        limit_gib=available,
        buffers=(buffer,),
        message=message,
    )


def bytes_of_size(number: str, unit: str) -> int:
    """Return the bytes of a size as the compiler prints it: `("16.00", "G")`."""
    return round(float(number) * UNITS[unit])


def read_buffer(entry: str) -> Buffer:
    """Parse one numbered entry of the list."""
    fields = dict(re.findall(r"^ +([A-Z][\w ]+): (.*?) *$", entry, re.MULTILINE))
    size = re.match(SIZE, fields.get("Size", ""))
    head = BUFFER.match(entry)
    num_bytes = bytes_of_size(head[1], head[2]) if head else bytes_of_size(*size.groups()) if size else 0
    shapes = shapes_in(fields.get("Shape", ""))
    return Buffer(
        bytes=num_bytes,
        shape=shapes[0].dims if shapes else (),
        dtype=shapes[0].dtype if shapes else "",
        kind=kind_of(fields.get("Allocation type", "")),
    )


def kind_of(allocation: str) -> str:
    """Return the kind of an allocation type: `HLO temp` is a temporary; others contain their kind."""
    lowered = allocation.lower()
    if "argument" in lowered or "parameter" in lowered:
        return "argument"
    return "output" if "output" in lowered else "temporary"


def classify(
    buffer: Buffer, *, vocab_size: int, seq_len: int, rows: int, hidden: int, intermediate: int, heads: int
) -> str:
    """Return what a buffer is, in the words of the config; its type and shape where nothing matches.

    Shapes are compared by their products, as the compiler folds and splits axes. Sides that are sharded do not match
    and remain shapes. Where a weight and an activation look the same (one row as long as the model is wide), an
    argument is taken for a weight and a temporary for an activation.

    Args:
        rows: rows of one micro-batch on one chip.
    """
    dims = [size for size in buffer.shape if size > 1]
    weight = weight_label(buffer, dims, sides={hidden, intermediate, vocab_size})
    if buffer.kind == "argument" and weight:
        return weight
    tokens = f"trainer.micro_batch_rows x trainer.seq_len = {rows} x {seq_len}"
    if dims.count(seq_len) >= 2:
        num_heads, left = divmod(math.prod(dims) // seq_len**2, rows)
        if left == 0 and num_heads == heads:
            return f"attention scores (rows x heads x seq_len^2 = {rows} x {heads} x {seq_len}^2)"
        if left == 0 and num_heads == 1 and seq_len != hidden:
            return f"attention mask (rows x seq_len^2 = {rows} x {seq_len}^2)"
    for words, side in (("logits ({} x vocabulary {})", vocab_size), ("MLP activations ({} x {})", intermediate)):
        if side in dims and math.prod(dims) == side * rows * seq_len:
            return words.format(tokens, side)
    activation = activation_label(dims, tokens=tokens, rows=rows, seq_len=seq_len, hidden=hidden, heads=heads)
    return activation or weight or str(buffer)


def weight_label(buffer: Buffer, dims: list[int], *, sides: set[int]) -> str:
    """Return base weights, an adapter or optimizer state, told apart by their sides; otherwise empty.

    Layers may be stacked on a leading axis.
    """
    last = dims[-2:]
    if len(dims) not in {2, 3} or not sides.intersection(last):
        return ""
    if min(last) <= MAX_LORA_RANK:
        return f"adapter, its gradient or its optimizer state ({buffer}; lora.r, lora.targets)"
    if not sides.issuperset(last):
        return ""
    moments = buffer.dtype in {"f32", "u8"} and buffer.kind != "temporary"
    return f"{'optimizer state' if moments else 'base weights'} ({buffer})"


def activation_label(dims: list[int], *, tokens: str, rows: int, seq_len: int, hidden: int, heads: int) -> str:
    """Return which activation of the layers a buffer is; otherwise empty.

    Known are layer inputs, queries, keys and values, LoRA branches, and rotary angles.
    """
    others = [size for at, size in enumerate(dims) if at != dims.index(seq_len)] if seq_len in dims else dims
    total = math.prod(dims)
    layers, left = divmod(total, rows * seq_len * hidden)
    if left == 0 and hidden in others and layers == 1:
        return f"layer inputs or outputs ({tokens} x {hidden})"
    if left == 0 and hidden in others and dims[0] == layers:
        return f"saved layer inputs (layers x {tokens} x {hidden}, layers = {layers})"
    if dims == [seq_len, hidden // heads]:
        return f"rotary angles ({seq_len} x {hidden // heads})"
    if dims[:-1] in ([rows * seq_len], [rows, seq_len]) and dims[-1] <= MAX_LORA_RANK:
        return f"LoRA branch ({tokens} x lora.r {dims[-1]})"
    if len(others) >= 2 and seq_len in dims and hidden not in others and total % (rows * seq_len) == 0:
        return f"queries, keys or values ({tokens}, {total // rows // seq_len} wide)"
    return ""


NOISE = ("TPU worker", "accelerator type", "InitGoogle", "libtpu_init_utils", "Source Location Trace", "host bounds")
"""Parts of lines that libtpu writes because there is no TPU."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
KIB = 1024


def unknown_topology(hw: HwConfig, *, error_text: str) -> ConfigError:
    """Return the error for a topology that libtpu does not know, or not with this many chips."""
    return ConfigError(
        f"hw.topology={hw.topology}; the TPU compiler has no such slice of {hw.num_devices} chips: "
        f"{first_words(error_text)}; write GENERATION:SIDExSIDE, "
        "for example v6e:1x1, v6e:2x2, v5e:2x4 or v5e:16x16, or take a hw of conf/hw; a newer generation needs an "
        "environment with a newer libtpu (task.libtpu=)."
    )


def unread_program(error_text: str, *, versions: Mapping[str, str], what: str) -> ConfigError:
    """Return the error for a program that libtpu compiled and the jax beside it cannot read."""
    libtpu, jax = (versions.get(name, "?") for name in ("libtpu", "jax"))
    return ConfigError(
        f"task.libtpu; libtpu {libtpu} compiled {what}, and jax {jax} of the same environment cannot read the "
        f"program: {first_words(error_text)}; install a newer jax there."
    )


def too_many_chips(hw: HwConfig, *, num_there: int) -> ConfigError:
    """Return the error for more chips than the topology has."""
    return ConfigError(
        f"hw.num_devices={hw.num_devices}; hw.topology={hw.topology} has {num_there}; give the topology of as many "
        f"chips, or hw.num_devices={num_there}."
    )


def kernel_too_large(shortage: OutOfMemory, *, what: str) -> ConfigError:
    """Return the error for a kernel whose blocks do not fit into the chip's vector memory."""
    used, limit = (round(gib * KIB * KIB) for gib in (shortage.used_gib, shortage.limit_gib))
    return ConfigError(
        f"task=plan; {what} takes {used:,} KiB of {shortage.memory_space} in one kernel and {limit:,} KiB are there; "
        "use smaller blocks of attention, or raise hw.fusion_memory_mib."
    )


def refused_program(error_text: str, *, what: str) -> ConfigError:
    """Return the error for a program that the compiler refused for a reason of its own."""
    return ConfigError(
        f"task=plan; the compiler refused {what}: {first_words(error_text)}; nothing is remembered of it; try another "
        "trainer.micro_batch_rows, trainer.seq_len or sharding, or report it as a fault of libtpu."
    )


def compiler_ended(code: int, *, stderr: str, what: str) -> ConfigError:
    """Return the error for a compiler process that ended without an answer."""
    error_text = [line for line in stderr.splitlines() if line.strip() and not any(part in line for part in NOISE)]
    if code in KILLED:
        return ConfigError(
            f"task=plan; the compilation of {what} was killed, as a machine does that is out of memory; close other "
            "programs, lower task.workers, or plan on a machine with more memory (24 GB suffice for 7B); what is "
            "compiled so far is kept."
        )
    flag = next((line for line in error_text if "Unknown command line flag" in line), None)
    if flag:
        return ConfigError(
            f"hw.libtpu_flags; libtpu knows no flag {flag.rpartition('flag')[2].strip()} and ends at once, as it "
            "would on the TPU; correct or remove it."
        )
    if code < 0:
        return ConfigError(
            f"task=plan; the compiler crashed ({signal.Signals(-code).name}) at {what}; that is a fault of "
            "libtpu, which another trainer.micro_batch_rows, trainer.seq_len or hw.libtpu_flags may avoid."
        )
    return ConfigError(
        f"task=plan; the compilation of {what} ended with exit code {code}: "
        f"{error_text[-1] if error_text else 'silent'}; check "
        "hw.libtpu_flags and that libtpu is installed (the tpu extra), or use task.method=analytic."
    )


def first_words(error_text: str) -> str:
    """Return the compiler's first line without the exception's name, cut off after 240 characters."""
    first = next((line.strip() for line in error_text.splitlines() if line.strip()), "silent")
    return first.removeprefix("XlaRuntimeError: ")[:240].rstrip(".")
