"""launch/startup.sh leaves the devices of several hosts to run.py, whose hosts wait for each other."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize(("num_hosts", "looked_at"), [(1, True), (4, False), (64, False)])
def test_devices_are_looked_at_on_one_host_alone(tmp_path: Path, num_hosts: int, looked_at: bool) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "conf" / "hw").mkdir(parents=True)
    shutil.copy(LAUNCH / "startup.sh", tmp_path / "launch")
    (tmp_path / "launch" / "local.sh").write_text(f'printf "%s\\n" "$*" >>{tmp_path}/asked\n')
    (tmp_path / "conf" / "hw" / "slice.yaml").write_text(f"name: slice\nnum_hosts: {num_hosts}\n")
    env = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["bash", str(tmp_path / "launch" / "startup.sh"), "hw=slice", "output_dir=gs://b/runs"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (checks,) = re.findall(r"task=doctor task\.checks=\[(.*)\]", (tmp_path / "asked").read_text())
    assert ("devices" in checks.split(",")) is looked_at
    assert {"versions", "lock_file", "disk", "compile_cache"} <= set(checks.split(","))
