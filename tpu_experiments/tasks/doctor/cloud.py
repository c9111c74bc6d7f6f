"""Check the Google Cloud side: gcloud's account, project and quota, and this machine's metadata."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import DoctorTaskConfig
from tpu_experiments.tasks.doctor.finding import Finding, failed, not_checked, ok, warning

METADATA_HOST = "metadata.google.internal"
ATTRIBUTES = "computeMetadata/v1/instance/attributes/?recursive=true"
METADATA_SECONDS = 2.0
"""A VM's metadata server answers in milliseconds; elsewhere the name is unknown or does not answer."""
QUOTA_NAMES = {"v5e": "TPUV5sLitepodPerProjectPerZoneForTPUAPI", "v6e": "TPUV6EPerProjectPerZoneForTPUAPI"}
SPOT_QUOTA_NAMES = {
    "v5e": "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI",
    "v6e": "TPUV6EPreemptiblePerProjectPerZoneForTPUAPI",
}
"""Quota ids of the Cloud TPU API in chips (cloud.google.com/tpu/docs/quota); Compute Engine and GKE have others."""


@dataclass(frozen=True)
class Gcloud:
    """State of gcloud; quotas are chips by zone, empty where not requested or not answered."""

    is_installed: bool
    account: str | None = None
    project: str | None = None
    on_demand: Mapping[str, int] = field(default_factory=dict)
    spot: Mapping[str, int] = field(default_factory=dict)
    complaint: str | None = None


@dataclass(frozen=True)
class Machine:
    """Identity of this machine, from its metadata server or exported variables."""

    accelerator_type: str | None
    """For example v6e-8; None on a machine that is not a TPU VM."""
    runtime_version: str | None = None
    """None where the metadata lack it: newer images have a placeholder."""
    is_part: bool = False
    """Whether this process was given a part of the machine's chips by an exported variable."""


def inspect_gcloud(config: Config, task: DoctorTaskConfig) -> Gcloud:
    """Read account and project from this machine's files; query Google for quotas of the chip of `hw`."""
    if shutil.which("gcloud") is None:
        return Gcloud(False)
    settings = _gcloud("config", "list", seconds=task.timeout_seconds)
    core = settings.get("core", {}) if isinstance(settings, dict) else {}
    account, project = core.get("account"), core.get("project")
    chip = config.hw.chip.name if config.hw.chip else None
    if not account or not project or chip not in QUOTA_NAMES:
        return Gcloud(True, account, project)
    given = ("--service=tpu.googleapis.com", f"--project={project}")
    quotas = _gcloud("beta", "quotas", "info", "list", *given, seconds=task.timeout_seconds)
    if not isinstance(quotas, list):
        return Gcloud(True, account, project, complaint=str(quotas))
    on_demand, spot = (chips_by_zone(quotas, names[chip]) for names in (QUOTA_NAMES, SPOT_QUOTA_NAMES))
    return Gcloud(True, account, project, on_demand, spot)


def chips_by_zone(quotas: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """Return the zones with a quota above 0, for one quota in the format of the Cloud Quotas API."""
    found: dict[str, int] = {}
    for quota in quotas:
        if quota.get("quotaId") != name:
            continue
        for part in quota.get("dimensionsInfos", []):
            value = int(part.get("details", {}).get("value", 0))
            zones = part.get("applicableLocations") or [part.get("dimensions", {}).get("zone", "everywhere")]
            found |= {str(zone): value for zone in zones if value}
    return found


def _gcloud(*arguments: str, seconds: float) -> Any:
    """Return gcloud's JSON output, or, if it fails, the first error line as a string."""
    environment = {**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    command = ["gcloud", *arguments, "--format=json"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"gcloud did not answer within {seconds:.0f} s"
    if done.returncode != 0:
        error_lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return error_lines[0][:200] if error_lines else f"gcloud ended with exit code {done.returncode}"
    return json.loads(done.stdout or "{}")


def judge_cloud(gcloud: Gcloud, config: Config) -> Finding:
    """Judge whether this machine could rent the hardware; not needed to train here."""
    if not gcloud.is_installed:
        return not_checked("the command gcloud is not here", "it is needed to rent a TPU, not to train on one")
    if not gcloud.account:
        return not_checked("gcloud has no account", "to rent a TPU: `gcloud auth login`")
    if not gcloud.project:
        return not_checked("gcloud has no project", "to rent a TPU: `gcloud config set project PROJECT`")
    seen = f"a gcloud account, project {gcloud.project}"
    if gcloud.complaint is not None:
        return not_checked(f"{seen}; quota: {gcloud.complaint}", "`gcloud beta quotas info list` says more")
    chip = config.hw.chip.name if config.hw.chip else ""
    if chip not in QUOTA_NAMES:
        return ok(seen)
    zones = [
        f"{kind} in {zone} {number}"
        for kind, quota in (("on demand", gcloud.on_demand), ("spot", gcloud.spot))
        for zone, number in sorted(quota.items(), key=lambda item: -item[1])[:3]
        if number >= config.hw.num_devices
    ]
    if not zones:
        remedy = "ask for Cloud TPU API quota at console.cloud.google.com/iam-admin/quotas"
        return warning(f"{seen}; no zone has a quota of {config.hw.num_devices} {chip} chips", remedy)
    return ok(f"{seen}; chips of {chip}: {', '.join(zones)}")


def inspect_machine() -> Machine:
    """Query the metadata server of a TPU VM; without one, read what Colab, Kaggle and GKE export."""
    is_part = any(os.environ.get(name) for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"))
    return replace(_find_machine(), is_part=is_part)


def _find_machine() -> Machine:
    exported = os.environ.get("TPU_ACCELERATOR_TYPE") or None
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        return Machine(exported)
    host = os.environ.get("GCE_METADATA_HOST", METADATA_HOST)  # the variable that Google's own libraries read
    request = urllib.request.Request(f"http://{host}/{ATTRIBUTES}", headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=METADATA_SECONDS) as answer:
            return machine_of(json.loads(answer.read()))
    except (OSError, ValueError):
        return Machine(exported)


def machine_of(attributes: Mapping[str, Any]) -> Machine:
    """Parse metadata attributes, whose `tpu-env` has lines `NAME: 'value'`."""
    lines = (line.partition(":") for line in str(attributes.get("tpu-env", "")).splitlines())
    environment = {name.strip(): value.strip().strip("'") for name, _, value in lines}
    version = environment.get("RUNTIME_VERSION", "")
    accelerator = attributes.get("accelerator-type") or environment.get("ACCELERATOR_TYPE")
    return Machine(accelerator or None, version if version and "/" not in version else None)


def judge_runtime_version(machine: Machine, config: Config) -> Finding:
    """Compare the rented machine with `hw`, and its image with its chip."""
    hw = config.hw
    if machine.accelerator_type is None:
        return not_checked("this is no TPU VM (no metadata server, no TPU_ACCELERATOR_TYPE)")
    seen = f"{machine.accelerator_type}, runtime version {machine.runtime_version or 'unknown'}"
    if hw.device != "tpu":
        return warning(seen, f"hw={hw.name} does not use the TPU of this machine; choose its hw=")
    if generation_of(machine.accelerator_type) != (hw.topology or "").partition(":")[0]:
        return failed(f"{seen}, and hw={hw.name} is {hw.topology}", "choose the hw= of this machine")
    chips = chips_of(machine.accelerator_type)
    if chips is None:
        return not_checked(f"{seen}; how many chips that is, is not known")
    wanted_chips = hw.num_devices * config.sweeping.points_at_once
    if chips != wanted_chips and not (chips > wanted_chips and (machine.is_part or wanted_chips > hw.num_devices)):
        remedy = f"choose the hw= of this machine's {chips} chips, or rent the other one"
        return failed(f"{seen}, which is {chips} chips, and hw={hw.name} is {hw.topology}", remedy)
    wanted = hw.rent.runtime_version if hw.rent else None
    if wanted and machine.runtime_version and machine.runtime_version != wanted:
        return failed(f"{seen}, and {hw.name} needs {wanted}", f"create the VM again with --runtime-version={wanted}")
    return ok(seen)


def chips_of(accelerator_type: str) -> int | None:
    """Return the number of chips: 8 of v6e-8; up to v5p a type counts two cores a chip. None for another form."""
    parts = re.fullmatch(r"(v\d\w*)-(\d+)", accelerator_type)
    if parts is None:
        return None
    return int(parts[2]) // (2 if parts[1] in ("v2", "v3", "v4", "v5p") else 1)


def generation_of(accelerator_type: str) -> str:
    """Return the chip generation: `v6e` of v6e-8, `v5e` of v5litepod-8."""
    return accelerator_type.replace("v5litepod", "v5e").partition("-")[0]
