"""Which libtpu.so torch_xla or jax loads, and whether it is the version that programs were planned and tested with."""

import filecmp
import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.patches import TORCHTPU, WRITTEN_FOR, fits, installed

ANY = "TPU_EXPERIMENTS_ANY_LIBTPU"
"""Variable that lets any libtpu be loaded, for whoever tries one."""
PATH = "TPU_LIBRARY_PATH"


def libtpu_problem(hw: HwConfig) -> tuple[str, str] | None:
    """Return what is wrong with the libtpu that a run on a TPU would load, and what to do; None if nothing.

    torch_xla 2.9.0 takes TPU_LIBRARY_PATH, then a libtpu.so of its own folder, then the package libtpu, whose import
    sets that variable to its own file (a notebook that has imported jax hands it on).
    """
    given = {**os.environ, **hw.env}
    if given.get(ANY):
        return None
    versions = TORCHTPU if hw.runtime == "torchtpu" else WRITTEN_FOR
    wanted = versions["libtpu"]
    install = f"install libtpu=={wanted} (launch/local.sh makes the environment)"
    path = given.get(PATH)
    if path is None and hw.runtime == "xla":
        path = _of_torch_xla()
    if path is not None and not os.path.isfile(path):
        return f"{PATH}={path} is no file", f"`unset {PATH}`"
    have, own = installed("libtpu"), _of_package()
    if path is not None and not _is_same(path, own):
        found = _version_beside(path)
        if not fits("libtpu", found, of=versions):
            named = f"{PATH}={path}" if PATH in given else path
            seen = f"{named} is libtpu {found or 'of an unknown version'}, and {wanted} is wanted"
            return seen, f"`unset {PATH}` and {install}, or `export {ANY}=1` to try it"
        return None
    if have is None or own is None:
        return f"libtpu is missing ({wanted} is wanted)", install
    if not fits("libtpu", have, of=versions):
        return f"libtpu {have} is installed, and {wanted} is wanted", f"{install}, or `export {ANY}=1` to try it"
    return None


def _of_package() -> str | None:
    """Return the libtpu.so of the installed package; None without one."""
    try:
        file = Path(str(distribution("libtpu").locate_file("libtpu/libtpu.so")))
    except PackageNotFoundError:
        return None
    return str(file) if file.is_file() else None


def _of_torch_xla() -> str | None:
    """Return a libtpu.so in torch_xla's own folder, which comes before the package's; None without one."""
    try:
        file = Path(str(distribution("torch_xla").locate_file("torch_xla/lib/libtpu.so")))
    except PackageNotFoundError:
        return None
    return str(file) if file.is_file() else None


def _is_same(path: str, own: str | None) -> bool:
    """Return whether a file is the package's, or a copy of it."""
    if own is None:
        return False
    return os.path.samefile(path, own) or filecmp.cmp(path, own, shallow=False)


def _version_beside(path: str) -> str | None:
    """Return the version of the package that a libtpu.so belongs to; the file itself does not say it."""
    site = Path(path).resolve().parent.parent
    names = (re.fullmatch(r"libtpu(?:_nightly)?-(.+)\.dist-info", folder.name) for folder in site.glob("libtpu*"))
    return next((name[1] for name in names if name), None)
