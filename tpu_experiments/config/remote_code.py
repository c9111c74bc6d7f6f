"""Handling of Python code in a checkpoint or tokenizer, as set by `model.remote_code`."""

from collections.abc import Mapping
from typing import Any

from tpu_experiments.config.errors import ConfigError


def require_no_code(values: Mapping[str, Any], *, source: str, remote_code: str) -> None:
    """Refuse a config.json or tokenizer_config.json that names Python code; nothing is imported.

    Args:
        source: key=value of the folder or Hub id that the file comes from.
        remote_code: `model.remote_code`.

    Raises:
        ConfigError: code is named, and `remote_code` is `refuse`.
    """
    named = values.get("auto_map")
    if named and remote_code == "refuse":
        classes = sorted(named) if isinstance(named, Mapping) else ["AutoTokenizer"]
        raise ConfigError(
            f"{source}; it brings Python code of its own (auto_map, for {', '.join(map(str, classes))}), which is not "
            "run; take transformers' own class of its type with model.remote_code=ignore, or read the code, and run "
            "it with your rights with model.remote_code=run."
        )
