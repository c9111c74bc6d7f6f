"""task=doctor: versions, variables, the rented machine and the cloud, from facts alone."""

from dataclasses import replace

import pytest

from tests.tasks.verdicts import TPU, verdict_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime import patches
from tpu_experiments.runtime.patches import TORCHTPU
from tpu_experiments.runtime.processes import variables
from tpu_experiments.runtime.processes.chips import chip_variables
from tpu_experiments.runtime.processes.env import exported_flags
from tpu_experiments.tasks.doctor import cloud, software

TORCH = software.Package("torch", "==2.9.0", "2.9.0+cpu")
XLA = software.Package("torch_xla", "==2.9.0", "2.9.0")
LIBTPU = software.Package("libtpu", "==0.0.21", "0.0.21.1")
JAX = software.Package("jax", "==0.7.1", "0.7.1")
JAXLIB = software.Package("jaxlib", "==0.7.1", "0.7.1")
NEEDED = (TORCH, XLA, LIBTPU, JAX, JAXLIB)
COLAB = (TORCH, XLA, LIBTPU, replace(JAX, installed="0.7.2"), replace(JAXLIB, installed="0.7.2"))
"""Its TPU image of 2026-08."""
FLASH = (*TPU, "model.attention=flash")


@pytest.mark.parametrize(
    ("python", "packages", "expected", "words"),
    [
        ((3, 11), NEEDED, "ok", "torch 2.9.0+cpu, torch_xla 2.9.0, libtpu 0.0.21.1"),
        ((3, 10), NEEDED, "failed", "Python 3.10"),
        ((3, 12), (replace(TORCH, installed="2.11.0"), XLA), "failed", "torch 2.11.0 (==2.9.0 wanted)"),
        ((3, 12), (TORCH, replace(LIBTPU, installed="0.0.51")), "failed", "libtpu 0.0.51"),
        ((3, 12), (TORCH, replace(LIBTPU, installed="0.0.21.2")), "failed", "install libtpu==0.0.21"),
        ((3, 12), (TORCH, replace(LIBTPU, installed=None)), "failed", "install libtpu==0.0.21"),
        ((3, 13), (TORCH, replace(LIBTPU, installed=None)), "failed", "install libtpu==0.0.21.1"),
        ((3, 13), COLAB, "ok", "jax 0.7.2, jaxlib 0.7.2"),
        ((3, 13), (TORCH, replace(JAX, installed="0.7.3")), "failed", "install jax==0.7.1"),
        ((3, 13), (TORCH, replace(JAX, installed="0.7.2"), JAXLIB), "failed", "install jaxlib==0.7.2"),
        ((3, 12), (TORCH, replace(JAX, installed=None)), "failed", "install jax==0.7.1"),
        ((3, 12), (software.Package("gcsfs", ">=2026.2", None),), "failed", "pip install 'gcsfs>=2026.2'"),
        ((3, 12), (software.Package("datasets", "<6,>=5.2", "4.8.5"),), "warning", "was not tried"),
    ],
)
def test_versions(make_config, python, packages, expected, words):
    verdict, said = verdict_of(software.judge_versions(software.Software(python, packages), make_config(*FLASH)))
    assert verdict == expected
    assert words in said


@pytest.mark.parametrize("name", ["torch", "torch_xla", "libtpu", "jax"])
@pytest.mark.parametrize("version", ["0.0.21", "0.0.21.1", "0.0.21.2", "0.7.1", "0.7.2", "0.7.3", "2.8.0", "2.9.0+cpu"])
def test_versions_fail_exactly_where_a_run_refuses(make_config, monkeypatch, name, version):
    found = software.Package(name, f"=={patches.WRITTEN_FOR[name]}", version)
    verdict = software.judge_versions(software.Software((3, 12), (found,)), make_config(*FLASH)).verdict
    monkeypatch.setattr(patches, "version", {name: version}.__getitem__)
    refused = None
    try:
        patches.require_versions(name)
    except ConfigError as error:
        refused = str(error)
    assert verdict == ("ok" if refused is None else "failed"), refused


def test_a_library_that_torch_xla_would_not_find(make_config):
    lacking = software.Software((3, 11), NEEDED, "libpython3.11")
    verdict, said = verdict_of(software.judge_versions(lacking, make_config()))
    assert (verdict, "`apt-get install libpython3.11`" in said) == ("failed", True)
    assert software.judge_versions(lacking, make_config("hw.runtime=eager")).verdict == "ok"


def test_versions_that_this_hardware_does_not_need(make_config):
    plain = software.Software((3, 12), (replace(JAX, installed="0.7.3"), replace(JAXLIB, installed="0.7.3")))
    assert software.judge_versions(plain, make_config(*TPU, "model.attention=sdpa")).verdict == "warning"
    nothing = software.Software((3, 12), (replace(LIBTPU, installed=None), replace(JAX, installed=None), TORCH))
    assert software.judge_versions(nothing, make_config()).verdict == "ok"
    other = software.Software((3, 12), (replace(TORCH, installed="2.11.0"),))
    assert software.judge_versions(other, make_config("hw=gpu")).verdict == "warning"
    no_xla = software.Software((3, 12), (replace(XLA, installed=None), TORCH))
    assert software.judge_versions(no_xla, make_config("hw.runtime=eager")).verdict == "ok"
    assert software.judge_versions(no_xla, make_config()).verdict == "failed"


def test_versions_of_this_environment(make_config):
    seen = software.inspect_software(make_config())
    assert {"torch", "torch_xla", "hydra-core", "psutil", "libtpu"} <= {package.name for package in seen.packages}
    assert software.judge_versions(seen, make_config()).verdict == "ok"


def test_versions_of_the_other_environment(make_config):
    config = make_config("hw.runtime=torchtpu")
    seen = software.inspect_software(config)
    assert "torch_xla" not in {package.name for package in seen.packages}
    fits = [replace(package, installed=package.wanted.removeprefix("==")) for package in seen.packages]
    fits = [replace(p, installed=TORCHTPU["torch"]) if p.name == "torch" else p for p in fits]
    ours = [package for package in fits if package.name in TORCHTPU]
    assert len(ours) == len(TORCHTPU)
    found = software.judge_versions(software.Software((3, 12), tuple(ours)), config)
    assert found.verdict == "ok", found
    assert f"torch_tpu {TORCHTPU['torch_tpu']}" in found.seen
    missing = [replace(package, installed=None) if package.name == "torch_tpu" else package for package in ours]
    finding = software.judge_versions(software.Software((3, 12), tuple(missing)), config)
    assert finding.verdict == "failed"
    assert finding.remedy.startswith("make the environment of launch/requirements-torchtpu.lock")


# What a session with a v5e-8 exports (a user's record of 2026-08).
KAGGLE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
}


@pytest.mark.parametrize(
    ("exported", "overrides", "expected", "words"),
    [
        ({}, TPU, "ok", "none that would mislead"),
        ({"PJRT_LOCAL_PROCESS_COUNT": "8"}, TPU, "failed", "`unset PJRT_LOCAL_PROCESS_COUNT`"),
        ({"PJRT_LOCAL_PROCESS_COUNT": "8"}, ("hw.runtime=eager",), "ok", "none that this runtime reads"),
        ({"PJRT_LOCAL_PROCESS_RANK": "1"}, TPU, "failed", "falsifies"),
        ({"TPU_PROCESS_BOUNDS": "2,2,1"}, TPU, "failed", "it is 4 processes, and hw=v6e8 has 1"),
        ({"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1"}, TPU, "ok", "none"),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}, TPU, "failed", "it is 1 chips a process, and hw=v6e8 has 8"),
        ({"TPU_PROCESS_BOUNDS": "1,1,1"}, (*TPU, "hw.parallel=spawn"), "failed", "1 processes, and hw=v6e8 has 8"),
        ({"TPU_VISIBLE_CHIPS": "0,1,2,3"}, TPU, "failed", "it gives this run 4 of its host's 8 chips"),
        ({"TPU_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, TPU, "ok", "none"),
        ({"TPU_VISIBLE_CHIPS": "0"}, (*TPU, "hw.parallel=spawn"), "failed", "each process of one chip gets the same"),
        ({"TPU_VISIBLE_CHIPS": "3"}, (*TPU, "hw=v6e1"), "ok", "none"),
        ({"XLA_USE_SPMD": "1"}, TPU, "ok", "none"),
        ({"XLA_USE_SPMD": "1"}, (), "failed", "falsifies"),
        ({"XLA_AUTO_SPMD": "1"}, TPU, "failed", "shards by itself"),
        ({"XLA_USE_BF16": "1"}, TPU, "failed", "use model.dtype="),
        ({"XLA_USE_BF16": "0", "XLA_USE_SPMD": "false"}, (), "ok", "none"),
        ({"XLA_USE_32BIT_LONG": "1"}, (), "failed", "32 bits"),
        ({"XLA_DISABLE_FUNCTIONALIZATION": "1"}, (), "failed", "gradients are others"),
        ({"XLA_USE_FP16": "1"}, TPU, "warning", "no longer reads it"),
        ({"XLA_ENABLE_PARAM_ALIASING": "0"}, TPU, "warning", "twice"),
        ({"XLA_HLO_DEBUG": "1"}, TPU, "warning", "compile cache"),
        ({"LIBTPU_INIT_ARGS": "--x=1"}, TPU, "warning", "libtpu aborts"),
        ({"PJRT_DEVICE": "CPU"}, TPU, "warning", "sets it to TPU itself"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}, (), "ok", "none"),
        ({"CPU_NUM_DEVICES": "4"}, (), "warning", "CPU_NUM_DEVICES=4"),
        (KAGGLE, (*TPU, "hw=v5e8"), "ok", "none"),
        (
            KAGGLE,
            (*TPU, "hw=v5e8", "hw.parallel=spawn"),
            "failed",
            "`unset TPU_PROCESS_ADDRESSES`: each process",
        ),
        (
            KAGGLE | {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1"},
            (*TPU, "hw=v5e8"),
            "failed",
            "(chips: 1, hw=v5e8: 8) | `export TPU_CHIPS_PER_HOST_BOUNDS=2,4,1`",
        ),
        (
            {"TPU_HOST_BOUNDS": "2,2,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"},
            (*TPU, "hw=v6e16", "output_dir=gs://bkt/r"),
            "ok",
            "none",
        ),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, (*TPU, "hw=v6e16", "output_dir=gs://bkt/r"), "ok", "none"),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "x"}, TPU, "ok", "none"),
    ],
)
def test_variables(make_config, exported, overrides, expected, words):
    config = make_config(*overrides)
    verdict, said = verdict_of(software.judge_variables(exported, config))
    assert verdict == expected
    assert words in said
    refusal = variables.refusal_of(variables.stray_variables(exported, config.hw))
    assert (refusal is not None) == (verdict == "failed"), "a run is refused where the doctor fails"


@pytest.mark.parametrize("chip", [0, 3])
def test_variables_of_a_point_of_a_sweep(make_config, chip, monkeypatch):
    """Beside what the host exports."""
    for name, value in (KAGGLE | {"TPU_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}).items():
        monkeypatch.setenv(name, value)
    for name, value in chip_variables(chip).items():
        monkeypatch.setenv(name, value)
    for name in ("XLA_FLAGS", "PJRT_DEVICE"):  # of the tests
        monkeypatch.delenv(name, raising=False)
    assert variables.stray_variables(variables.exported_variables(), make_config("hw=v5e1").hw) == []


def test_flags_are_those_of_a_run(make_config, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_latency_hiding_scheduler_rerun=3")
    exported_flags.cache_clear()
    config = make_config(*TPU, "hw=v5e1")
    seen = software.inspect_flags(config)
    exported_flags.cache_clear()
    assert seen[:2] == ["--xla_latency_hiding_scheduler_rerun=3", "--xla_tpu_enable_deduplicated_calls=true"]
    assert "--xla_latency_hiding_scheduler_rerun=1" not in seen
    assert software.judge_flags(seen, config).seen.endswith("--xla_enable_async_collective_permute=true")
    assert software.judge_flags([], make_config()).seen == "none: libtpu is for a TPU"


def test_no_other_variable_is_read(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", "")
    seen = variables.exported_variables()
    assert seen["XLA_FLAGS"] == "--xla_dump_to=/x"
    assert set(seen) <= set(variables.KNOWN) - {"TPU_PROCESS_BOUNDS"}


ON_V6E = cloud.Machine("v6e-8", "v2-alpha-tpuv6e")


@pytest.mark.parametrize(
    ("machine", "overrides", "expected", "words"),
    [
        (ON_V6E, TPU, "ok", "v6e-8, runtime version v2-alpha-tpuv6e"),
        (replace(ON_V6E, runtime_version=None), TPU, "ok", "unknown"),
        (replace(ON_V6E, runtime_version="tpu-ubuntu2204-base"), TPU, "failed", "--runtime-version=v2-alpha-tpuv6e"),
        (ON_V6E, (*TPU, "hw=v5e8"), "failed", "hw=v5e8 is v5e:2x4"),
        (cloud.Machine("v5litepod-8"), (*TPU, "hw=v5e8"), "ok", "v5litepod-8"),
        (cloud.Machine("v6e-16"), TPU, "failed", "which is 16 chips, and hw=v6e8 is v6e:2x4 | choose the hw= of this"),
        (cloud.Machine("v5litepod-4"), (*TPU, "hw=v5e8"), "failed", "which is 4 chips, and hw=v5e8 is v5e:2x4"),
        (cloud.Machine("v6e-16"), (*TPU, "hw=v6e16", "output_dir=gs://bkt/r"), "ok", "v6e-16"),
        (cloud.Machine("v5p-8"), (*TPU, "hw=v5p-8"), "ok", "v5p-8"),  # two cores a chip
        (cloud.Machine("v5litepod-1"), (*TPU, "hw=colab"), "ok", "v5litepod-1"),
        (cloud.Machine("v5litepod-8"), (*TPU, "hw=v5e1"), "failed", "which is 8 chips, and hw=v5e1 is v5e:1x1"),
        (cloud.Machine("v5litepod-8", is_part=True), (*TPU, "hw=v5e1"), "ok", "v5litepod-8"),
        (cloud.Machine("v5litepod-4", is_part=True), (*TPU, "hw=v5e8"), "failed", "which is 4 chips"),
        (cloud.Machine("v5litepod-8"), (*TPU, "hw=v5e1", "sweeping.points_at_once=8"), "ok", "v5litepod-8"),
        (cloud.Machine("v5litepod-4"), (*TPU, "hw=v5e1", "sweeping.points_at_once=8"), "failed", "which is 4 chips"),
        (cloud.Machine("v6e"), TPU, "not checked", "how many chips that is, is not known"),
        (ON_V6E, (), "warning", "does not use the TPU"),
        (cloud.Machine(None), TPU, "not checked", "no TPU VM"),
    ],
)
def test_runtime_version(make_config, machine, overrides, expected, words):
    verdict, said = verdict_of(cloud.judge_runtime_version(machine, make_config(*overrides)))
    assert verdict == expected
    assert words in said


def test_a_machine_by_its_metadata():
    lines = "ACCELERATOR_TYPE: 'v6e-8'\nNODE_ID: 'n'\nRUNTIME_VERSION: '{}'\n"
    assert cloud.machine_of({"tpu-env": lines.format("tpu-ubuntu2204-base")}) == replace(
        ON_V6E, runtime_version="tpu-ubuntu2204-base"
    )
    placeholder = lines.format("gcr.io/cloud-tpu-v2-images/fake_tensorflow:latest")
    assert cloud.machine_of({"tpu-env": placeholder, "accelerator-type": "v6e-4"}) == cloud.Machine("v6e-4")
    assert cloud.machine_of({}) == cloud.Machine(None)


RENTED = cloud.Gcloud(True, "me@example.com", "lab", {"europe-west4-a": 16, "us-east5-b": 4}, {"us-east1-d": 64})


@pytest.mark.parametrize(
    ("gcloud", "expected", "words"),
    [
        (cloud.Gcloud(False), "not checked", "not to train"),
        (cloud.Gcloud(True), "not checked", "gcloud auth login"),
        (cloud.Gcloud(True, "me@example.com"), "not checked", "gcloud config set project"),
        (RENTED, "ok", "project lab; chips of v6e: on demand in europe-west4-a 16, spot in us-east1-d 64"),
        (replace(RENTED, on_demand={"a": 4}, spot={}), "warning", "no zone has a quota of 8 v6e chips"),
        (replace(RENTED, complaint="ERROR: permission"), "not checked", "ERROR: permission"),
    ],
)
def test_cloud(make_config, gcloud, expected, words):
    finding = cloud.judge_cloud(gcloud, make_config(*TPU))
    assert (finding.verdict, words in f"{finding.seen} | {finding.remedy}") == (expected, True)
    assert "me@example.com" not in finding.seen


def test_quotas_as_the_cloud_quotas_api_lists_them():
    name = cloud.QUOTA_NAMES["v6e"]
    zone = {"details": {"value": "16"}, "dimensions": {"zone": "a"}, "applicableLocations": ["a"]}
    none = {"details": {"value": "0"}, "applicableLocations": ["b"]}
    listed = [{"quotaId": name, "dimensionsInfos": [zone, none]}, {"quotaId": "Other", "dimensionsInfos": [zone]}]
    assert cloud.chips_by_zone(listed, name) == {"a": 16}
