"""What a device says when it ends a run is told in one sentence with what to do; other errors are left alone."""

from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import cache

import pytest
import torch

from tests.config.composing import composed
from tests.planning.hlo_programs import text as planned
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.processes.faults import ending_of, is_lost

OF_A_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 148.38 GiB. GPU 0 has a total capacity of 139.80 GiB of which 130.92 GiB is "
    "free. Including non-PyTorch memory, this process has 8.87 GiB memory in use."
)
OF_A_TPU = RuntimeError(
    "Bad StatusOr access: RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 12.31G at the "
    "bottom of memory. That was not possible."
)
COMPILING = (
    "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.73G of 15.75G hbm. Exceeded hbm "
    "capacity by 4.98G.\n\nTotal hbm usage >= 21.25G:\n    reserved        530.00M"
)
ONE_ALLOCATION = (  # as tests/planning/test_oom.py has it
    "Allocation (size=39862665216) would exceed memory (size=33822867456) :: #allocation5 [shape = "
    "'bf16[2097152,36,260]{0,2,1:T(8,128)(2,1)}', space=hbm, size = 0xffffffffffffffff, tag = 'output of "
    "fusion@{}'] :: <no-hlo-instruction>"
)
EXECUTING = (
    "Error allocating device buffer: Attempting to allocate 1.50G. That was not possible. There are 1.20G free.; "
    "(0x0x0_HBM0)"
)


@cache
def of(*overrides: str) -> Config:
    """Compose once for all texts."""
    return composed(*overrides)


def test_a_gpu_is_told_smaller_settings(make_config: Callable[..., Config]) -> None:
    config = make_config("hw=gpu", "trainer.micro_batch_rows=8", "trainer.loss_chunk_tokens=null", "model.remat=none")
    said, code = ending_of(OF_A_GPU, config=config)
    assert said.startswith("hw=gpu; the memory of the device is used up (Tried to allocate 148.38 GiB); try")
    wanted = ("trainer.loss_chunk_tokens=2048", "model.remat=layer_inputs", "trainer.micro_batch_rows=4", "base=nf4")
    assert all(word in said for word in wanted)
    assert code == 2


def test_what_is_small_already_is_not_advised(make_config: Callable[..., Config]) -> None:
    config = make_config("hw=gpu", "model.base=nf4", "trainer.micro_batch_rows=1", "model.remat=layer_inputs")
    said, _ = ending_of(OF_A_GPU, config=config)
    assert "try, the mildest first, a smaller trainer.seq_len, or a larger machine" in said


@pytest.mark.parametrize("task", ["train", "generate"])
def test_a_tpu_is_told_int8(make_config: Callable[..., Config], task: str) -> None:
    config = make_config("hw=v5e1", f"task={task}", "model.base=dense")
    said, _ = ending_of(OF_A_TPU, config=config)
    assert "Attempting to reserve 12.31G" in said
    assert "model.base=int8" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # torch_xla 2.9.0 throws the status's message alone, earlier ones and jax the code before it.
        (COMPILING, "the memory of the device is used up (used 20.73G of 15.75G hbm); try"),
        (f"RESOURCE_EXHAUSTED: {COMPILING}", "(used 20.73G of 15.75G hbm)"),
        (f"Bad StatusOr access: RESOURCE_EXHAUSTED: {COMPILING}", "(used 20.73G of 15.75G hbm)"),
        (EXECUTING, "the memory of the device is used up (Attempting to allocate 1.50G, 1.20G free); try"),
        ("Error loading program 'SyncTensorsGraph.12': Attempting to reserve 12.31G at the bottom of memory. That was "
         "not possible. There are 9.10G free, 0B reserved, and 9.10G reservable.",
         "(Attempting to reserve 12.31G at the bottom of memory, 9.10G free)"),
        (ONE_ALLOCATION, "(Allocation (size=39862665216) would exceed memory (size=33822867456)); try"),
        ("Compilation failure: Aborting compilation early because it's unlikely to have enough device memory. Requires "
         "20.1G, has 15.7G available. If more detailed", "(Requires 20.1G, has 15.7G available); try"),
        ("Failed to allocate request for 4.00GiB (4294967296B) on device ordinal 0",
         "(Failed to allocate request for 4.00G"),
        ("Failed to allocate 8589934592 bytes for host offloading transfer buffer", "try model.remat=layer_inputs"),
        ("TPU backend error: ResourceExhausted. HBM memory: 1.5 GiB", "the memory of the device is used up"),
        ("There is not enough memory to allocate 268435456 bytes", "the memory of the device is used up"),
        ("Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem. Exceeded vmem capacity by 16.42M",
         "does not fit the fast memory of a core (used 32.42M of 16.00M vmem); try hw.attention_block=512"),
        ("Scoped allocation with size 17.06M and limit 16.00M exceeded scoped vmem limit by 1.06M.",
         "(Scoped allocation with size 17.06M and limit 16.00M); try hw.attention_block=512"),
        ("Ran out of memory in memory space smem. Used 1.03M of 1.00M smem.", "(used 1.03M of 1.00M smem)"),
        ("Ran out of memory in memory space host. Used 200.0G of 188.0G host.", "try model.remat=layer_inputs"),
    ],
)  # fmt: skip
def test_memory_of_a_tpu(text: str, said: str) -> None:
    config = of("hw=v6e1", "model.attention=flash", "model.arch.head_dim=128")
    for error in (RuntimeError(text), ValueError(text)):
        sentence, code = ending_of(error, config=config)
        assert said in sentence
        assert code == 2
        assert sentence.count("\n") == 0
        assert "a bug" not in sentence


@pytest.mark.parametrize(
    ("file", "numbers"),
    [("one_chip", "35.64G of 31.25G"), ("sharded", "94.87G of 15.75G"), ("arguments_alone", "40.00G of 31.25G")],
)
def test_what_the_compiler_has_said(file: str, numbers: str) -> None:
    """Whole messages of libtpu 0.0.21, with the code that jax puts before them and without."""
    whole = planned(f"out_of_memory_{file}.txt")
    for error in (RuntimeError(whole), RuntimeError(whole.partition("RESOURCE_EXHAUSTED: ")[2] or whole)):
        said, code = ending_of(error, config=of("hw=v6e1"))
        assert f"the memory of the device is used up (used {numbers} hbm); try" in said
        assert code == 2


@pytest.mark.parametrize(
    ("text", "said", "code"),
    [
        ("The TPU is already in use by process with pid 4711. Not attempting to load libtpu.so in this process.",
         "the TPU is in use by process 4711; wait for its end, or end it: `kill 4711`", 2),
        ('The TPU is already in use by another process probably owned by another user. Run "$ sudo lsof -w '
         '/dev/accel0" to figure out which process is using the TPU. If you still get this message, run "$ sudo rm '
         '/tmp/libtpu_lockfile".',
         "find the holder: `sudo lsof -w", 2),
        ('Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".',
         "`sudo rm -f /tmp/libtpu_lockfile`", 2),
        ("TPU initialization failed: open(/dev/vfio/0): Device or resource busy: Device or resource busy; Couldn't "
         "open iommu group /dev/vfio/0", "the TPU is in use by another process (TPU init", 2),
        ("Couldn't open device: /dev/accel0 (Operation not permitted)",
         "/dev/accel0 may not be opened; run as root", 2),
        ("open(/dev/vfio/3): Operation not permitted; Couldn't open iommu group /dev/vfio/3",
         "/dev/vfio/3 may not be opened", 2),
        ("TPU initialization failed: Failed to connect to [::]:8353", "8353); a container needs its host's network", 2),
        ("Failed to get global TPU topology.",
         "did not start (Failed to get global TPU topology); `python run.py task=do", 2),
        ("Invalid --2a886c8_slice_builder_worker_addresses specified. Expected 8 worker addresses, got 1.",
         "`unset TPU_PROCESS_ADDRESSES`", 2),
        ("The program continuator has halted unexpectedly.", "the TPU stopped working (The program cont", 75),
        ("Core halted unexpectedly: INTERNAL: Accelerator device halted prematurely, perhaps due to an on-device "
         "check-failure. Node 0 halted unexpectedly at tag:pc TensorCoreSequencer:1:0x175",
         "the same command resumes", 75),
        ("UNAVAILABLE: Slice health check failed with error: worker 2", "take another machine", 75),
        ("DATA_LOSS: Attempting to fetch value instead of handling error", "the TPU stopped working", 75),
        ("The following ICI link(s) have unexpectedly gone down: 3", "the TPU stopped working", 75),
        ("Device unavailable", "the TPU stopped working", 75),
    ],
)  # fmt: skip
def test_a_tpu_that_is_held_or_lost(text: str, said: str, code: int) -> None:
    sentence, found = ending_of(RuntimeError(text), config=of("hw=v6e1"))
    assert said in sentence
    assert found == code
    assert sentence.startswith("hw=v6e1; ")
    assert "a bug" not in sentence
    assert is_lost(RuntimeError(text)) == (code == 75)
    if "memory" not in text:  # elsewhere such words are of something else
        assert "a bug" in ending_of(RuntimeError(text), config=of())[0]


def test_what_fails_after_it_does_not_hide_the_cause() -> None:
    """Closing a run whose device has failed may fail too."""
    try:
        try:
            raise RuntimeError(COMPILING)
        finally:
            raise KeyError("closed")
    except KeyError as error:
        said, code = ending_of(error, config=of("hw=v6e1"))
    assert "(used 20.73G of 15.75G hbm)" in said
    assert code == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OF_A_GPU, True),
        (OF_A_TPU, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("429 RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Read requests'"), False),
        (RuntimeError("RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'TPU memory' of allocations"), False),
        (RuntimeError("the search exceeded time limit"), False),
        (OSError(28, "No space left on device", "/dev/vfio/0: Device or resource busy"), False),
    ],
)
def test_other_errors_are_left_alone(error: Exception, expected: bool) -> None:
    for words in ((), ("hw=v6e1",)):
        said, code = ending_of(error, config=of(*words))
        assert ("memory of the device" in said) == expected
        assert code == (2 if expected else 1)


def test_a_process_that_ended_abruptly() -> None:
    """As torch_xla reports it: libtpu aborts the process that it does not like."""
    said, code = ending_of(
        BrokenProcessPool("A process in the process pool"), config=of("hw=v6e8", "hw.parallel=spawn")
    )
    assert said.startswith(
        "hw=v6e8; a process of hw.parallel=spawn ended abruptly, by a signal or an abort of libtpu; "
    )
    assert "`python run.py task=doctor hw=v6e8` tries the devices" in said
    assert code == 1
