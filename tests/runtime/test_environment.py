"""Variables that a command sets before torch is imported."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests import pretended
from tests.config.composing import CONF, composed
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import LIBTPU_INIT_ARGS, HwConfig, flags_of
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.planning.compiled import Compilers
from tpu_experiments.planning.stored_plans import programs_key
from tpu_experiments.runtime.lowered import Lowered
from tpu_experiments.runtime.processes.env import exported_flags, prepare_environment, variables
from tpu_experiments.runtime.processes.hosts import Hosts
from tpu_experiments.tasks.train import start_of


def test_a_plan_by_torchtpu_keeps_torch_from_looking_for_chips() -> None:
    hw = composed("task=plan", "hw=v6e1", "hw.runtime=torchtpu").hw
    with mock.patch.dict(os.environ):
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        prepare_environment(hw, is_planned=True)
        assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


@pytest.fixture(autouse=True)
def nothing_exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a command whose user exported no flags; a test may export some."""
    monkeypatch.delenv(LIBTPU_INIT_ARGS, raising=False)
    exported_flags.cache_clear()
    yield
    exported_flags.cache_clear()


def test_code_that_layers_share_is_in_a_tpu_s_program_once() -> None:
    """The flags of a config come later, and may turn that off."""
    always = "--xla_tpu_enable_deduplicated_calls"
    assert LIBTPU_INIT_ARGS not in variables(composed().hw)
    assert variables(composed("hw=v5e1").hw)[LIBTPU_INIT_ARGS].split()[0] == f"{always}=true"
    own = variables(composed("hw=v5e1", f"hw.libtpu_flags=[{always}\\=false]").hw)
    assert own[LIBTPU_INIT_ARGS].split()[:2] == [f"{always}=true", f"{always}=false"]


def test_vector_memory_of_an_operation_is_a_flag_in_kib() -> None:
    """A flag of the config comes later, and counts."""
    limit = "--xla_tpu_scoped_vmem_limit_kib"
    found = variables(composed("hw=v6e8", "hw.fusion_memory_mib=48", f"hw.libtpu_flags=[{limit}\\=1024]").hw)
    assert found[LIBTPU_INIT_ARGS].split()[1:3] == [f"{limit}={48 * 1024}", f"{limit}=1024"]
    assert limit not in variables(composed("hw=v6e8", "hw.fusion_memory_mib=null").hw)[LIBTPU_INIT_ARGS]


BARRIER = "--xla_tpu_use_enhanced_launch_barrier"
OF_EVERY_TPU = [
    f"{BARRIER}=false",
    "--xla_latency_hiding_scheduler_rerun=1",
    "--xla_tpu_prefer_async_allgather_to_allreduce=true",
    "--xla_tpu_enable_flash_attention=false",
]
OF_V5 = ["--xla_enable_async_all_gather=true", "--xla_enable_async_collective_permute=true"]
ONCE = "--xla_tpu_enable_deduplicated_calls=true"
WHOLE = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
MIB_64, MIB_96 = (f"--xla_tpu_scoped_vmem_limit_kib={mib * 1024}" for mib in (64, 96))


@pytest.mark.parametrize(
    ("words", "exported", "expected"),
    [
        (["hw=v4-8"], "", [ONCE, *OF_EVERY_TPU]),
        (["hw=v5e8"], "", [ONCE, MIB_64, *OF_EVERY_TPU, *OF_V5]),
        (["hw=v5p-8"], "", [ONCE, *OF_EVERY_TPU, *OF_V5]),
        (["hw=v6e8"], "", [ONCE, MIB_96, WHOLE, *OF_EVERY_TPU]),
        (["hw=v4-8"], f"{BARRIER}=true", [f"{BARRIER}=true", ONCE, *OF_EVERY_TPU[1:]]),
        (["hw=v4-8", f"hw.libtpu_flags=[{BARRIER}\\=true]"], "", [ONCE, f"{BARRIER}=true", *OF_EVERY_TPU[1:]]),
        (["hw=v4-8", f"+hw.env.LIBTPU_INIT_ARGS={BARRIER}"], "--x=1", [BARRIER, *OF_EVERY_TPU[1:]]),
        (["hw=v5e8", "hw.runtime=torchtpu"], "", [ONCE, MIB_64, f"{BARRIER}=false"]),
    ],
)
def test_a_plan_is_compiled_with_the_flags_of_a_run(
    words: list[str], exported: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user exports, and what the config sets, stays in the place of what torch_xla would add."""
    monkeypatch.setenv(LIBTPU_INIT_ARGS, exported)
    hw = composed("task=plan", *words).hw
    assert variables(hw)[LIBTPU_INIT_ARGS].split() == expected
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho $LIBTPU_INIT_ARGS > {tmp_path}/flags\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(compiler))
    program = Lowered("train", (8, 128), b"", (), (), Mesh(), num_replicas=1, trace_seconds=0.0)
    with Compilers(1) as compilers, pytest.raises(ConfigError):
        compilers.submit(program, hw=hw, folder=str(tmp_path / "plans")).result()
    assert (tmp_path / "flags").read_text().split() == expected


def test_the_log_of_a_run_says_which_flags_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = composed("hw=v5e1", f"output_dir={tmp_path}")
    monkeypatch.setenv(LIBTPU_INIT_ARGS, variables(config.hw)[LIBTPU_INIT_ARGS])
    with caplog.at_level(logging.INFO):
        assert start_of(config, Hosts()) is not None
    assert f"flags of libtpu: {' '.join([ONCE, *OF_EVERY_TPU, *OF_V5])}" in caplog.messages


def test_a_run_knows_the_plan_of_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's key is that of a run before and after it has set the variable; other flags are another plan's."""
    config = composed("hw=v5e8")
    key = programs_key(config, config.model.arch, resolve_stages(config))
    monkeypatch.setenv(LIBTPU_INIT_ARGS, variables(config.hw)[LIBTPU_INIT_ARGS])
    exported_flags.cache_clear()  # as in a process that the run starts
    assert programs_key(config, config.model.arch, resolve_stages(config)) == key
    monkeypatch.setenv(LIBTPU_INIT_ARGS, "--xla_enable_async_all_gather=false")
    exported_flags.cache_clear()
    assert programs_key(config, config.model.arch, resolve_stages(config)) != key


ADDED = """
import json, os, sys
import torch_xla
for accelerator, flags in json.load(sys.stdin):
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE=accelerator, LIBTPU_INIT_ARGS=flags)
    torch_xla._setup_libtpu_flags()
    print(os.environ["LIBTPU_INIT_ARGS"])
"""
EXPORTED = ("", "--xla_latency_hiding_scheduler_rerun=3 xla_enable_async_all_gather=false", "--xla_tpu_enable_flash_")


def test_what_torch_xla_adds_is_what_a_run_sets() -> None:
    """For every TPU of conf/hw, by torch_xla's own function, which its import calls on a machine with chips."""
    machines = [composed("task=plan", f"hw={file.stem}").hw for file in sorted((CONF / "hw").glob("*.yaml"))]
    cases = [(hw, exported) for hw in machines if hw.device == "tpu" for exported in EXPORTED]
    assert {hw.topology[:3] for hw, _ in cases if hw.topology} == {"v4:", "v5e", "v5p", "v6e", "tpu"}
    asked = [(accelerator_of(hw), f"{exported} {' '.join(of_the_config(hw))}") for hw, exported in cases]
    done = subprocess.run([sys.executable, "-c", ADDED], input=json.dumps(asked), capture_output=True, text=True)
    answers = done.stdout.splitlines()
    assert len(answers) == len(cases), done.stderr
    for (hw, exported), answer in zip(cases, answers, strict=True):
        assert answer.split() == flags_of(hw, exported=exported), hw.name


def accelerator_of(hw: HwConfig) -> str:
    """The type as the machine's metadata has it; Colab's is not rented."""
    return hw.rent.accelerator_type if hw.rent else f"{(hw.topology or '').partition(':')[0]}-{hw.num_devices}"


def of_the_config(hw: HwConfig) -> list[str]:
    limit = [] if hw.fusion_memory_mib is None else [f"--xla_tpu_scoped_vmem_limit_kib={hw.fusion_memory_mib * 1024}"]
    return [ONCE, *limit, *hw.libtpu_flags]


IMPORTED = "import os, sys, {0}; print(os.environ.get('LIBTPU_INIT_ARGS', ''))"


@pytest.mark.skipif(pretended.problem() is not None, reason=str(pretended.problem()))
@pytest.mark.parametrize(
    ("runtime", "package", "added"),
    [("xla", "torch_xla", {*OF_EVERY_TPU, *OF_V5}), ("torchtpu", "jax", {f"{BARRIER}=true"})],
)
def test_nothing_is_added_where_chips_are_seen(runtime: str, package: str, added: set[str]) -> None:
    """torch_xla and jax look for chips on the PCI bus when they are imported; TorchTPU imports jax."""
    hw = composed("task=plan", "hw=v5e1", f"hw.runtime={runtime}").hw
    values = {name: value for name, value in os.environ.items() if name != LIBTPU_INIT_ARGS}
    values |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}

    def flags(**more: str) -> list[str]:
        command = pretended.on_host([sys.executable, "-c", IMPORTED.format(package)], device=pretended.V5E)
        there = {"env": values | more, "cwd": CONF.parent}
        done = subprocess.run(command, **there, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1].split()

    assert set(flags()) == added
    assert flags(**variables(hw)) == flags_of(hw)


SETTLED = """
import os
os.environ["LIBTPU_INIT_ARGS"] = "--mine=1"
from tests.config.composing import composed
from tpu_experiments.runtime.processes.env import change_flags, variables
before, after = composed("hw=v6e8").hw, composed("hw=v6e8", "hw.fusion_memory_mib=48").hw
os.environ["LIBTPU_INIT_ARGS"] = variables(before)["LIBTPU_INIT_ARGS"]
import torch_xla
change_flags(before, before)
print(os.environ["LIBTPU_INIT_ARGS"])
change_flags(before, after)
print(os.environ["LIBTPU_INIT_ARGS"])
print(" ".join(variables(after)["LIBTPU_INIT_ARGS"].split()))
torch_xla.device()
change_flags(before, after)  # as the second run of a pack does
change_flags(after, before)
"""
READ_LATE = """
import os
import torch_xla
os.environ["LIBTPU_INIT_ARGS"] = "--xla_tpu_nonsense=1"
torch_xla.device()
"""


def output_of(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "LIBTPU_INIT_ARGS"} | variables
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=240)


def test_settings_of_the_table_replace_flags_until_a_device_is_used() -> None:
    found = output_of(SETTLED, PJRT_DEVICE="CPU")
    before, after, as_planned = (line.split() for line in found.stdout.splitlines())
    assert before == ["--mine=1", ONCE, MIB_96, WHOLE, *OF_EVERY_TPU]
    assert after == ["--mine=1", ONCE, MIB_96.replace("98304", "49152"), WHOLE, *OF_EVERY_TPU]
    assert after == as_planned
    assert found.stderr.splitlines()[-1] == (
        "RuntimeError: a device was used before the flags of libtpu were known; use none earlier"
    )


def test_libtpu_reads_its_flags_when_the_first_device_is_used() -> None:
    """So those that are set after torch_xla was imported count. There is no TPU: libtpu reads them before it looks."""
    found = output_of(READ_LATE, PJRT_DEVICE="TPU", TPU_SKIP_MDS_QUERY="1")
    assert "Unknown command line flag 'xla_tpu_nonsense'" in found.stderr
