"""Where the project's own configs and entry point are, in a checkout or an installed package, and its caches."""

import os
import sys
from pathlib import Path

from tpu_experiments.config.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
REPOSITORY = PACKAGE.parent
"""The checkout, or the folder that packages are installed in."""
IS_INSTALLED = (PACKAGE / "conf").is_dir()
"""A wheel has conf/ inside the package; a checkout has it beside the package, and beside run.py."""
CONF = PACKAGE / "conf" if IS_INSTALLED else REPOSITORY / "conf"
COMMAND = (sys.executable, *(("-m", "tpu_experiments") if IS_INSTALLED else (str(REPOSITORY / "run.py"),)))
"""Words that start a further process of this program, from any folder."""


def cache_folder(name: str) -> str:
    """Return `$XDG_CACHE_HOME/tpu_experiments/<name>`, or the same in `~/.cache`."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tpu_experiments", name)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds files of a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab*")
    return any(any(folder.glob(name)) for name in names)


def require_checkout(engine: str) -> None:
    """Refuse an engine of sweeps that sends this project's files to other machines, where it is installed as a wheel.

    Raises:
        ConfigError: there is no checkout.
    """
    if IS_INSTALLED:
        raise ConfigError(
            f"sweeping.engine={engine}; it starts the checkout's run.py on other machines, and this is the package in "
            f"{PACKAGE}; clone the repository and run the sweep there, or use sweeping.engine=local."
        )
