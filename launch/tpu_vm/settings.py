"""Settings of the launcher: `key=value` on the command line, over the lines of a .env file, over the defaults here."""

import difflib
import re
import types
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from launch.tpu_vm.errors import LaunchError


@dataclass(frozen=True)
class Settings:
    """Every key; secrets are none of them (secrets.py)."""

    name: str = ""
    """Name of the launch: of its state file, its resources and, without `name=` after `--`, of the run."""
    hw: str = ""
    """Slice, one of conf/hw."""
    spot: bool = False
    """Spot capacity: cheaper, and taken away at any time with 30 s of notice."""
    project: str = ""
    """Google Cloud project; empty takes gcloud's own."""
    account: str = ""
    """Account of gcloud; empty takes the active one."""
    service_account: str = ""
    """Account of the VM; it needs roles/tpu.admin to delete itself and roles/storage.objectUser on the bucket."""
    zones: tuple[str, ...] = ()
    """Zones in the order they are tried; empty takes those of conf/hw."""
    runtime_version: str = ""
    """Image of the VM; empty takes the one of conf/hw."""
    network: Literal["external", "internal"] = "external"
    """`internal`: no external address (16 VMs and more; needs Cloud NAT), ssh through IAP."""
    max_usd: float | None = None
    """Most that the TPU may cost, over all its lives."""
    max_hours: float = 24.0
    """Most hours that a TPU may be held, over all its lives."""
    queue_hours: float = 6.0
    """Longest wait for capacity, in all zones together."""
    zone_minutes: float = 30.0
    """Longest wait in one zone while others are left to try."""
    idle_minutes: float = 30.0
    """The VM deletes itself after so long without a run, a login or this launcher."""
    watchdog: Literal["required", "warn"] = "required"
    """A VM that says that it cannot delete itself: `required` gives it back at once, `warn` says so and goes on."""
    usd_per_chip_hour: float | None = None
    """Price of a chip-hour; null takes the dated one of conf/hw."""
    plan: Literal["first", "skip"] = "first"
    """`first`: run.py task=plan before anything is rented."""
    code: Literal["archive", "clone"] = "archive"
    """`archive`: the files of this working tree. `clone`: a sparse clone of `repo`, made on the VM."""
    repo: str = ""
    """Address to clone: https:// of a public repository, git@ of a private one (a deploy key is made)."""
    ref: str = "main"
    """Branch or tag to clone."""
    folders: tuple[str, ...] = ("conf", "launch", "tpu_experiments")
    """Folders of a sparse clone; files of the top level are always there."""
    data_disk: str = ""
    """Disk attached read-only to every VM (`load_data` fills one); it lies in one zone."""
    data_disk_gb: int = 100
    """Size of the disk that load_data makes."""
    data_mount: str = "/mnt/data"
    """Where the disk is mounted."""
    source: str = ""
    """load_data: local folder, or gs:// address, of the prepared shards."""
    bucket: str = ""
    """load_data: gs:// address to fill."""
    secrets: tuple[str, ...] = ("HF_TOKEN", "WANDB_API_KEY")
    """Environment variables of this machine that the run gets, where they are set."""
    results: str = "outputs"
    """Local folder of the fetched results; the state lies in its `launch`."""
    env_file: str = ".env"
    """Lines KEY=VALUE, read where the file exists."""
    poll_seconds: float = 20.0
    """Time between two looks at the machine."""
    worker: str = "0"
    """ssh: the VM of a slice of several."""
    yes: bool = False
    """Answers every question with yes."""


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
"""Names of a .env file as start_tpu.sh and its like have them; ACCELERATOR_TYPE chooses `hw`."""


def parse(words: list[str], *, env_file: dict[str, str], hw_of: Any) -> Settings:
    """Settings from `key=value` words.

    Args:
        env_file: content of the .env file.
        hw_of: from an accelerator type to a choice of conf/hw.

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
    """What no type says.

    Raises:
        LaunchError: a name the API refuses, a limit that is none, or settings that do not go together.
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
    if settings.data_disk and len(settings.zones) > 1:
        raise LaunchError(f"data_disk={settings.data_disk}; a disk lies in one zone; give that zone alone as zones=.")
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
    """Lines `KEY=VALUE`, `export KEY='value'`, blank lines and comments; the last of a key wins."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$", line)
        if match is None:
            continue
        value = match[2]
        is_quoted = value[:1] in ("'", '"')
        found[match[1]] = value[1:].split(value[0])[0] if is_quoted else value.split(" #")[0].strip()
    return found
