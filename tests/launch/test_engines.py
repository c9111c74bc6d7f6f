"""The files for SkyPilot, dstack and GKE: what they rent is what conf/hw says, and what they run composes.

Their own parsers were asked by hand (skypilot 0.14.1, dstack 0.22.5, xpk 1.16.0, JobSet's definition); none is a
dependency.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.composing import composed
from tpu_experiments.config.schema import Config

LAUNCH = Path(__file__).parents[2] / "launch"
SKY = sorted((LAUNCH / "sky").glob("*.yaml"))
DSTACK = sorted((LAUNCH / "dstack").glob("*.yml"))
JOBSETS = sorted((LAUNCH / "gke").glob("*.yaml"))
XPK = LAUNCH / "gke" / "xpk.sh"
ALL = [*SKY, *DSTACK, *JOBSETS, XPK]


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def config_of(text: str, **variables: str) -> Config:
    """The config of the one line that trains."""
    (line,) = re.findall(r"bash launch/startup\.sh -- python run\.py (.+)", text)
    for name, value in variables.items():
        line = line.replace(f"${name}", value)
    return composed(*shlex.split(line))


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.name)
def test_it_says_that_it_was_never_run_and_holds_no_secret(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "Never run." in text.split("\n\n")[0]
    assert not re.search(r"hf_\w{6}|TOKEN[\"']?\s*[:=]\s*[\"']?\w{8}", text)


@pytest.mark.parametrize("file", SKY, ids=lambda file: file.name)
def test_skypilot_rents_what_the_run_needs(file: Path) -> None:
    job = read(file)
    config = config_of(job["run"], EXPERIMENT=job["envs"]["EXPERIMENT"], BUCKET="gs://bkt/runs")
    rent = config.hw.rent
    assert rent is not None
    assert (file.stem, config.name) == (config.hw.name, job["name"])
    assert job["resources"]["accelerators"] == f"tpu-{rent.accelerator_type}"
    assert job["resources"]["accelerator_args"]["runtime_version"] == rent.runtime_version
    assert job["resources"]["use_spot"] is True
    assert f"hw={config.hw.name} " in job["setup"]
    assert config.output_dir == "gs://bkt/runs"


@pytest.mark.parametrize("file", DSTACK, ids=lambda file: file.name)
def test_dstack_rents_what_the_run_needs(file: Path) -> None:
    job = read(file)
    config = config_of("\n".join(job["commands"]), BUCKET="gs://bkt/runs")
    assert config.hw.rent is not None
    assert job["resources"]["gpu"] == config.hw.rent.accelerator_type
    assert file.name.split(".")[0] == config.hw.name
    assert job["name"] == str(config.name).replace("_", "-")


@pytest.mark.parametrize("file", JOBSETS, ids=lambda file: file.name)
def test_gke_has_a_pod_for_every_host_of_the_slice(file: Path) -> None:
    content = read(file)["spec"]
    (slices,) = content["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    config = config_of(container["args"][0], BUCKET="gs://bkt/runs")
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    generation = re.sub(r"tpu-(\w+)-slice", r"\1", pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"])
    assert config.hw.topology == f"{generation}:{topology}"
    assert container["resources"]["limits"]["google.com/tpu"] * job["completions"] == config.hw.num_devices
    assert config.hw.rent is not None
    assert container["resources"]["limits"]["google.com/tpu"] == config.hw.rent.chips_per_host
    # libtpu locks memory for DMA, which the container's own limit forbids
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_RESOURCE"]
    script = container["args"][0]
    assert -1 < script.index("ulimit -l unlimited") < script.index("launch/startup.sh")
    assert job["parallelism"] == job["completions"]
    if job["completions"] > 1:  # they look for each other by name, and by the number of the pod
        assert content["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        assert job["completionMode"] == "Indexed"
        assert job["backoffLimit"] == 0
    actions = {
        rule.get("onExitCodes", {}).get("values", [None])[0]: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
    }
    assert (actions[2], actions[75]) == ("FailJob", "Ignore")


@pytest.mark.parametrize("hw", ["v6e16", "v6e8"])
def test_xpk_is_asked_for_the_slice_and_starts_again_what_can_go_on(tmp_path: Path, hw: str) -> None:
    xpk = tmp_path / "xpk"
    xpk.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    xpk.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REPOSITORY": "https://x", "BUCKET": "gs://bkt/runs", "HW": hw}
    more = ["--cluster=c", f"--tpu-type={hw[:3]}-{hw[3:]}"]
    done = subprocess.run(["bash", str(XPK), *more], env=env, capture_output=True, text=True, check=True, timeout=60)
    words = done.stdout.split("\0")
    given = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
    variables = dict(word.split("=", 2)[1:] for word in words if word.startswith("--env="))
    config = config_of(given["command"], **variables)
    assert config.hw.rent is not None
    assert (given["tpu-type"], config.output_dir) == (config.hw.rent.accelerator_type, "gs://bkt/runs")
    assert "\n" not in given["command"]  # the block of YAML it is pasted into would end there
    assert not {"2", "0"} & set(given["restart-on-exit-codes"].split(","))
    assert "75" in given["restart-on-exit-codes"].split(",")
    assert done.stdout.count(given["workload"]) == 1
