"""Check where a run writes: run folder, disk, compile cache, and a run that exists already.

Check whether the weights of a run are on this machine."""

import os
import shutil
import tempfile
import time
import uuid
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.regular_files import read_regular
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import TaskConfig
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.planning.analytic import step_settings
from tpu_experiments.planning.stored_plans import sizes_of
from tpu_experiments.planning.work import GIB, analytic_memory
from tpu_experiments.runtime.processes.env import compile_cache_folder
from tpu_experiments.storage import lease, paths, strict_json
from tpu_experiments.storage.gguf.files import is_gguf
from tpu_experiments.storage.paths import find_local
from tpu_experiments.storage.retry import complaint
from tpu_experiments.storage.run_folder import has_other_length, open_run
from tpu_experiments.tasks.doctor.finding import Finding, failed, ok, shown_gb, warning, worst

Kind = Literal["drawn", "folder", "hub", "missing"]
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """Location of the weights."""

    kind: Kind
    folder: str | None = None
    is_complete: bool = False
    """Whether config.json and all weight files are on this machine."""


def inspect_model_files(config: Config) -> ModelFiles:
    """Look for the weights in the folder or the Hub's cache, without network access."""
    model = config.model
    if model.init == "random" or model.size == "tiny":
        return ModelFiles("drawn", is_complete=True)
    local = find_local(model.path)
    if local is not None and (local.is_dir() or is_gguf(local)):
        return ModelFiles("folder", str(local), is_gguf(local) or is_whole(local))
    if model.path.startswith((".", "/", "~")) or model.path.count("/") != 1:
        return ModelFiles("missing")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model.path, revision=model.revision, local_files_only=True))
    except Exception:  # the client raises several types for a repository missing in its cache
        return ModelFiles("hub")
    return ModelFiles("hub", str(folder), is_whole(folder))


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint has config.json and all weight files named by its index."""
    if not (folder / "config.json").is_file():
        return False
    if not (folder / INDEX).is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(strict_json.loads(read_regular(folder / INDEX))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)


Append = Literal["adds", "overwrites", "is refused"]
SLOW_SECONDS = 2.0
"""A checkpoint takes a dozen requests: above this for one, saving exceeds a spot VM's 30 s of notice."""
SPARE_BYTES = 2 * 10**9
"""Room for logs, prepared rows and TensorBoard files of a small run."""


@dataclass(frozen=True)
class Storage:
    """Result of writing one probe file to `output_dir`; `complaint` if it was refused."""

    place: str
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    append: Append = "adds"
    complaint: str | None = None


def inspect_output_dir(config: Config) -> Storage:
    """Write, read, append to and remove one small file; a missing local folder is not created."""
    place = config.output_dir if paths.is_remote(config.output_dir) else nearest_folder(config.output_dir)
    file = paths.join(place, f".doctor-{uuid.uuid4().hex[:8]}")
    try:
        started = time.perf_counter()
        paths.write_text_atomic(file, "a")
        written = time.perf_counter()
        paths.read_text(file)
        read = time.perf_counter()
        append = _append(file)
        paths.remove_tree(file)
    except Exception as error:  # file systems and their clients raise types of their own
        return Storage(place, complaint=complaint(error, place=config.output_dir))
    return Storage(place, written - started, read - written, append)


def nearest_folder(path: str) -> str:
    """Return the folder, or its nearest existing parent."""
    folder = Path(path.removeprefix("file://")).expanduser().resolve()
    while not folder.is_dir():
        folder = folder.parent
    return str(folder)


def write_refusal(folder: str) -> str | None:
    """Return why the nearest existing parent of a local folder takes no file, or None; nothing is left there."""
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)):
            return None
    except OSError as error:  # os.access lets root write to /proc
        return error.strerror or type(error).__name__


def _append(file: str) -> Append:
    filesystem, key = paths.filesystem_of(file)
    try:
        with warnings.catch_warnings():  # gcsfs warns once per file that it overwrites
            warnings.simplefilter("ignore")
            with filesystem.open(key, "ab") as opened:
                opened.write(b"b")
    except (NotImplementedError, ValueError, OSError):
        return "is refused"
    return "adds" if paths.read_text(file) == "ab" else "overwrites"


def judge_output_dir(storage: Storage, config: Config) -> Finding:
    """Judge whether checkpoints can be written, how fast, and whether files can be appended to."""
    if storage.complaint is not None:
        seen, _, remedy = storage.complaint.rstrip(".").rpartition(": ")
        return failed(seen, remedy or "choose another output_dir=")
    is_remote = paths.is_remote(storage.place)
    slowest = max(storage.write_seconds, storage.read_seconds)
    seen = (
        f"{storage.place}: written in {1000 * storage.write_seconds:.0f} ms, read in "
        f"{1000 * storage.read_seconds:.0f} ms, append {storage.append}"
    )
    if storage.append != "adds" and not is_remote:
        remedy = "this mount cannot append, so metrics would be lost: give the bucket itself, output_dir=gs://..."
        return failed(seen, remedy)
    if slowest > SLOW_SECONDS:
        return warning(seen, "put the bucket into the region of the TPU: a save at a preemption has 30 s")
    # Metrics and event files grow on this machine and are uploaded whole (storage/spool.py), so nothing is lost here.
    return ok(f"{seen}, which no run does there" if storage.append != "adds" else seen)


@dataclass(frozen=True)
class Space:
    """Disk and the bytes that this run would write to it."""

    what: str
    folder: str
    free_bytes: int
    needed_bytes: int
    refusal: str | None = None
    """Why nothing can be written there."""


def _space(what: str, folder: str, needed_bytes: int) -> Space:
    nearest = nearest_folder(folder)
    return Space(what, nearest, shutil.disk_usage(nearest).free, needed_bytes, write_refusal(nearest))


def inspect_disk(config: Config) -> tuple[Space, ...]:
    """Measure the disks of the run folder (local if it is remote) and of the Hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE  # takes 0.2 s to import, which other checks do not need

    arch = sizes_of(config.model)
    output_dir = "~" if paths.is_remote(config.output_dir) else config.output_dir
    spaces = [_space("the run", output_dir, SPARE_BYTES + checkpoint_bytes(config, arch))]
    files = inspect_model_files(config)
    if arch and files.kind == "hub" and not files.is_complete:
        size = read_decoder(arch).parameters * 2  # the Hub's checkpoints are bf16
        spaces.append(_space("the download", HF_HUB_CACHE, size))
    return tuple(spaces)


def checkpoint_bytes(config: Config, arch: object) -> int:
    """Return the bytes of all checkpoints kept at once, with the one being written: parameters, averages, state."""
    if not arch:
        return 0
    one_row = Geometry(global_rows=1, micro_rows=1, accumulation=1, num_shards=1, seq_len=1)
    whole = replace(step_settings(config, one_row), sharding="replicated")
    state = analytic_memory(arch, step=whole)
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    return round((state.adapters + state.optimizer) * GIB * kept)


def judge_disk(spaces: tuple[Space, ...], config: Config) -> Finding:
    """Compare free with needed bytes, for each disk by itself."""
    findings = []
    for space in spaces:
        shown = (
            f"{space.what}: {shown_gb(space.free_bytes)} free in {space.folder}, {shown_gb(space.needed_bytes)} needed"
        )
        if space.refusal is not None:
            seen = f"{space.what}: {space.folder} takes no file ({space.refusal})"
            findings.append(failed(seen, "name another folder (output_dir=, HF_HOME)"))
        elif space.free_bytes < space.needed_bytes:
            findings.append(failed(shown, "free some space, or name another disk (output_dir=, HF_HOME)"))
        else:
            findings.append(ok(shown))
    return worst(findings)


@dataclass(frozen=True)
class CacheFolder:
    """State of hw.compile_cache on this machine."""

    folder: str | None
    is_writable: bool = True
    num_programs: int = 0


def inspect_compile_cache(config: Config) -> CacheFolder:
    """Inspect the first process's cache folder, or its nearest existing parent."""
    folder = compile_cache_folder(config, process=0)
    if folder is None:
        return CacheFolder(None)
    num = len(os.listdir(folder)) if os.path.isdir(folder) else 0
    return CacheFolder(folder, write_refusal(folder) is None, num)


def judge_compile_cache(cache: CacheFolder, config: Config) -> Finding:
    """Judge whether compiled programs can be kept for the next start."""
    if cache.folder is None:
        return ok(f"none is kept on hw={config.hw.name}")
    if not cache.is_writable:
        return failed(f"{cache.folder} may not be written", "choose hw.compile_cache=FOLDER, or =none")
    seen = f"{cache.folder}, {cache.num_programs} programs"
    is_read = config.hw.runtime != "xla"
    return ok(seen) if is_read else warning(seen, "torch_xla 2.9.0 writes them and reads none back")


@dataclass(frozen=True)
class RunState:
    """State of the run folder."""

    name: str
    complaint: str | None = None
    is_finished: bool = False
    is_there: bool = False
    holder: str | None = None
    refusal: str | None = None
    """Why a new run's folder cannot be made; None for a bucket, which `output_dir` asks."""


def as_training(config: Config) -> Config:
    """Return the same config with task=train."""
    return replace(config, task=TaskConfig(name="train"))


def inspect_run(config: Config) -> RunState:
    """Read the run folder without writing to it."""
    name = str(config.name)
    try:
        folder = open_run(as_training(config), may_lengthen=True)
        is_finished = folder.finished() is not None and not has_other_length(folder, as_training(config))
        holder = lease.read(folder.path())
        held = None if holder is None or holder.is_dead else f"process {holder.pid} on {holder.host}"
        is_new_here = not folder.exists() and not paths.is_remote(config.output_dir)
        refusal = write_refusal(config.output_dir) if is_new_here else None
        return RunState(name, None, is_finished, folder.exists(), held, refusal)
    except ConfigError as error:
        return RunState(name, complaint=str(error))


def judge_run(state: RunState, config: Config) -> Finding:
    """Judge whether a run of this name would start or resume."""
    if state.complaint is not None:
        return failed(state.complaint.rstrip("."), "choose another name=")
    if state.is_finished:
        return warning(f"name={state.name} is finished, nothing would be run", "give another name= to train again")
    if state.holder is not None:
        return failed(f"{state.holder} is writing name={state.name}", "stop it, or choose another name=")
    if state.refusal is not None:
        seen = f"name={state.name} is new, and output_dir={config.output_dir} takes no file ({state.refusal})"
        return failed(seen, "choose another output_dir=")
    return ok(f"name={state.name} {'resumes' if state.is_there else 'is new'}")


def inspect_settings(config: Config) -> bool:
    """Return whether each host might write to a folder of its own."""
    return config.hw.num_hosts > 1 and not paths.is_remote(config.output_dir)


def judge_settings(has_own_folders: bool, config: Config) -> Finding:
    """Report model, data and hardware; the config has passed its own checks."""
    if has_own_folders:
        seen = f"output_dir={config.output_dir} is a folder of this machine, and hw.num_hosts={config.hw.num_hosts}"
        return warning(seen, "use a bucket (gs://...), unless it is a folder that all hosts share")
    return ok(f"model={config.model.name} data=[{','.join(config.data)}] hw={config.hw.name}")
