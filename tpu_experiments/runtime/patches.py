"""Attributes of libraries that are replaced while a block runs, and the versions that private names were written for.

torch_xla 2.9.0 is its last release, so what its public names lack is taken from below them, in runtime/,
and planning/compiler.py; so is what TorchTPU's public names lack (runtime/tpu/). Versions are checked before those are
imported, and nothing is replaced for longer than a `with` block.
"""

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import IS_INSTALLED

WRITTEN_FOR = {"torch": "2.9.0", "torch_xla": "2.9.0", "jax": "0.7.1", "libtpu": "0.0.21"}
"""torch_xla[tpu,pallas]==2.9.0 names the other three; launch/requirements.lock has them."""
ALSO_FIT = {"jax": ("0.7.2",), "libtpu": ("0.0.21.1",)}
"""Further versions that private names were tried with: those of Colab's TPU image, and libtpu's for Python 3.13.

The attention kernels of jax 0.7.2 are 0.7.1's programs (tests/images/programs.py).
"""
TORCHTPU = {"torch": "2.14.1", "torch_tpu": "0.2.0", "jax": "0.12.0.1", "libtpu": "0.0.52"}
"""Versions of the backend of TorchTPU, as in launch/requirements-torchtpu.lock."""
MOSAIC_VERSION = 7
"""libtpu 0.0.21 reads Mosaic up to 7; where no TPU tells it otherwise, jax 0.7.1 writes 8, and 0.7.2 writes 7 too."""


def require_versions(*packages: str, of: Mapping[str, str] = WRITTEN_FOR, lock: str = "requirements.lock") -> None:
    """Refuse packages of other versions than the private names here were written for.

    Args:
        of: the versions.
        lock: file of launch/ that has them.

    Raises:
        ConfigError: a package is missing or of another version, or torch_xla lacks a library.
    """
    found = {name: installed(name) for name in packages}
    wrong = [f"{name} is {have or 'missing'}" for name, have in found.items() if not fits(name, have, of=of)]
    if wrong:
        wanted = " ".join(f"{name}=={of[name]}" for name in packages)
        whole = f"let launch/local.sh make the environment from launch/{lock}"
        if IS_INSTALLED:
            whole = "pip install 'tpu_experiments[xla]', or [tpu] on a TPU VM"
        raise ConfigError(
            f"{' and '.join(wrong)}; this program uses private names that only other versions have: install {wanted}, "
            f"or {whole}."
        )
    library = missing_library() if "torch_xla" in packages else None
    if library is not None:
        raise ConfigError(
            f"this Python has no shared library {library}.so.1.0, which torch_xla loads; on Debian or Ubuntu run "
            f"`apt-get install {library}`, or use hw.runtime=eager."
        )


def fits(package: str, found: str | None, *, of: Mapping[str, str] = WRITTEN_FOR) -> bool:
    """Return whether private names hold for a version, given without its build, of a package."""
    return found == of[package] or (of is WRITTEN_FOR and found in ALSO_FIT.get(package, ()))


def missing_library() -> str | None:
    """Return the shared library of this Python, as `libpython3.11`, where torch_xla would not find it; else None."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}"
    try:
        ctypes.CDLL(f"{name}.so.1.0")
    except OSError:
        return name
    return None


def installed(package: str) -> str | None:
    """Return the version of a package without its build (`+cpu`); None where it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


@contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Set an attribute of a module or class while the block runs; gives the attribute that stood there before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


@contextmanager
def mosaic_for_libtpu() -> Iterator[None]:
    """Have jax write Pallas kernels in the version of Mosaic that libtpu reads, while the block runs.

    On a TPU VM jax also asks its own device for the date of libtpu, and refuses to lower where that is a CPU, as here:
    the chips are torch_xla's.
    """
    import jax
    from jax._src import cloud_tpu_init, tpu_custom_call

    if not fits("jax", jax.__version__):  # TorchTPU's jax writes what its libtpu reads
        yield
        return
    with ExitStack() as patches:
        patches.enter_context(patched_attribute(tpu_custom_call, "get_ir_version", lambda _: MOSAIC_VERSION))
        patches.enter_context(patched_attribute(cloud_tpu_init, "running_in_cloud_tpu_vm", False))
        if jax.__version__ != WRITTEN_FOR["jax"]:
            import jax.experimental.pallas.tpu

            # Without a TPU, 0.7.2 writes for the oldest one, 2^x as e^(ln 2 x), and 0.7.1 for the newest.
            rules = jax._src.pallas.mosaic.lowering.LoweringRuleContext
            patches.enter_context(patched_attribute(rules, "is_cloud_tpu_older_than", lambda *_: False))
        yield
