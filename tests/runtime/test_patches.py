"""Versions that private names were written for, and attributes that are put back."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.rehearsal.machine import Machine
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime import patches

REPOSITORY = Path(__file__).parents[2]


def test_the_environment_has_the_versions() -> None:
    patches.require_versions("torch", "torch_xla")
    assert patches.installed("torch") == version("torch").partition("+")[0] == "2.9.0"


def test_another_version_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "version", {"torch": "2.9.0+cpu", "torch_xla": "2.10.0"}.__getitem__)
    with pytest.raises(ConfigError, match=r"^torch_xla is 2\.10\.0; .* install torch==2\.9\.0 torch_xla==2\.9\.0, or"):
        patches.require_versions("torch", "torch_xla")


def test_a_missing_package_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patches.WRITTEN_FOR, "no_such_package_of_ours", "1.0")
    with pytest.raises(ConfigError, match="no_such_package_of_ours is missing"):
        patches.require_versions("no_such_package_of_ours")


def test_a_python_without_its_shared_library_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patches.missing_library() is None
    monkeypatch.setattr(patches.sys, "version_info", SimpleNamespace(major=3, minor=99))
    with pytest.raises(ConfigError, match=r"^this Python has no shared library libpython3\.99\.so\.1\.0, "):
        patches.require_versions("torch", "torch_xla")
    patches.require_versions("torch")


def test_an_attribute_is_put_back_whatever_happens() -> None:
    owner = SimpleNamespace(name=1)
    seen = []

    def failing() -> None:
        with patches.patched_attribute(owner, "name", 2) as before:
            seen.append((before, owner.name))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert (seen, owner.name) == ([(1, 2)], 1)


def test_jax_writes_its_own_version_of_mosaic_again() -> None:
    tpu_custom_call = pytest.importorskip("jax._src.tpu_custom_call")
    own = tpu_custom_call.get_ir_version
    with patches.mosaic_for_libtpu():
        assert tpu_custom_call.get_ir_version(None) == 7
    assert tpu_custom_call.get_ir_version is own


def test_kernels_are_lowered_on_a_tpu_vm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where jax sees chips it asks its own device, a CPU here, for the date of libtpu, and refuses every kernel."""
    cloud_tpu_init = pytest.importorskip("jax._src.cloud_tpu_init")
    import jax
    from jax._src import xla_bridge

    from tpu_experiments.runtime.kernels.attention import AttentionCall, Scores
    from tpu_experiments.runtime.kernels.splash import lowered

    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    assert xla_bridge.get_backend().platform == jax.config.jax_platforms == "cpu"
    call = AttentionCall(1, 2, 2, 128, 128, "bfloat16", Scores(1.0))
    assert b"tpu_custom_call" in lowered(call, direction="forward", target="tpu")
    assert cloud_tpu_init.running_in_cloud_tpu_vm


def test_a_run_does_not_repeat_what_the_doctor_says_of_large_pages(tmp_path: Path) -> None:
    """jax warns at its import of a TPU VM whose kernel gives them on request only; anything else it says is kept."""
    vm = Machine("v6e", 1, 0)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    set_so = 'mount --bind "$1" /sys/kernel/mm/transparent_hugepage/enabled; shift; exec "$@"'
    host = vm.command(["sh", "-ec", set_so, "sh", str(tmp_path / "enabled")])
    if subprocess.run([*host, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no mount namespace, or the kernel has no such setting")
    plain, kernels = "import jax", "import tpu_experiments.runtime.kernels.splash"
    said = []
    for code in (plain, kernels):
        done = subprocess.run([*host, sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        said.append("Transparent hugepages are not enabled" in done.stderr)
    assert said == [True, False]
