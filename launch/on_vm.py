"""Name the machine and keep compiled programs in the run's bucket; the Python part of startup.sh.

    python -m launch.on_vm hw                        # prints the conf/hw of this machine
    python -m launch.on_vm pull KEY=VALUE...         # bucket -> hw.compile_cache
    python -m launch.on_vm push KEY=VALUE...         # the other way
    python -m launch.on_vm run KEY=VALUE... -- COMMAND...

Without the cache, a replacement spot VM would spend minutes compiling what its predecessor had compiled. Programs are
stored below `<output_dir>/compile_cache/<hw>/<versions>`, so that no other libtpu version loads them. `run` forwards
stop signals to the command and exits with its exit code; a failed cache copy never prevents a run from training.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir

from tpu_experiments.config.compose import to_config
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config, register
from tpu_experiments.runtime.processes.chips import tpu_present
from tpu_experiments.runtime.processes.env import compile_cache_folder
from tpu_experiments.runtime.processes.stopping import Relay
from tpu_experiments.storage import paths
from tpu_experiments.tasks.doctor.cloud import inspect_machine

ROOT = Path(__file__).parents[1]
PUSH_SECONDS = 300.0
LAST_PUSH_SECONDS = 15.0
"""Of the 30 s between a spot VM's preemption notice and its end, the run's own checkpoint comes first."""
SETTLED_SECONDS = 10.0
"""Minimum age of a file to push: torch_xla writes programs in place, so a recent one may be incomplete."""
THREADS = 8


def hw_of_machine() -> str:
    """Return the machine's name in conf/hw, from its Cloud TPU accelerator type; `cpu` without a TPU.

    Raises:
        ConfigError: there is a TPU of unknown type, or no file of conf/hw has its type.
    """
    accelerator_type = inspect_machine().accelerator_type
    if accelerator_type is None:
        if tpu_present():
            raise ConfigError("this machine has a TPU and does not say which; name it with hw=.")
        return "cpu"
    for file in sorted((ROOT / "conf" / "hw").glob("*.yaml")):
        rent = yaml.safe_load(file.read_text(encoding="utf-8")).get("rent") or {}
        if rent.get("accelerator_type") == accelerator_type:
            return file.stem
    raise ConfigError(f"no file of conf/hw has rent.accelerator_type={accelerator_type}; name one with hw=.")


def config_of(overrides: list[str]) -> Config:
    """Compose the run's config as run.py does, with `task=prepare`, which no machine is too small for.

    Raises:
        ConfigError: the config is refused.
    """
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        own = [word for word in overrides if not word.startswith("task")]
        return to_config(compose("config", overrides=["task=prepare", *own]))


def places_of(config: Config) -> tuple[str, str] | None:
    """Return the local compile cache folder and its remote address.

    None where no programs are cached or `output_dir` is local.
    """
    folder = compile_cache_folder(config, process=0)
    if folder is None or not paths.is_remote(config.output_dir):
        return None
    if config.hw.parallel == "spawn":  # a folder for each process, side by side
        folder = os.path.dirname(folder)
    versions = "_".join(f"{name}-{_version(name)}" for name in ("torch_xla", "libtpu"))
    return folder, paths.join(config.output_dir, "compile_cache", config.hw.name, versions)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def remote_sizes(url: str) -> dict[str, int]:
    """Return the size in bytes of every object below an address, by relative name."""
    filesystem, key = paths.filesystem_of(url)
    prefix = key.strip("/") + "/"
    found = filesystem.find(key, detail=True)
    return {str(name).strip("/").removeprefix(prefix): int(info["size"]) for name, info in found.items()}


def local_sizes(folder: str, *, age_seconds: float) -> dict[str, int]:
    """Return the size in bytes of every file below a folder last modified at least `age_seconds` ago."""
    now = time.time()
    files = [path for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in files
        if now - path.stat().st_mtime >= age_seconds
    }


def pull(folder: str, url: str) -> int:
    """Download the programs that are missing locally; return the number of files."""
    here, there = local_sizes(folder, age_seconds=0.0), remote_sizes(url)

    def copy(name: str) -> None:
        local = os.path.join(folder, name)
        os.makedirs(os.path.dirname(local), exist_ok=True)
        paths.write_bytes_atomic(local, paths.read_bytes(paths.join(url, name)))

    return _each(copy, (name for name in there if name not in here))


def push(folder: str, url: str, *, age_seconds: float = SETTLED_SECONDS) -> int:
    """Upload the programs that are missing remotely or differ in size; return the number of files."""
    here, there = local_sizes(folder, age_seconds=age_seconds), remote_sizes(url)

    def copy(name: str) -> None:
        paths.copy_file(os.path.join(folder, name), paths.join(url, name))

    return _each(copy, (name for name, size in here.items() if there.get(name) != size))


def _each(copy: Callable[[str], None], names: Iterator[str]) -> int:
    wanted = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy, wanted))
    return len(wanted)


def kept(direction: str, places: tuple[str, str] | None, *, age_seconds: float = SETTLED_SECONDS) -> None:
    """Pull or push the compile cache and report the result; a failure is printed, never raised."""
    if places is None:
        print("on_vm: no compile cache is kept for this run", file=sys.stderr)
        return
    folder, url = places
    started = time.perf_counter()
    try:
        num = pull(folder, url) if direction == "pull" else push(folder, url, age_seconds=age_seconds)
    except Exception as error:  # storage raises types of its own; without the cache a run only compiles longer
        print(f"on_vm: {direction} of {url} failed ({type(error).__name__}: {error})", file=sys.stderr)
        return
    seconds = time.perf_counter() - started
    print(f"on_vm: {direction}, {num} compiled programs in {seconds:.1f} s ({url})", file=sys.stderr, flush=True)


def run(command: list[str], places: tuple[str, str] | None) -> int:
    """Run a command, push the programs it compiles every 300 s and at its end, and return its exit code."""
    relay = Relay()
    child = relay.start(command)
    while True:
        try:
            code = child.wait(PUSH_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if places is not None:
                kept("push", places)
    if places is not None:
        last = threading.Thread(target=kept, args=("push", places), kwargs={"age_seconds": 0.0}, daemon=True)
        last.start()
        last.join(LAST_PUSH_SECONDS if relay.asked else None)
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """Run one subcommand; return 0, 2 if the config is refused, or the exit code of `run`'s command."""
    what, *words = arguments
    divider = words.index("--") if "--" in words else len(words)
    try:
        if what == "hw":
            print(hw_of_machine())
            return 0
        places = places_of(config_of(words[:divider]))
    except Exception as error:  # Hydra raises several types; the run itself says what is wrong with its settings
        print(f"on_vm: {error}", file=sys.stderr)
        if what != "run":
            return 2
        places = None
    if what == "run":
        return run(words[divider + 1 :], places)
    kept(what, places, age_seconds=0.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
