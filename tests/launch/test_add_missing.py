"""launch/add_missing.py: what is missing is added, what belongs together stays."""

import shutil
import subprocess
from pathlib import Path

import packaging
import pytest

from launch import add_missing
from tests.launch.checkout import Checkout, make_checkout


def test_what_is_missing_or_other(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["torch==2.9.0", "gcsfs>=2026.2", "datasets>=5.2,<6", "numpy>=2.1,<3"]
    versions = {"torch": "2.9.0+cpu", "gcsfs": None, "datasets": "4.8.5", "numpy": "2.1.3"}
    assert add_missing.unfit(lines, versions) == ["gcsfs>=2026.2", "datasets<6,>=5.2"]
    assert add_missing.main() == 0
    assert capsys.readouterr().out == "nothing to add\n"


@pytest.fixture
def image(tmp_path: Path) -> Checkout:
    """A notebook's Python with a torch of its own, and an index that has newer ones."""
    checkout = make_checkout(tmp_path)
    checkout.add_wheel("torch", "2.9.0", {"torch.py": "cuda = None\n"})
    checkout.add_wheel("torch_xla", "2.9.0", {"torch_xla.py": ""})
    assert checkout.run("true").returncode == 0
    site = next(checkout.venv.glob("lib/python*/site-packages"))
    shutil.copytree(Path(packaging.__file__).parent, site / "packaging")
    shutil.copy(Path(add_missing.__file__), checkout.root / "launch")
    checkout.add_wheel("torch", "2.11.0", {"torch.py": "cuda = 1\n"})
    checkout.add_wheel("needs_torch", "1.0", {"needs_torch.py": "import torch\n"})
    return checkout


def add(image: Checkout, *dependencies: str) -> subprocess.CompletedProcess[str]:
    of_backend = [line for line in dependencies if line.startswith("torch")]
    others = ["torch>=2.8", *(line for line in dependencies if line not in of_backend)]
    text = f"[project]\ndependencies = {others}\noptional-dependencies.xla = {of_backend}\n"
    (image.root / "pyproject.toml").write_text(text)
    command = [str(image.venv / "bin" / "python"), str(image.root / "launch" / "add_missing.py")]
    return subprocess.run(command, env=image.environ(), capture_output=True, text=True, check=False)


def test_pip_adds_and_keeps(image: Checkout) -> None:
    done = add(image, "torch==2.9.0", "torch_xla==2.9.0", "tiny>=1", "needs_torch>=1")
    assert done.returncode == 0, done.stderr
    assert "adding needs_torch>=1" in done.stdout
    assert "kept torch 2.9.0, torch_xla 2.9.0" in done.stdout
    assert add(image, "torch==2.9.0", "torch_xla==2.9.0", "needs_torch>=1").stdout == "nothing to add\n"


def test_an_image_with_another_torch_is_refused(image: Checkout) -> None:
    done = add(image, "torch==2.8.0", "torch_xla==2.9.0")
    assert (done.returncode, "this image lacks torch==2.8.0" in done.stdout) == (2, True)
