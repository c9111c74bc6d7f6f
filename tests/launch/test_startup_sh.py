"""launch/startup.sh, run for real on a machine with an empty home, on torch_xla's CPU device."""

import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests import pretended
from tests.launch.virtual_machine import NO_LOOKS, VirtualMachine, make_machine, metadata_server

pytest_plugins = ("tests.gcs",)


@pytest.fixture
def machine(tmp_path: Path) -> VirtualMachine:
    return make_machine(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> VirtualMachine:
    """A machine that is ready; making one takes about 5 s."""
    machine = make_machine(tmp_path_factory.mktemp("shared"))
    made = machine.run("hw=cpu", NO_LOOKS)
    assert made.returncode == 0, made.stderr
    return machine


def test_a_bare_machine_becomes_ready_and_stays_so(machine: VirtualMachine) -> None:
    first = machine.run()
    assert first.returncode == 0, first.stderr
    assert "launch/local.sh: making" in first.stderr
    assert "this machine is hw=cpu" in first.stderr
    assert "1 x cpu, started in" in first.stderr
    assert "launch/startup.sh: ready after" in first.stderr
    second = machine.run()
    assert second.returncode == 0, second.stderr
    assert "launch/local.sh" not in second.stderr
    assert "launch/startup.sh: ready after" in second.stderr
    assert sorted(path.name for path in machine.root.iterdir() if path.name.startswith(".")) == [".venv", ".venv.lock"]


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("0x006f", "always [madvise] never\n", "always\n"),
        ("0x006f", "[always] madvise never\n", "[always] madvise never\n"),
        ("0x0042", "always [madvise] never\n", "always [madvise] never\n"),
    ],
    ids=["v6e", "set before", "network card"],
)
def test_a_tpu_vm_takes_large_pages(
    shared: VirtualMachine, tmp_path: Path, device: str, before: str, after: str
) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(before)
    if (problem := pretended.problem()) is not None:
        pytest.skip(problem)
    if not LARGE_PAGES.exists():
        pytest.skip(f"the kernel has no {LARGE_PAGES}")
    script = str(shared.root / "launch" / "startup.sh")
    words = ["bash", script, "hw=cpu", NO_LOOKS]
    command = pretended.on_host(words, device=device, files={str(LARGE_PAGES): setting})
    done = subprocess.run(command, env=shared.environ(), cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert setting.read_text() == after
    assert ("transparent hugepages enabled" in done.stderr) == (before != after)


@pytest.mark.slow
def test_a_machine_killed_half_way_becomes_ready(machine: VirtualMachine) -> None:
    with machine.start("hw=cpu", NO_LOOKS) as first:
        assert first.stderr is not None
        assert "making" in first.stderr.readline()
        time.sleep(1.5)
        os.killpg(first.pid, signal.SIGKILL)
    second = machine.run("hw=cpu", NO_LOOKS, "--", "python", "-c", "import tiny; print(tiny.answer)")
    assert (second.returncode, second.stdout) == (0, "42\n"), second.stderr


@pytest.mark.slow
def test_a_machine_without_the_device_is_not_ready(shared: VirtualMachine) -> None:
    done = shared.run("hw=v6e8", "task.checks=[devices]")
    assert done.returncode == 1
    assert "no TPU (no Google PCI device" in done.stderr
    assert "not ready: mend what has failed above" in done.stderr


def test_the_machine_says_which_it_is(shared: VirtualMachine) -> None:
    rented = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
    done = shared.run("task.checks=[runtime_version]", **rented)
    assert (done.returncode, "this machine is hw=v5e8" in done.stderr) == (0, True)
    other = shared.run("hw=v6e8", "task.checks=[runtime_version]", **rented)
    assert (other.returncode, "and hw=v6e8 is v6e:2x4" in other.stderr) == (1, True)
    unknown = shared.run("task.checks=[runtime_version]", **(rented | {"TPU_ACCELERATOR_TYPE": "v9-8"}))
    assert (unknown.returncode, "rent.accelerator_type=v9-8; name one with hw=." in unknown.stderr) == (2, True)


@pytest.mark.slow
def test_an_image_of_another_chip_is_refused(shared: VirtualMachine) -> None:
    look = "task.checks=[runtime_version]"
    with metadata_server("v6e-8", runtime_version="tpu-ubuntu2204-base") as host:
        wrong = shared.run(look, GCE_METADATA_HOST=host)
    assert wrong.returncode == 1
    assert "this machine is hw=v6e8" in wrong.stderr
    assert "--runtime-version=v2-alpha-tpuv6e" in wrong.stderr
    with metadata_server("v6e-8", runtime_version="v2-alpha-tpuv6e") as host:
        assert shared.run(look, GCE_METADATA_HOST=host).returncode == 0


def test_a_word_that_is_no_setting_is_refused(shared: VirtualMachine) -> None:
    done = shared.run("python", "run.py")
    assert (done.returncode, "a command comes behind --" in done.stderr) == (2, True)


def test_settings_come_from_the_command(shared: VirtualMachine) -> None:
    command = ("--", "python", "run.py", "experiment=qwen05b_uk_law", "hw=v6e16", "task=prepare", "-m", "seed=1,2")
    done = shared.run(*command, TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v6e-16")
    assert done.returncode == 1  # this machine has no chip
    assert "v6e-16, runtime version unknown" in done.stderr


@pytest.mark.slow
def test_compiled_programs_come_back_from_the_bucket(shared: VirtualMachine, gcs_bucket: str, tmp_path: Path) -> None:
    settings = ("hw=cpu", NO_LOOKS, f"output_dir={gcs_bucket}/runs")
    write = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'program').write_bytes(b'x' * 9)"
    cache = tmp_path / "cache"
    first = shared.run(*settings, f"hw.compile_cache={cache}", "--", "python", "-c", write, str(cache))
    assert first.returncode == 0, first.stderr
    assert "on_vm: pull, 0 compiled programs" in first.stderr
    assert "on_vm: push, 1 compiled programs" in first.stderr
    second = shared.run(*settings, f"hw.compile_cache={tmp_path}/other")
    assert "on_vm: pull, 1 compiled programs" in second.stderr
    assert (tmp_path / "other" / "program").read_bytes() == b"x" * 9


def test_a_request_to_stop_reaches_the_command(shared: VirtualMachine) -> None:
    wait = (
        "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(75)); print('up', flush=True); time.sleep(60)"
    )
    with shared.start("hw=cpu", NO_LOOKS, "--", "python", "-c", wait) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "up\n"
        started.terminate()
        assert started.wait(timeout=60) == 75


def index_of_wheels(folder: Path, *, version: str) -> Path:
    """A package index in files, with a wheel of torch for CPUs."""
    place = folder / "simple" / "torch"
    place.mkdir(parents=True)
    info = f"torch-{version}.dist-info"
    wheel = place / f"torch-{version}-py3-none-any.whl"
    files = {
        "torch_marker.py": "cpu = True\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{info}/RECORD,,\ntorch_marker.py,,11\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return folder / "simple"


@pytest.mark.slow
def test_torch_without_cuda_is_taken_where_an_index_has_it(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.add_wheel("torch", "2.9.0", {"torch_marker.py": "cpu = False\n"})
    machine.add_wheel("nvidia-nccl-cu12".replace("-", "_"), "2.0", {"nvidia_marker.py": ""})
    machine.lock.write_text(machine.lock.read_text().replace("nvidia_nccl_cu12", "nvidia-nccl-cu12"))
    index = index_of_wheels(tmp_path, version="2.9.0+cpu").as_uri()
    # PIP_NO_INDEX would also keep pip from the index it is told.
    env = {"TPU_EXPERIMENTS_TORCH_INDEX": index, "PIP_NO_INDEX": ""}
    look = ("--", "python", "-c", "import torch_marker as t; import importlib.util as u; "
            "print(t.cpu, u.find_spec('nvidia_marker'))")  # fmt: skip
    for _ in range(2):
        done = machine.run("hw=cpu", NO_LOOKS, *look, **env)
        assert (done.returncode, done.stdout) == (0, "True None\n"), done.stderr
    assert "fetching" not in done.stderr
    # launch/local.sh alone leaves it as it is.
    again = machine.run("hw=cpu", NO_LOOKS, *look)
    assert (again.stdout, "launch/local.sh" in again.stderr) == ("True None\n", False)


@pytest.mark.slow
def test_an_index_that_does_not_answer_costs_nothing_but_cuda(machine: VirtualMachine, tmp_path: Path) -> None:
    machine.add_wheel("torch", "2.9.0", {"torch_marker.py": "cpu = False\n"})
    env = {"TPU_EXPERIMENTS_TORCH_INDEX": (tmp_path / "nowhere").as_uri()}
    done = machine.run("hw=cpu", NO_LOOKS, "--", "python", "-c", "import torch_marker; print(torch_marker.cpu)", **env)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert "taking torch from the lock" in done.stderr


@pytest.mark.slow
def test_python_is_installed_where_there_is_none(machine: VirtualMachine) -> None:
    for name in ("python3.11", "python3.12", "python3.13"):
        machine.fake(name, "exit 127")
    real = f'#!/bin/sh\\nexec {shlex.quote(sys.executable)} "$@"\\n'
    place = shlex.quote(str(machine.bin / "python3.11"))
    machine.fake("apt-get", f"echo apt-get $* >&2; [ $4 = update ] || printf '{real}' > {place}")
    done = machine.run("hw=cpu", NO_LOOKS, PYTHON="")
    assert done.returncode == 0, done.stderr
    assert "install -y python3.11 python3.11-venv libpython3.11" in done.stderr
