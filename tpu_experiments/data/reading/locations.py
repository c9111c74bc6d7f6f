"""Files of a source: a file, a folder or a pattern, local or behind a URL; none for a Hub id."""

import codecs
import logging
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.regular_files import require_regular
from tpu_experiments.data.documents import SourceSpec
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import is_remote
from tpu_experiments.storage.streams import SUFFIXES as COMPRESSION_OF_SUFFIX
from tpu_experiments.storage.streams import ByteStream, UnreadableError

log = logging.getLogger(__name__)

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt")
TABLES = (".csv", ".tsv")
SUPPORTED = ".jsonl, .ndjson, .json, .parquet, .csv, .tsv or .txt"
BEGINNINGS = {b"PAR1": ".parquet", b"{": ".json", b"[": ".json"}
"""First bytes, after white space and a byte order mark, of the formats recognised in a file without a suffix."""
PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
LOOKED_AT_BYTES = 4096
ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar")
OTHER_DATA = (".arrow", ".feather", ".orc", ".avro", ".xlsx", ".xml", ".lz4", ".snappy", ".z")
LOGINS = {
    "gs": "`gcloud auth application-default login`",
    "s3": "`aws configure`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    **dict.fromkeys(("az", "abfs"), "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or `az login`"),
}
"""How one logs in, by the scheme of an address."""
HUB_METADATA = ("dataset_info.json", "dataset_infos.json")
"""Files of a downloaded data set that describe it and contain no rows."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    name: str
    """Relative to the source's path, for ids and reports."""
    url: str
    """Local path, or URL."""
    split: str | None = None
    """The split that all of its rows belong to; None where the split hash decides."""


def list_files(spec: SourceSpec) -> list[SourceFile]:
    """Return the data files of a source, ordered by name; none where its path can only be a Hub id.

    Raises:
        ConfigError: nothing is found, it is out of reach, or it is not a data file.
    """
    if is_remote(spec.path):
        found, is_single = _remote_files(spec), not paths.is_glob(spec.path)
        is_single = is_single and list(found.values()) == [spec.path]
    else:
        local = paths.find_local(spec.path)
        is_single = local is not None and not local.is_dir()
        if local is None:
            found = paths.local_matches(spec.path) if paths.is_glob(spec.path) else {}
        else:
            found = {local.name: str(local)} if is_single else paths.local_files(local)
    if is_single:
        if not is_remote(spec.path):
            require_regular(next(iter(found.values())), key=spec.key)
        _require_readable(*next(iter(found.items())), spec=spec)
    elif found or paths.find_local(spec.path):
        found = _data_files(found, spec=spec)
    else:
        _require_hub_id(spec)
    return [SourceFile(name, url) for name, url in found.items()]


def require_present(spec: SourceSpec) -> None:
    """Refuse a local path that is not there, or one file that cannot be read; no folder is listed.

    Raises:
        ConfigError: as of `list_files`.
    """
    if is_remote(spec.path):
        return
    local = paths.find_local(spec.path)
    if local is not None and not local.is_dir():
        _require_readable(local.name, str(local), spec=spec)
    elif local is None and not (paths.is_glob(spec.path) and paths.local_matches(spec.path)):
        _require_hub_id(spec)


def suffixes_of(name: str) -> tuple[str, str]:
    """Return the data suffix and the compression suffix of a file name, in lower case: (".csv", ".gz")."""
    parts = PurePosixPath(name.lower())
    if parts.suffix in COMPRESSION_OF_SUFFIX:
        return PurePosixPath(parts.stem).suffix, parts.suffix
    return parts.suffix, ""


def is_table(name: str) -> bool:
    """Return whether a file is .csv or .tsv."""
    return suffixes_of(name)[0] in TABLES


def content_suffixes(name: str, url: str) -> tuple[str, str]:
    """Return `suffixes_of` a file; without a suffix, those that its first bytes indicate, or "".

    Raises:
        UnreadableError: it has no suffix and cannot be read.
    """
    data, compression = suffixes_of(name)
    if data:
        return data, compression
    head = _head(url, compression=None)
    compression = compression or next((suffix for mark, suffix in PACKED.items() if head.startswith(mark)), "")
    if compression:
        head = _head(url, compression=COMPRESSION_OF_SUFFIX[compression])
    head = head.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
    return next((suffix for mark, suffix in BEGINNINGS.items() if head.startswith(mark)), ""), compression


def _head(url: str, *, compression: str | None) -> bytes:
    head = b""
    for chunk in ByteStream(url, compression=compression):
        head += chunk
        if len(head) >= LOOKED_AT_BYTES:
            break
    return head


def _suffixes(name: str, url: str) -> tuple[str, str]:
    try:
        return content_suffixes(name, url)
    except UnreadableError:
        return suffixes_of(name)


def _remote_files(spec: SourceSpec) -> dict[str, str]:
    try:
        return paths.remote_files(spec.path)
    except FileNotFoundError:
        return {}
    except ConfigError as error:
        raise ConfigError(f"{spec.key}; {str(error).partition('; ')[2]}") from error
    except Exception as error:  # every file system and its client raise types of their own
        complaint = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise ConfigError(
            f"{spec.key}; the address is unreachable ({type(error).__name__}: {complaint}); check it, the network and "
            f"the credentials ({LOGINS.get(spec.path.partition('://')[0], LOGINS['gs'])})."
        ) from error


def _require_hub_id(spec: SourceSpec) -> None:
    """Raise for a `path` that does not exist and can only have meant a file or folder."""
    other = "a Hub id" if spec.path_key == "path" else "a pattern"
    path_override = f"Point {spec.path_override} at a {SUPPORTED} file, a folder of them, or {other}."
    if is_remote(spec.path):
        raise ConfigError(f"{spec.key}; there is nothing there. {paths.remote_near_misses(spec.path)}{path_override}")
    if paths.is_glob(spec.path):
        raise ConfigError(f"{spec.key}; no file matches. {path_override}")
    suffixes = (*DATA_SUFFIXES, *COMPRESSION_OF_SUFFIX, *ARCHIVES, *OTHER_DATA)
    is_no_id = spec.path.startswith((".", "/", "~", "file:")) or spec.path.count("/") > 1 or "\\" in spec.path
    if is_no_id or spec.path.lower().endswith(suffixes):
        raise ConfigError(f"{spec.key}; there is no such file or folder. {paths.near_misses(spec.path)}{path_override}")


def _is_readable(name: str, url: str) -> bool:
    data, compression = _suffixes(name, url)
    return data in DATA_SUFFIXES and not (data == ".parquet" and compression)


def _require_readable(name: str, url: str, *, spec: SourceSpec) -> None:
    data, compression = _suffixes(name, url)
    if data in ARCHIVES:
        raise ConfigError(
            f"{spec.key}; archives ({data}{compression}) are not read; unpack it and point "
            f"{spec.path_override} at the folder."
        )
    if data == ".parquet" and compression:
        raise ConfigError(f"{spec.key}; parquet is compressed inside; unpack the {compression} around it.")
    if not data:
        raise ConfigError(
            f"{spec.key}; the file has no suffix, and its content is neither JSON nor parquet; rename it to end in "
            f"{SUPPORTED}."
        )
    if data not in DATA_SUFFIXES:
        packed = " (also as .gz, .bz2, .xz or .zst)"
        raise ConfigError(f"{spec.key}; the suffix {data!r} is not supported; convert the file to {SUPPORTED}{packed}.")


def _data_files(found: dict[str, str], *, spec: SourceSpec) -> dict[str, str]:
    """Return the files that hold rows; data files of unsupported types are logged."""
    inside = {name: url for name, url in found.items() if PurePosixPath(name).name not in HUB_METADATA}
    files = {name: url for name, url in inside.items() if _is_readable(name, url)}
    if not files:
        held = ", ".join(Path(name).name for name in list(inside)[:5]) or "nothing"
        raise ConfigError(
            f"{spec.key}; no {SUPPORTED} file is among the {len(inside)} files there ({held}); point "
            f"{spec.path_override} at data."
        )
    others = [name for name in inside if name not in files]
    left_out = [name for name in others if name.lower().endswith((*ARCHIVES, *OTHER_DATA)) or not suffixes_of(name)[0]]
    if left_out:
        log.warning("%s: files of unsupported types are skipped: %s", spec.key, ", ".join(left_out))
    return files
