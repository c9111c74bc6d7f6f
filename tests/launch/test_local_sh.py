"""launch/local.sh, run for real against wheels of a few lines and fakes of df, uname and Python."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.checkout import PLENTY_DF, Checkout, make_checkout

STUB_UV = """#!/bin/sh
[ "$1" = --version ] && echo "uv 9.9.9" && exit
echo "stub uv: $*"
exec "$5" -m pip install --require-hashes --no-deps -r "$6"
"""
BROKEN_UV = """#!/bin/sh
[ "$1" = --version ] && echo "uv 9.9.9" && exit
exit 1
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return make_checkout(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def ready(shared: Checkout) -> Iterator[Checkout]:
    """A checkout with a complete environment; making one takes about 5 s, so tests share it."""
    made = shared.run("true")
    assert made.returncode == 0, made.stderr
    yield shared
    assert shared.run("python", "-c", "import tiny; assert tiny.answer == 42").returncode == 0


def test_without_a_command_it_explains_itself(checkout: Checkout) -> None:
    result = checkout.run()
    assert result.returncode == 2
    assert "usage: bash launch/local.sh COMMAND" in result.stderr
    assert not checkout.venv.exists()


@pytest.mark.parametrize("version", ["3.8.18", "3.10.13", "3.14.0"])
def test_a_python_outside_the_range_is_named(checkout: Checkout, version: str) -> None:
    numbers = version.replace(".", ", ")
    python = checkout.fake_python("other-python", f"sys.version_info = ({numbers})")
    result = checkout.run("true", PYTHON=str(python))
    assert result.returncode == 2
    assert f"{python} is {version}" in result.stderr
    assert "apt-get install python3.11 python3.11-venv libpython3.11" in result.stderr
    assert not checkout.venv.exists()


def test_a_python_without_ensurepip_is_named(checkout: Checkout) -> None:
    python = checkout.fake_python("bare-python", "sys.modules['ensurepip'] = None")
    result = checkout.run("true", PYTHON=str(python))
    assert result.returncode == 2
    assert f"apt-get install python3.{sys.version_info[1]}-venv" in result.stderr


def test_a_python_without_its_shared_library_is_named(checkout: Checkout) -> None:
    """Debian's and Ubuntu's own: torch_xla does not load in it."""
    python = checkout.fake_python("static-python", "import ctypes; ctypes.CDLL = lambda name: open('/nowhere')")
    result = checkout.run("true", PYTHON=str(python))
    library = f"libpython3.{sys.version_info[1]}"
    assert f"lacks {library}.so.1.0, which torch_xla loads; " in result.stderr
    assert f"apt-get install {library}; until then only hw.runtime=eager runs" in result.stderr


def test_another_libc_is_refused(checkout: Checkout) -> None:
    python = checkout.fake_python("musl-python", "import os; os.confstr = lambda name: 'musl 1.2'")
    result = checkout.run("true", PYTHON=str(python))
    assert result.returncode == 2
    assert "glibc 2.28" in result.stderr


def test_too_little_disk_is_said_with_numbers(checkout: Checkout) -> None:
    checkout.fake("df", PLENTY_DF.replace("99000000", "3000000"))
    result = checkout.run("true")
    assert result.returncode == 2
    assert "has 3 GB free and the environment needs about 10 GB" in result.stderr


def test_another_machine_is_refused(checkout: Checkout) -> None:
    checkout.fake("uname", '[ "$1" = -s ] && echo Linux || echo aarch64')
    result = checkout.run("true")
    assert result.returncode == 2
    assert "Linux on aarch64" in result.stderr


def test_a_shim_that_fails_is_passed_over(checkout: Checkout) -> None:
    checkout.fake("python3.11", "echo 'python3.11: command not found' >&2; exit 127")
    checkout.fake("python3.12", f'exec {shlex.quote(sys.executable)} "$@"')
    # Too little disk stops the run right after a Python was found.
    checkout.fake("df", PLENTY_DF.replace("99000000", "1"))
    assert "GB free" in checkout.run("true", PYTHON="").stderr


def test_a_folder_of_other_files_is_left_alone(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    result = checkout.run("true", TPU_EXPERIMENTS_VENV=str(tmp_path / "thesis"))
    assert result.returncode == 2
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_the_command_runs_inside(ready: Checkout) -> None:
    code = "import os, sys, tiny; print(os.getcwd(), sys.prefix, os.environ['VIRTUAL_ENV'])"
    result = ready.run("python", "-c", code)
    assert result.stdout.strip() == f"{ready.root} {ready.venv} {ready.venv}"
    assert result.stderr == ""


@pytest.mark.parametrize("code", [0, 1, 2, 7, 130])
def test_the_exit_code_is_passed_on(ready: Checkout, code: int) -> None:
    assert ready.run("python", "-c", f"raise SystemExit({code})").returncode == code


def test_a_complete_environment_costs_little(ready: Checkout) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert ready.run("true").stderr == ""
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.2


def test_a_killed_installer_is_recovered_from(ready: Checkout) -> None:
    (ready.venv / ".tpu_experiments").unlink()
    ready.tiny.write_text("answ")
    result = ready.run("python", "-c", "import tiny; print(tiny.answer)")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "42")
    assert "was left unfinished" in result.stderr
    assert "to be installed again: tiny-1.0" in result.stderr


@pytest.mark.slow
def test_a_lost_python_is_recovered_from(ready: Checkout) -> None:
    for link in ready.venv.glob("bin/python*"):
        link.unlink()
        link.symlink_to("/nowhere/python")
    assert "has lost its Python" in ready.run("true").stderr


@pytest.mark.slow
def test_another_wish_for_python_is_followed(ready: Checkout) -> None:
    minor = 12 if sys.version_info[1] == 11 else 11
    python = ready.fake_python("wished-python", f"sys.version_info = (3, {minor}, 0)")
    assert "has another Python than" in ready.run("true", PYTHON=str(python)).stderr


def test_a_wish_that_fails_spoils_nothing(ready: Checkout) -> None:
    assert ready.run("true", PYTHON="/nowhere/python").returncode == 2
    assert ready.run("true").stderr == ""


def test_another_lock_is_noticed(ready: Checkout) -> None:
    ready.lock.write_text(ready.lock.read_text() + "# changed\n")
    assert "has changed since" in ready.run("true").stderr


@pytest.mark.slow
def test_a_moved_checkout_is_noticed(ready: Checkout) -> None:
    moved = ready.root.with_name("moved here")
    ready.root.rename(moved)
    ready.root = moved
    assert "made in another place" in ready.run("true").stderr


@pytest.mark.slow
def test_an_environment_behind_a_link_is_left_alone(ready: Checkout, tmp_path: Path) -> None:
    other = ready.root.with_name("other checkout")
    ready.root.rename(other)
    ready.root, elsewhere = other, tmp_path / "environment"
    (other / ".venv").rename(elsewhere)
    (other / ".venv").symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    done = ready.run("true")
    assert done.returncode == 2
    assert f"is a link to {elsewhere}; remove the link, or set TPU_EXPERIMENTS_VENV" in done.stderr
    assert sorted(elsewhere.rglob("*")) == before
    (other / ".venv").unlink()
    elsewhere.rename(other / ".venv")


def test_two_runs_at_once_make_one_environment(checkout: Checkout) -> None:
    runs = [checkout.start("python", "-c", "import tiny") for _ in range(2)]
    errors = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert "".join(errors).count("making") - "".join(errors).count("another run is making") == 1


@pytest.mark.slow
def test_a_run_that_begins_while_this_one_looks_is_waited_for(checkout: Checkout) -> None:
    # As another run would between two looks: it takes the lock, then writes into the folder.
    other = f"touch {shlex.quote(str(checkout.venv))}.lock && mkdir -p {shlex.quote(str(checkout.venv))}/bin"
    checkout.fake("ls", f'{other}; exec /bin/ls "$@"')
    result = checkout.run("python", "-c", "import tiny")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 2.5])
def test_a_run_killed_at_any_moment_is_recovered_from(checkout: Checkout, seconds: float) -> None:
    with checkout.start("true") as first:
        assert first.stderr is not None
        assert "making" in first.stderr.readline()
        time.sleep(seconds)
        os.killpg(first.pid, signal.SIGKILL)
    second = checkout.run("python", "-c", "import tiny")
    assert second.returncode == 0, second.stderr


@pytest.mark.slow
@pytest.mark.parametrize("uv", [STUB_UV, BROKEN_UV], ids=["works", "broken"])
def test_uv_comes_from_the_lock_and_pip_stands_in(checkout: Checkout, uv: str) -> None:
    checkout.add_wheel("uv", "9.9.9", {"uv-9.9.9.data/scripts/uv": uv})
    result = checkout.run("python", "-c", "import tiny")
    assert result.returncode == 0, result.stderr
    assert "fetching the installer, uv 9.9.9" in result.stderr
    assert ("stub uv: pip sync" in result.stderr) == (uv == STUB_UV)
    assert ("uv could not be used" in result.stderr) == (uv == BROKEN_UV)


def test_a_wrong_hash_installs_nothing(checkout: Checkout) -> None:
    checkout.lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    result = checkout.run("python", "-c", "import tiny")
    assert result.returncode == 2
    assert "could not be installed" in result.stderr
    assert not (checkout.venv / ".tpu_experiments").exists()
