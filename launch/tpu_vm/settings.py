"""Parse the launcher's settings.

Precedence: `key=value` on the command line, then the .env file, then the defaults here.
"""

import difflib
import re
import types
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.slices import hw_of


@dataclass(frozen=True)
class Settings:
    """All settings of the launcher. Secrets are not among them: `secrets` lists their names only."""

    name: str = ""
    """Name of the launch: of its state file and resources and, without `name=` after `--`, of the run."""
    hw: str = ""
    """Slice to rent, a file of conf/hw."""
    spot: bool = False
    """Use spot capacity: cheaper, and reclaimed at any time with 30 s of notice."""
    project: str = ""
    """Google Cloud project; empty uses gcloud's default."""
    account: str = ""
    """Account for gcloud; empty uses the active one."""
    service_account: str = ""
    """Service account of the VM; needs tpu.nodes.delete to delete itself and roles/storage.objectUser on the bucket."""
    zones: tuple[str, ...] = ()
    """Zones in the order they are tried; empty uses those of conf/hw."""
    runtime_version: str = ""
    """VM image; empty uses the one of conf/hw."""
    network: Literal["external", "internal"] = "external"
    """`internal`: no external address (needed from 16 VMs on; needs Cloud NAT), ssh through IAP."""
    max_usd: float | None = None
    """Maximum cost of the TPU, over all its machines; null is 1.5 times the planned cost."""
    max_hours: float = 24.0
    """Maximum hours that a TPU is held, over all its machines."""
    queue_hours: float = 6.0
    """Longest wait for capacity, in all zones together."""
    zone_minutes: float = 30.0
    """Longest wait in one zone while others are left to try."""
    idle_minutes: float = 30.0
    """The VM deletes itself after this time without a run, a login or this launcher, on any VM of a slice."""
    watchdog: Literal["required", "warn"] = "required"
    """`required`: rents only where the VM is shown to be allowed to delete itself. `warn`: continues without."""
    fetch: Literal["required", "skip"] = "required"
    """`skip` lets `down` delete a machine whose results, of which it has the only copy, cannot be fetched."""
    usd_per_chip_hour: float | None = None
    """Price of a chip-hour in dollars; null uses the dated one of conf/hw."""
    plan: Literal["first", "skip"] = "first"
    """`first`: run run.py task=plan before anything is rented."""
    code: Literal["archive", "clone"] = "archive"
    """`archive`: the files of this working tree. `clone`: a sparse clone of `repo`, made on the VM."""
    repo: str = ""
    """Address to clone: https:// for a public repository, git@ for a private one (a deploy key is created)."""
    ref: str = "main"
    """Branch or tag to clone."""
    folders: tuple[str, ...] = ("conf", "launch", "tpu_experiments")
    """Folders of a sparse clone; files of the top level are always included."""
    data_disk: str = ""
    """Disk attached read-only to every VM (`load_data` fills one); it exists in one zone."""
    data_disk_gb: int = 100
    """Size in GB of the disk that load_data creates."""
    data_mount: str = "/mnt/data"
    """Mount point of the disk."""
    source: str = ""
    """load_data: local folder, or gs:// address, of the prepared shards."""
    bucket: str = ""
    """load_data: gs:// address to fill."""
    secrets: tuple[str, ...] = ("HF_TOKEN", "WANDB_API_KEY")
    """Environment variables of this machine that are passed to the run, where they are set."""
    results: str = "outputs"
    """Local folder of the fetched results; the launcher's state is in its `launch` subfolder."""
    env_file: str = ".env"
    """File of KEY=VALUE lines, read where it exists."""
    poll_seconds: float = 20.0
    """Time between two checks of the machine."""
    worker: str = "0"
    """Worker that `ssh` logs in to, on a slice of several VMs."""
    ports: tuple[str, ...] = ("6006", "8888")
    """Ports of the VM that `ssh` shows on localhost, as TensorBoard's and Jupyter's; 16006:6006 takes another one here,
    `none` forwards none."""
    yes: bool = False
    """Answer every question with yes."""


FROM_ENV_FILE = {
    "PROJECT_ID": "project",
    "ZONE": "zones",
    "TPU_NAME": "name",
    "RUNTIME_VERSION": "runtime_version",
    "PRE_EMPTIBLE": "spot",
    "SERVICE_ACCOUNT": "service_account",
    "EXT_DISK_NAME": "data_disk",
    "EXT_DISK_SIZE": "data_disk_gb",
    "EXT_MOUNT_POINT": "data_mount",
    "DATA_BUCKET": "source",
}
"""Variable names of .env files for start_tpu.sh and similar scripts; ACCELERATOR_TYPE sets `hw`."""


def parse(words: list[str], *, env_file: dict[str, str]) -> Settings:
    """Parse settings from `key=value` words.

    Args:
        env_file: content of the .env file.

    Raises:
        LaunchError: an unknown key, or a value of the wrong type.
    """
    given = {FROM_ENV_FILE[key]: value for key, value in env_file.items() if key in FROM_ENV_FILE and value}
    if env_file.get("ACCELERATOR_TYPE"):
        given["hw"] = hw_of(env_file["ACCELERATOR_TYPE"])
    if "source" in given and "://" not in given["source"]:
        given["source"] = f"gs://{given['source']}"
    if "data_disk_gb" in given:
        given["data_disk_gb"] = re.sub(r"\s*GB?$", "", given["data_disk_gb"], flags=re.IGNORECASE)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise LaunchError(f"{word}; settings are key=value, and what run.py is given stands after --.")
        given[key] = value
    types_of = get_type_hints(Settings)
    unknown = [key for key in given if key not in types_of]
    if unknown:
        near = difflib.get_close_matches(unknown[0], types_of, n=1)
        hint = f"did you mean {near[0]}=?" if near else f"keys: {', '.join(types_of)}."
        raise LaunchError(f"{unknown[0]}={given[unknown[0]]}; there is no such setting; {hint}")
    return checked(replace(Settings(), **{key: _value(key, text, types_of[key]) for key, text in given.items()}))


def checked(settings: Settings) -> Settings:
    """Return the settings, checked for what types do not express.

    Raises:
        LaunchError: a name the API refuses, a limit not above 0, or incompatible settings.
    """
    if settings.name and not re.fullmatch(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", settings.name):
        raise LaunchError(
            f"name={settings.name}; the API takes small letters, digits and -, at most 42, a letter first."
        )
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise LaunchError(f"{field.name}={value}; it has to be above 0.")
    if settings.code == "clone" and not settings.repo:
        raise LaunchError("code=clone; there is no repo=; give the address of the repository.")
    if settings.repo and not re.match(r"(https://|git@|ssh://)", settings.repo):
        raise LaunchError(
            f"repo={settings.repo}; it is no address git clones; write https://... or git@host:owner/name.git."
        )
    for port in settings.ports:
        if not re.fullmatch(r"\d{1,5}(:\d{1,5})?", port) or not all(0 < int(part) < 65536 for part in port.split(":")):
            raise LaunchError(
                f"ports={','.join(settings.ports)}; {port} is no port; write 6006, or 16006:6006 (here:VM), or none."
            )
    if settings.data_disk and len(settings.zones) > 1:
        raise LaunchError(f"data_disk={settings.data_disk}; a disk belongs to one zone; give only that zone as zones=.")
    return settings


def _value(key: str, text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if text in ("null", "none", ""):
            return None
        kind = next(option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise LaunchError(f"{key}={text}; it is one of: {', '.join(get_args(kind))}.")
        return text
    if get_origin(kind) is tuple:
        if text in ("null", "none"):
            return ()
        return tuple(part.strip() for part in text.strip("[]()").split(",") if part.strip())
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise LaunchError(f"{key}={text}; it is true or false.")
        return text.lower() in ("true", "1", "yes")
    try:
        return kind(text)
    except ValueError:
        raise LaunchError(f"{key}={text}; it is no number.") from None


def read_env_file(text: str) -> dict[str, str]:
    """Parse lines `KEY=VALUE` and `export KEY='value'`, blank lines and comments; the last of a key wins."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$", line)
        if match is None:
            continue
        value = match[2]
        is_quoted = value[:1] in ("'", '"')
        found[match[1]] = value[1:].split(value[0])[0] if is_quoted else value.split(" #")[0].strip()
    return found


def settings_of(words: list[str]) -> tuple[Settings, dict[str, str]]:
    """Parse settings from the command line and the .env file; return them with the file's content.

    Raises:
        LaunchError: `env_file=` names a file that does not exist, or a setting is refused.
    """
    named = [word.split("=", 1)[1] for word in words if word.startswith("env_file=")]
    file = Path(named[-1] if named else Settings().env_file)
    if named and not file.is_file():
        raise LaunchError(f"env_file={file}; there is no such file.")
    content = read_env_file(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return parse(words, env_file=content), content


def require_name(settings: Settings) -> None:
    if not settings.name:
        raise LaunchError("name=; it is missing; it stands for the machine in the commands that follow.")
