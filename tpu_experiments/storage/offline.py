"""One check whether the Hugging Face Hub is reachable; its library tries five times per file (24 s)."""

import os
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit
from urllib.request import getproxies

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.storage.paths import find_local

HUB = "https://huggingface.co"
SECONDS = 5.0
OWNER_AND_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SETTINGS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def go_offline_if_unreachable(config: Config) -> None:
    """Set HF_HUB_OFFLINE if the config needs the Hugging Face Hub and a connection to it fails.

    The library then uses its cache, and fails at once for what is not in it. It reads the variable at import, so call
    this before. The user's own setting is kept, and behind a proxy nothing is checked.

    Raises:
        ConfigError: the base model of a training run is not in the cache either.
    """
    paths = dict.fromkeys(_paths(config))
    named = [path for path in paths if OWNER_AND_NAME.fullmatch(path) and find_local(path) is None]
    if not named or getproxies() or any(name in os.environ for name in SETTINGS):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", HUB))
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=SECONDS).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        print(
            f"warning: {hub.hostname} is unreachable ({error}): {', '.join(named)} must be in this machine's "
            "cache (HF_HUB_OFFLINE=0 tries the network all the same)",
            file=sys.stderr,
        )
        _require_model(config, hub=str(hub.hostname), needed=named)


def _require_model(config: Config, *, hub: str, needed: Sequence[str]) -> None:
    model = config.model
    if config.task.name != "train" or model.size != "full" or model.init == "random" or model.path not in needed:
        return
    from huggingface_hub import try_to_load_from_cache  # imported only here, since it reads the variable at import

    if not isinstance(try_to_load_from_cache(model.path, "config.json", revision=model.revision), str):
        raise ConfigError(
            f"model.path={model.path}; it is no local folder, {hub} is unreachable and the cache of this machine does "
            "not have it; connect the machine, or download it elsewhere and set model.path=FOLDER."
        )


def _paths(config: Config) -> Iterable[str]:
    if config.model.size == "full":
        yield config.model.path
    yield config.model.tokenizer_path or config.model.path
    yield from (source.path for source in config.data.values())
