"""The wheel: `tpu-experiments` with conf/ inside, from any folder, beside a checkout or without one."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


class Installed:
    """An environment with the wheel, and this environment's packages in place of a second copy of 8 GB."""

    def __init__(self, root: Path) -> None:
        self.home = root / "elsewhere"
        self.home.mkdir()
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root)]
        subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
        (self.wheel,) = root.glob("tpu_experiments-*.whl")
        environment = root / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        self.python = environment / "bin" / "python"
        install = [sys.executable, "-m", "uv", "pip", "install", "--offline", "--no-deps", "--python", str(self.python)]
        subprocess.run([*install, str(self.wheel)], check=True, capture_output=True)
        (site,) = (environment / "lib").glob("python*/site-packages")
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(self.python.parent / "tpu-experiments"), *words]
        return subprocess.run(command, cwd=self.home, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_it_holds_the_tracked_files_of_the_package_and_of_conf(installed: Installed) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "tpu_experiments", "conf"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    wanted = {name if name.startswith("tpu_") else f"tpu_experiments/{name}" for name in tracked.stdout.splitlines()}
    with zipfile.ZipFile(installed.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert wanted <= held
    own = {name for name in held - wanted if name.startswith("tpu_experiments/conf/local/")}
    assert own == set(), "settings of this machine"


def test_it_prepares_with_the_configs_inside_and_own_ones_beside(installed: Installed) -> None:
    own = installed.home / "mine" / "data"
    own.mkdir(parents=True)
    (own / "law.yaml").write_text("law: {kind: text, format: text, path: law.txt, eval_fraction: 0.1}\n")
    (installed.home / "law.txt").write_text("".join(f"Articolul {n}. Legea este lege.\n\n" for n in range(200)))
    done = installed.run("--config-dir", "mine", "task=prepare", "data=law", "model=tiny")
    assert done.returncode == 0, done.stderr
    assert list((installed.home / "outputs" / "prepared").glob("law-*/manifest.json"))
    refused = installed.run("data=lwa", "--config-dir=mine")
    assert refused.returncode == 2
    assert "law" in refused.stderr, "the choices of both folders"


def test_each_point_of_a_sweep_starts_the_installed_program(installed: Installed) -> None:
    done = installed.run("-m", "task=plan", "task.method=analytic", "hw=v5e8", "data=sample_chat", "lora.r=4")
    assert done.returncode == 0, done.stderr
    refused = installed.run("-m", "sweeping.engine=ray", "lora.r=4,8")
    assert (refused.returncode, "clone the repository" in refused.stderr) == (2, True), refused.stderr
    plans = (installed.home / "outputs" / "sweeps").glob("*/plans/*/plan.md")
    assert len(list(plans)) == 1, done.stdout
