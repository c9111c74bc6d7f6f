"""Check what a run reads: the model's files, the data, and the memory to hold them."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from tpu_experiments.config.data_schema import OWN_KEYS
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import DoctorTaskConfig
from tpu_experiments.metrics.flops import read_decoder
from tpu_experiments.planning.analytic import ITEM_BYTES
from tpu_experiments.planning.check import Finding as MemoryFinding
from tpu_experiments.planning.check import finding as memory_finding
from tpu_experiments.planning.stored_plans import sizes_of
from tpu_experiments.planning.work import base_bytes
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import find_local, is_glob
from tpu_experiments.tasks.doctor.finding import Finding, failed, not_checked, ok, shown_gb, warning, worst
from tpu_experiments.tasks.doctor.places import ModelFiles, as_training, inspect_model_files

Hub = Literal["not asked", "gives it", "gated", "missing", "no answer"]
BASE_BYTES = 3 * 10**9
"""Host memory besides the weights: a whole run of the tiny model peaks at 1,454 MiB (README), doubled."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Model:
    """The weights, and the Hub's answer where they have to be downloaded."""

    path: str
    files: ModelFiles
    hub: Hub = "not asked"
    has_token: bool = False
    is_offline: bool = False


def inspect_model(config: Config, task: DoctorTaskConfig) -> Model:
    """Look for the files, and query the Hub if some are missing and HF_HUB_OFFLINE is not set."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HUB_OFFLINE

    files, has_token = inspect_model_files(config), get_token() is not None
    if files.kind != "hub" or files.is_complete or HF_HUB_OFFLINE:
        return Model(config.model.path, files, has_token=has_token, is_offline=HF_HUB_OFFLINE)
    path, revision = config.model.path, config.model.revision
    hub = _ask_hub(path, revision=revision, kind="model", timeout_seconds=task.timeout_seconds / 2)
    return Model(path, files, hub, has_token)


def _ask_hub(path: str, *, revision: str | None, kind: Literal["model", "dataset"], timeout_seconds: float) -> Hub:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        api = HfApi()
        api.repo_info(path, revision=revision, repo_type=kind, timeout=timeout_seconds)
        api.auth_check(path, repo_type=kind)
    except GatedRepoError:
        return "gated"
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return "missing"
    except Exception:  # httpx raises a dozen types without a network
        return "no answer"
    return "gives it"


def judge_model(model: Model, config: Config) -> Finding:
    """Judge whether the weights can be read."""
    files, path = model.files, model.path
    token = "a token" if model.has_token else "no token"
    if files.kind == "drawn":
        return ok("weights are drawn here, none are read")
    if files.kind == "missing":
        return failed(f"model.path={path} is no folder", "give a checkpoint folder or a Hub id owner/name")
    if files.kind == "folder":
        seen = f"model.path={path}"
        return ok(seen) if files.is_complete else failed(f"{seen} lacks config.json or weights", "download it again")
    if files.is_complete:
        return ok(f"{path} is in the Hub's cache")
    begun = " (begun)" if files.folder else ""
    if model.is_offline:
        remedy = "unset HF_HUB_OFFLINE, or set model.path= to a folder that has it"
        return failed(f"{path} is not in the cache{begun}, and HF_HUB_OFFLINE is set", remedy)
    answers = {
        "gives it": ok(f"{path} is not in the cache{begun}; the Hub gives it ({token})"),
        "gated": failed(f"{path} is gated, {token}", "accept its terms on its page, then `hf auth login`"),
        "missing": failed(f"the Hub shows no {path}, {token}", "mend model.path=; a private one needs `hf auth login`"),
    }
    return answers.get(model.hub) or failed(
        f"{path} is not in the cache{begun} and the Hub does not answer",
        "check the network, or set model.path= to a folder that has it",
    )


@dataclass(frozen=True)
class Rows:
    """Location of a source's rows; a name that is no local file can only be on the Hub."""

    path: str
    place: Literal["here", "there", "missing", "hub"]
    hub: Hub = "not asked"


def inspect_data(config: Config, task: DoctorTaskConfig) -> dict[str, Rows]:
    """Look for files and addresses; query the Hub for dataset names, all at once."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    found = {name: Rows(path, _place_of(path)) for name, path in _paths(config).items()}
    # Evaluation and test files of one's own are files.
    held_out = {key: Rows(path, _place_of(path)) for key, path in _held_out_paths(config).items()}
    held_out = {key: replace(rows, place="missing") if rows.place == "hub" else rows for key, rows in held_out.items()}
    asked = {name: rows for name, rows in found.items() if rows.place == "hub" and not HF_HUB_OFFLINE}

    def ask(name: str) -> Hub:
        revision = config.data[name].revision
        return _ask_hub(asked[name].path, revision=revision, kind="dataset", timeout_seconds=task.timeout_seconds / 2)

    if asked:
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = dict(zip(asked, pool.map(ask, asked), strict=True))
        found |= {name: replace(asked[name], hub=answer) for name, answer in answers.items()}
    return {f"{name}.path": rows for name, rows in found.items()} | held_out


def _paths(config: Config) -> dict[str, str]:
    is_sample = config.data_size == "sample"
    return {name: str(source.sample_path if is_sample else source.path) for name, source in config.data.items()}


def _held_out_paths(config: Config) -> dict[str, str]:
    if config.data_size == "sample":
        return {}
    keys = [key for key, _ in OWN_KEYS.values()]
    named = {f"{name}.{key}": getattr(source, key) for name, source in config.data.items() for key in keys}
    return {key: str(path) for key, path in named.items() if path}


def _place_of(path: str) -> Literal["here", "there", "missing", "hub"]:
    if paths.is_remote(path):
        return "there" if is_glob(path) or paths.exists(path) else "missing"
    if find_local(path) is not None or is_glob(path):
        return "here"
    is_name = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix
    return "hub" if is_name else "missing"


def judge_data(data: Mapping[str, Rows], config: Config) -> Finding:
    """Report missing files; task=prepare checks the content of a source."""
    return worst(_judge_rows(f"data.{key}=", rows) for key, rows in data.items())


def _judge_rows(key: str, rows: Rows) -> Finding:
    seen = f"{key}{rows.path}"
    if rows.place == "missing" or rows.hub == "missing":
        where = "is not there" if rows.place == "missing" else "is no file here, and the Hub shows none of that name"
        return failed(f"{seen} {where}", f"point {key} at a file, a folder or a Hub id")
    if rows.hub == "gated":
        return failed(f"{seen} is gated", "accept its terms on its page, then `hf auth login`")
    if rows.hub == "no answer":
        return warning(f"{seen} is no file here and the Hub does not answer", f"check the network, or set {key}FILE")
    if rows.place == "hub" and rows.hub == "not asked":
        return not_checked(f"{seen} is no file here, and HF_HUB_OFFLINE is set", f"unset it, or set {key}FILE")
    return ok(seen)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this machine or container, and bytes that loading the model takes."""

    total: int
    available: int
    needed: int | None
    """None where the model's sizes are unknown."""


def inspect_host_memory(config: Config) -> HostMemory:
    """Read the memory of the machine, limited by the container's."""
    memory = psutil.virtual_memory()
    limits = [int(text) for text in map(_text, CGROUP_LIMITS) if text.isdigit()]
    total = min([memory.total, *limits])
    return HostMemory(total, min(memory.available, total), needed_bytes(config, sizes_of(config.model)))


def needed_bytes(config: Config, arch: Any) -> int | None:
    """Return the host memory for loading the base, which is read once, tensor by tensor.

    It takes at most 1.009 times the checkpoint (README). This is the upper bound, for a process that keeps all weights:
    on a TPU, tensors leave the host as they are read.
    """
    if not arch:
        return None
    processes = config.hw.num_devices if config.hw.parallel == "spawn" else 1
    model, decoder = config.model, read_decoder(arch)
    item_bytes = ITEM_BYTES[model.dtype]
    weights = sum(base_bytes(decoder, base=model.base, double_quant=model.base_double_quant, item_bytes=item_bytes))
    return processes * (int(1.01 * weights) + BASE_BYTES)


def judge_host_memory(memory: HostMemory, config: Config) -> Finding:
    """Compare the host's memory with the model."""
    if memory.needed is None:
        return not_checked("the sizes of the model are not known", "add +model.arch.*= or a local checkpoint")
    seen = f"{shown_gb(memory.available)} of {shown_gb(memory.total)} free, {shown_gb(memory.needed)} needed"
    if memory.total < memory.needed:
        return failed(seen, "take a machine with more memory, or a smaller model")
    if memory.available < memory.needed:
        return warning(seen, "close other programs: the system may end this one while it loads")
    return ok(seen)


def inspect_chip_memory(config: Config) -> MemoryFinding | None:
    """Return what a plan or the formulas report against starting."""
    if not _has_known_memory(config.hw):
        return None
    return memory_finding(as_training(config))


def judge_chip_memory(found: MemoryFinding | None, config: Config) -> Finding:
    """Compare HBM with the run's programs, as task=train does when it starts."""
    hw = config.hw
    if not _has_known_memory(hw) or hw.chip is None:
        return not_checked(f"hw={hw.name} has no chip with a datasheet")
    if found is None:
        return ok(f"nothing is known against {hw.chip.hbm_gib:.0f} GiB per chip")
    if found.certainty == "known" and config.trainer.plan_check == "refuse":
        return failed(found.words, "task=plan task.explore=search with the same settings looks for some that fit")
    return warning(found.words, "task=plan with the same settings compiles it and reports the exact memory")


def _has_known_memory(hw: HwConfig) -> bool:
    """Return whether a plan or the formulas judge memory when a run starts: a TPU's, and a GPU's with a datasheet."""
    return hw.chip is not None and (hw.topology is not None or hw.device == "cuda")


def _text(path: str) -> str:
    return Path(path).read_text().strip() if os.path.exists(path) else ""
