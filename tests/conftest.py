"""Shared fixtures. torch_xla reads its environment at import, so it is set here, before any test module loads it."""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the Hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # else torch looks for chips where torch_tpu is installed
os.environ.setdefault(
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
)  # read when gcsfs is imported, as storage/paths.py sees to
# LLVM's level: four files of tests/models, runtime and training took 121 s of CPU without it, 69 s with it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Tiny matrices: with more threads than free cores, 20 eager steps took 137 s instead of 2.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A run of the eager runtime has a thread for each core. Where the cores are taken, threads that wait in a loop used
# 138 s of CPU for 36 steps; those that sleep, 26 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from tests.jobs import of_tiny_job
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import retry

# Python's collector goes through all that torch and transformers keep for every 700 new objects. Without this the tests
# took 2,150 s of CPU, with it 1,656 s (2026-11-25).
gc.set_threshold(50_000, 20, 100)

REPOSITORY = Path(__file__).parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


NEED_TORCH_XLA = (
    *("models/generation/test_tpu_programs.py", "models/test_encoders.py", "models/test_longformer.py"),
    *("models/test_xlstm.py", "objectives/test_masked.py", "objectives/test_replaced_token.py"),
    *("planning/test_compiled.py", "quantisation/test_grid.py", "training/test_step.py", "runtime/test_baked.py"),
    *("runtime/test_closures.py", "runtime/test_replay.py", "runtime/test_xla_attention.py"),
    *("runtime/test_xla_programs.py", "runtime/test_xla_replay.py", "export/test_gguf.py"),
    *("planning/test_plan_task.py", "planning/test_same_program.py", "planning/test_attention_compile.py"),
    *("planning/test_gradient_sums.py", "runtime/test_hosts.py", "runtime/test_patches.py"),
    *("tasks/test_doctor_looks.py", "tasks/test_doctor_software.py", "launch"),
)
"""Files that need torch_xla, its lock or the extra export; left out in TorchTPU's environment, which has none."""
collect_ignore = [] if find_spec("torch_xla") else list(NEED_TORCH_XLA)
QUICK = (
    "loggers",
    "metrics",
    "optim",
    "test_documented_names.py",
    "test_house_rules.py",
    "test_layers.py",
    "test_manuals.py",
)
"""Files and folders of the inner loop (`pytest -m quick`), 65 s of CPU; tests on torch_xla are left out."""


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than cores, of which tests that wait for processes, sockets and locks use little."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the inner loop."""
    for item in items:
        folder = item.path.relative_to(REPOSITORY / "tests").parts[0]
        is_heavy = any(item.get_closest_marker(name) for name in ("xla", "slow", "tpu"))
        if folder in QUICK and not is_heavy:
            item.add_marker("quick")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Touch the XLA device before any CPU backward: torch 2.9 sizes its autograd queues at the first one."""
    if item.get_closest_marker("xla") and find_spec("torch_xla") is not None:  # absent in TorchTPU's environment
        import torch_xla

        torch_xla.device()


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """Compose a config of the tiny job, as run.py does, without running anything."""
    from hydra import initialize_config_dir

    from tests.config.composing import CONF, composition
    from tpu_experiments.config.compose import to_config

    def make(*overrides: str) -> Config:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return to_config(composition(["hw.num_threads=1", *of_tiny_job(overrides)]))

    return make


@pytest.fixture(autouse=True)
def no_hurry() -> Iterator[None]:
    """A run in a test's own process has storage follow its requests to stop; the next test has none."""
    yield
    retry._grace = None


@pytest.fixture(scope="module")
def plain_attention() -> Iterator[None]:
    """For tensors of the host: a test before in this process may have installed the kernel of torch_xla's device."""
    from tpu_experiments.runtime.kernels.attention import without_attention_kernel

    with without_attention_kernel():
        yield


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, brought back to what it was: a task takes it over."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield root
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def shared_data() -> Path:
    """The real small data sets beside the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"{SHARED_DATA} is not there; it holds real data sets that are not part of the repository")
    return SHARED_DATA
