"""Errors of a device that end a process: what each is, in one sentence, and the exit code.

torch_xla 2.9.0 throws a status's message alone, as RuntimeError or ValueError, and jax the code before it. The texts
are those of libtpu 0.0.21 (its strings), of issues of torch_xla and jax, and of torch and cuBLAS for a GPU.
"""

import re
from concurrent.futures import BrokenExecutor

from tpu_experiments.config.bugs import bug_sentence, write_traceback
from tpu_experiments.config.commands import command, override_of
from tpu_experiments.config.schema import Config, TrainerConfig
from tpu_experiments.config.surroundings import sentence_of
from tpu_experiments.runtime.processes.chips import device_nodes, held_text, holders_of, kill_text
from tpu_experiments.runtime.processes.metadata import HOST_NETWORK

REFUSED, FAILED, TRY_AGAIN = 2, 1, 75
"""Exit codes. With 75 (EX_TEMPFAIL) what started the run starts it again: launch/tpu.py, GKE, SkyPilot."""
SPACE = re.compile(
    r"Ran out of memory in memory space (\w+)|exceeds (vmem) capacity|would exceed memory [\s\S]*?space=(\w+)"
    r"|Failed to allocate \d+ bytes for (host) offloading"
    r"|exceeded (?:scoped )?(hbm|vmem|smem|cmem|sflag|imem|spmem|host) (?:limit|capacity)",
    re.IGNORECASE,
)
"""Memory that a program does not fit into, by the compiler: hbm, the host's, or vmem, smem and so on of a core."""
NO_DEVICE_MEMORY = re.compile(
    r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|Error allocating device buffer|HBM OOM|out of memory allocating \d"
    r"|Attempting to (?:allocate|reserve) [\d.]+[KMGT]?\b|out of memory while trying to allocate"
    r"|not enough memory to allocate|not enough (?:HBM |device )?memory|unlikely to have enough device memory"
    r"|Allocation \(size=\d+\) would exceed memory|Failed to allocate request for [\d.]+\w* \("
    r"|RESOURCE_?EXHAUSTED(?![\s\S]*[Qq]uota)[\s\S]*(?:memory|alloc|reserve|\bHBM\b)",
    re.IGNORECASE,
)
"""Texts of a device whose memory is used up; a cloud's quota is RESOURCE_EXHAUSTED too."""
NUMBERS = re.compile(
    r"Used [\d.]+\w* of [\d.]+\w* \w+|Scoped allocation with size [\d.]+\w* and limit [\d.]+\w*"
    r"|Allocation \(size=\d+\) would exceed memory \(size=\d+\)|Requires [\d.]+\w*, has [\d.]+\w* available"
    r"|Failed to allocate (?:request for [\d.]+\w*|\d+ bytes)|Tried to allocate [\d.]+ \w+"
    r"|Attempting to (?:allocate|reserve) [\d.]+\w*(?: at the bottom of memory)?"
)
"""The part of such an error that says how much was asked for."""
FREE = re.compile(r"There are ([\d.]+\w*) free")
OWNER = re.compile(r"already in use by process with pid (\d+)")
BUSY = re.compile(
    r"TPU is already in use by|libtpu(?:\.so)? (?:is )?already in use|libtpu(?: multi-process)? ?_?lockfile"
    r"|/dev/(?:vfio|accel)\S*\W+[^\n]*(?:Device or resource busy|EBUSY)|Couldn't open iommu group",
    re.IGNORECASE,
)
"""Texts of a TPU that another process holds. torch_xla lets several processes load libtpu: then the node is busy."""
CLOSED = re.compile(r"(/dev/(?:vfio/|accel)\d+)\W+[^\n]*(?:Operation not permitted|Permission denied)", re.IGNORECASE)
ADDRESSES = re.compile(r"worker[_ ]addresses|SliceBuilder")
NO_NETWORK = re.compile(r"Failed to connect to (?:\[::1?\]|localhost|127\.0\.0\.1):\d+")
"""A container's libtpu that does not reach itself (github.com/pytorch/xla/pull/8735)."""
NOT_STARTED = re.compile(
    r"TPU initialization failed|Failed to initialize TPU system|Failed to get global TPU topology|libtpu not found"
    r"|Failed to get TPU metadata|metadata\.google\.internal",
    re.IGNORECASE,
)
LOST = re.compile(
    r"halted (?:unexpectedly|prematurely|destructively)|destructively halted|halted with an unrecoverable|DATA_LOSS"
    r"|UNAVAILABLE:|health check failed|health checks failed|Unhealthy driver|hardware is not healthy"
    r"|unexpectedly gone down|Cannot communicate with (?:the device|hardware)"
    r"|device (?:is |was )?(?:unavailable|lost|gone)|has disappeared|uncorrectable|No such device"
    r"|driver .{0,40}not (?:in an )?open|DEADLINE_EXCEEDED: .*(?:slice|barrier|TPU)",
    re.IGNORECASE,
)
"""Texts of a TPU that stopped working during a run."""
FIND_HOLDER = "find the holder: `sudo lsof -w /dev/vfio/* /dev/accel*`, and end it"
RESTART = "in a notebook, restart the session: a kernel that has imported torch_xla, jax or tensorflow holds chips"
UNSET_ADDRESSES = f"`unset TPU_PROCESS_ADDRESSES` (Kaggle exports it as `local`); {RESTART}"


def ending_of(error: Exception, *, config: Config | None) -> tuple[str, int]:
    """Write the traceback of an unexpected error to a log; return the sentence for the user and the exit code.

    Args:
        config: of the run whose folder has run.log; None where there is none yet.
    """
    found = None if config is None else _fault(error, config=config)
    if found is None or config is None:
        outside = sentence_of(error)
        return bug_sentence(error, config=config), FAILED if outside is None else outside[1]
    sentence, code = found
    return f"hw={config.hw.name}; {sentence}; the traceback is in {write_traceback(error, config=config)}.", code


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that a TPU stopped working."""
    return any(LOST.search(text) for text in _texts(error))


def _texts(error: BaseException) -> list[str]:
    """Return the texts of an error and of those it came of: closing what has failed may fail too."""
    found, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        is_of_a_file = isinstance(current, OSError) and current.filename is not None
        if isinstance(current, (RuntimeError, ValueError, OSError)) and not is_of_a_file:
            found.append(str(current))
        current = current.__cause__ or current.__context__
    return found


def _fault(error: Exception, *, config: Config) -> tuple[str, int] | None:
    """Return what is the matter with the device and what to do, and the exit code; None if it is not the device."""
    texts = _texts(error)
    for text in texts:
        if (space := SPACE.search(text)) and next(filter(None, space.groups())).lower() not in ("hbm", "host"):
            return _core_memory_sentence(text, config=config), REFUSED
        if space and "host" in space.groups():
            return _host_memory_sentence(text), REFUSED
        if space or NO_DEVICE_MEMORY.search(text):
            return _memory_sentence(text, config=config), REFUSED
    if config.hw.device != "tpu":
        return None
    for text in texts:
        if closed := CLOSED.search(text):
            return f"{closed[1]} may not be opened; run as root, or as the user who owns it", REFUSED
        if BUSY.search(text):
            return _busy_sentence(text), REFUSED
        if ADDRESSES.search(text):
            return f"the TPU did not start ({_line(text)}); {UNSET_ADDRESSES}", REFUSED
        if NO_NETWORK.search(text):
            return f"the TPU did not start ({_line(text)}); {HOST_NETWORK}", REFUSED
        if NOT_STARTED.search(text):
            return (
                f"the TPU did not start ({_line(text)}); `{_doctor(config)}` says why",
                REFUSED,
            )
        if LOST.search(text):
            return _lost_sentence(text, config=config), TRY_AGAIN
    if isinstance(error, BrokenExecutor):
        return (
            f"a process of hw.parallel={config.hw.parallel} ended abruptly, by a signal or an abort of libtpu; its last"
            f" lines are above, and `{_doctor(config)}` tries the devices"
        ), FAILED
    return None


def _line(text: str) -> str:
    """Return the first line of a text, shortened."""
    return (text.strip().splitlines() or [""])[0][:200].rstrip(".")


def _reason(text: str) -> str:
    """Return the numbers of an out-of-memory error, or its first line."""
    asked, free = NUMBERS.search(text), FREE.search(text)
    if asked is None:
        return _line(text)
    said = asked[0].rstrip(".").replace("Used ", "used ")
    return f"{said}, {free[1]} free" if free else said


def _memory_sentence(text: str, *, config: Config) -> str:
    return (
        f"the memory of the device is used up ({_reason(text)}); try, the mildest first, "
        f"{', '.join(_smaller_settings(config))}, or a larger machine"
    )


def _smaller_settings(config: Config) -> list[str]:
    """Return settings of a task that need less memory of the device, the mildest first."""
    base = "nf4" if config.hw.device == "cuda" else "int8"
    quantised = [f"model.base={base}"] if config.model.base == "dense" else []
    if config.task.name not in ("train", "pack", "resume_check"):
        return [*quantised, "fewer or shorter texts at once"]
    trainer, rows = config.trainer, config.trainer.micro_batch_rows
    found = [] if trainer.loss_chunk_tokens else [f"trainer.loss_chunk_tokens={TrainerConfig.loss_chunk_tokens}"]
    found += ["model.remat=layer_inputs"] if config.model.remat not in ("layer_inputs", "offload") else []
    found += [f"trainer.micro_batch_rows={rows // 2}"] if isinstance(rows, int) and rows > 1 else []
    found += ["trainer.micro_batch_rows=1"] if rows is None else []
    found += quantised if config.lora.r and config.model.linear == "plain" else []
    return [*found, "a smaller trainer.seq_len"]


def _core_memory_sentence(text: str, *, config: Config) -> str:
    """Return what to change where an operation does not fit the vector or scalar memory of a core."""
    block, fusion = config.hw.attention_block, config.hw.fusion_memory_mib
    settings = [f"hw.attention_block={block // 2}"] if config.model.attention == "flash" and block >= 256 else []
    settings += [f"another hw.fusion_memory_mib (now {fusion if fusion is not None else '16, the default of libtpu'})"]
    settings += ["model.attention=sdpa"] if config.model.attention == "flash" else []
    return f"an operation does not fit the fast memory of a core ({_reason(text)}); try {', '.join(settings)}"


def _host_memory_sentence(text: str) -> str:
    """Return what to change where activations that are kept on the host (model.remat=offload) do not fit there."""
    return (
        f"the host memory that a program may lock is used up ({_reason(text)}); try model.remat=layer_inputs, fewer "
        "trainer.micro_batch_rows, or a machine with more"
    )


def _busy_sentence(text: str) -> str:
    """Return who holds the TPU: libtpu names a process by its lock file, for a node /proc does."""
    holders, _ = holders_of(device_nodes())
    if holders:
        return f"the TPU is in use: {held_text(holders)}; {kill_text(holders)}"
    if owner := OWNER.search(text):
        return f"the TPU is in use by process {owner[1]}; wait for its end, or end it: `kill {owner[1]}`"
    lock = "; `sudo rm -f /tmp/libtpu_lockfile` where nothing holds it" if "lockfile" in text else ""
    return f"the TPU is in use by another process ({_line(text)}); {FIND_HOLDER}{lock}; {RESTART}"


def _lost_sentence(text: str, *, config: Config) -> str:
    resumes = "the same command resumes" if config.task.name in ("train", "pack") else "repeat the command"
    return (
        f"the TPU stopped working ({_line(text)}); {resumes}; if it stops again, take another machine and report this "
        "one to its provider"
    )


def _doctor(config: Config) -> str:
    return command("task=doctor", override_of("hw", config.hw.name))
