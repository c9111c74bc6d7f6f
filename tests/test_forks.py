"""A forked command ends as one started from a shell: exit codes, signals, outputs, exit hooks, its own imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks

ENDINGS = {
    "a number": "import sys; sys.exit(3)",
    "a sentence": "import sys; sys.exit('wrong')",
    "an error": "print('out'); raise ValueError('told')",
    "an end with hooks": "import atexit; atexit.register(print, 'hook'); print('body')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "its own name": "print(__name__, __file__, __import__('sys').argv, __import__('os').getcwd())",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the tests' beginning: another test of the same process may have left a variable."""
    for name in os.environ.keys() - forks.ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    for name, value in forks.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_a_process_from_a_shell(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[ending])
    plain = subprocess.run(
        [sys.executable, str(script), "a=1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    forked = forks.run([str(script), "a=1"], cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (plain.returncode, plain.stdout)
    assert forked.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_what_a_run_sets_before_it_imports_is_not_imported_yet(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, os; print(*{m.split('.')[0] for m in sys.modules}, os.environ['PJRT_DEVICE'])")
    seen = forks.run([str(script)], env=os.environ | {"PJRT_DEVICE": "NONE"}).stdout
    assert seen.endswith(" NONE\n")
    assert {"torch", "torch_xla", "jax", "tpu_experiments"} & set(seen.split()) == {"torch"}


def test_one_with_another_environment_is_an_ordinary_process(tmp_path: Path) -> None:
    process = forks.start(
        ["-c", "import sys; print('torch' in sys.modules)"], env=os.environ | {"HF_HOME": str(tmp_path)}
    )
    assert isinstance(process, subprocess.Popen)
    assert process.communicate()[0] == "False\n"


def test_modules_of_pythonpath_are_found_and_those_of_the_server_are_not(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text("import sys; import mine; print('torch' in sys.modules, any('tests' in p for p in sys.path[:2]))")
    done = forks.run([str(script)], env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.slow
def test_the_environment_of_the_first_test_is_not_that_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forks, "_server", None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with forks.start(["-c", "pass"]) as process:
        assert isinstance(process, subprocess.Popen)
    monkeypatch.delenv("HF_HOME")
    script = tmp_path / "script.py"
    script.write_text("")
    with forks.start([str(script)]) as process:
        assert isinstance(process, forks.Fork)
    assert forks._server is not None
    forks._server.close()


def test_it_is_killed_like_any_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; print('begun', flush=True); time.sleep(60)")
    with forks.start([str(script)]) as process:
        assert isinstance(process, forks.Fork)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
