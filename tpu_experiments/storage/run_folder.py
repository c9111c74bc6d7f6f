"""The run folder: one name, one config. A check writes nothing; `create` is the first thing that does.

<output_dir>/<name>/identity.json   flattened identity of the config that made the folder
                    config.yaml     resolved config of the latest start
                    result.json     written last, by loggers/result.py

A record that cannot be read, as after a power cut, is kept beside its file, so that the run can continue."""

import json
import logging
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from tpu_experiments.config.defaults import AUTO, OPEN, is_open
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity, is_of_other_length, require_same
from tpu_experiments.config.redaction import redacted
from tpu_experiments.config.regular_files import NotRegular
from tpu_experiments.config.schema import Config
from tpu_experiments.config.trust import setting_problem
from tpu_experiments.config.tuned import KEPT, given, value_of, with_values
from tpu_experiments.storage import paths, strict_json


def put_aside(path: str, content: bytes) -> str:
    """Append the unreadable `content` of file `path` to `<name>.bad<suffix>` next to it; return that path."""
    stem, suffix = posixpath.splitext(path)
    place = f"{stem}.bad{suffix}"
    before = paths.read_bytes(place) if paths.exists(place) else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    paths.write_bytes_atomic(place, before + content)
    return place


log = logging.getLogger(__name__)
RESULT = "result.json"
INTERPOLATION = re.compile(r"(\\*)\$\{")
WRITES = 2  # tries for identity.json, which is read back and written again if it differs


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run; `output_dir` is a local path or a URL."""

    output_dir: str
    name: str

    @classmethod
    def of(cls, config: Config) -> "RunFolder":
        """Return the folder of a config's own run, which need not exist."""
        assert config.name is not None, "to_config names the run"
        return cls(config.output_dir, config.name)

    @classmethod
    def at(cls, folder: str) -> "RunFolder":
        """Return the folder of a path or URL, which need not hold a run."""
        parent, _, name = folder.rstrip("/").rpartition("/")
        return cls(parent or ("/" if folder.startswith("/") else "."), name)

    def path(self, *parts: str) -> str:
        """Return a path below the run folder; without parts, the folder itself."""
        return paths.join(self.output_dir, self.name, *parts)

    @property
    def config_path(self) -> str:
        """Path of the resolved config."""
        return self.path("config.yaml")

    @property
    def identity_path(self) -> str:
        """Path of identity.json, whose presence makes a folder a run folder."""
        return self.path("identity.json")

    @property
    def result_path(self) -> str:
        """The file that says that the run is finished."""
        return self.path(RESULT)

    def exists(self) -> bool:
        """Return whether `create` has been called, by this process or an earlier one."""
        return paths.exists(self.identity_path)

    def stored_identity(self) -> dict[str, Any] | None:
        """Return the identity of the config that made the folder; None without one.

        A damaged one in a folder without checkpoints, from an interrupted start, counts as none.

        Raises:
            ConfigError: it is damaged and there are checkpoints, whose config is unknown then.
        """
        if not self.exists():
            return None
        try:
            stored = strict_json.loads(paths.read_bytes(self.identity_path))
            if not isinstance(stored, dict):
                raise ValueError("no JSON object")
            return stored
        except NotRegular:
            raise
        except ValueError as error:
            if not paths.list_names(self.path("checkpoints")):
                return None
            raise ConfigError(
                f"name={self.name}; {self.identity_path} is damaged ({error}), so the config of its "
                "checkpoints is unknown; restore the file, or choose another name=."
            ) from error

    def create(self, config: Config) -> None:
        """Create the folder, or write the latest config into an existing one.

        Call it after `open_run`, on one process only.
        """
        paths.make_dirs(self.path())
        if self.stored_identity() is None:
            self.write_identity(config)
        self.put_aside_unreadable_result()
        paths.write_text_atomic(self.config_path, config_yaml(config))

    def write_identity(self, config: Config) -> None:
        """Have the folder belong to this config."""
        text = json.dumps(identity(config), default=str, indent=1, sort_keys=True) + "\n"
        for _ in range(WRITES):
            paths.write_text_atomic(self.identity_path, text)
            if paths.read_text(self.identity_path) == text:
                break

    def finished(self) -> dict[str, Any] | None:
        """Return the result if the run is complete, else None; an unreadable one counts as none."""
        result = self._stored_result()
        return result if isinstance(result, dict) and result.get("status") == "finished" else None

    @contextmanager
    def reading_result(self) -> Iterator[None]:
        """Turn errors from reading a malformed stored result inside this context into a ConfigError.

        Raises:
            ConfigError: a value is missing or has another type than a run writes.
        """
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.path(RESULT)}; it holds a value that no run writes ({type(error).__name__}: {error}); remove "
                "it, and the run resumes from its last checkpoint."
            ) from error

    def put_aside_unreadable_result(self) -> None:
        """Move an unreadable result.json aside and log a warning; `create` calls it."""
        path = self.path(RESULT)
        if paths.exists(path) and not isinstance(self._stored_result(), dict):
            aside = put_aside(path, paths.read_bytes(path))
            paths.remove_tree(path)
            log.warning("%s cannot be read; moved to %s, and the run resumes from its last checkpoint", path, aside)

    def _stored_result(self) -> Any:
        """Return the content of result.json; None if it is missing or unreadable."""
        try:
            return strict_json.loads(paths.read_bytes(self.path(RESULT)))
        except NotRegular:
            raise
        except (FileNotFoundError, ValueError):
            return None


def config_yaml(config: Config) -> str:
    """Return the resolved config as YAML, with secrets redacted and a literal `${` escaped."""
    return OmegaConf.to_yaml(OmegaConf.create(_literal(redacted(asdict(config)))))


def _literal(value: Any) -> Any:
    """Escape what OmegaConf would read as an interpolation: a resolved config has none."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def with_settings_of_run(config: Config) -> Config:
    """Return the config with open settings filled in from the run that it continues, if there is one.

    These are the rows and labels that the config leaves open and, with `tuned=auto`, the tuned speed settings that
    belong to the run's identity and that the command does not set.

    Raises:
        ConfigError: the identity of that run is damaged, or has a setting of a wrong kind.
    """
    assert config.name is not None, "to_config names the run"
    has_open_labels = config.objective.reads_labels and config.objective.known_labels() is None
    may_differ = is_open(config) or config.tuned == "auto" or has_open_labels
    stored = RunFolder.of(config).stored_identity() if may_differ else None
    if stored is None:
        return config
    if config.tuned == "auto":
        changed = {key: stored[key] for key in KEPT if key in stored and stored[key] != value_of(config, key)}
        for key, value in changed.items():
            why = setting_problem(key, value, taken=KEPT)
            if why is not None:
                raise ConfigError(
                    f"name={config.name}; {RunFolder.of(config).identity_path}: {why}; restore the file, or choose "
                    "another name=."
                )
        config = with_values(config, {key: changed[key] for key in changed.keys() - given(config)} if changed else {})
    found = {key: stored.get(f"trainer.{key}") for key in OPEN if getattr(config.trainer, key) in (None, AUTO)}
    labels = stored.get("objective.labels")
    if has_open_labels and isinstance(labels, list):
        config = with_values(config, {"objective.labels": [str(label) for label in labels]})
    taken: dict[str, Any] = {key: value for key, value in found.items() if isinstance(value, int) and value > 0}
    return replace(config, trainer=replace(config.trainer, **taken))


def with_earlier_name(config: Config, *, earlier: str | None) -> Config:
    """Return the config under the `earlier` name of its run, if there is a run of that name on the same model."""
    if earlier is None:
        return config
    stored = RunFolder(config.output_dir, earlier).stored_identity()
    is_same = stored is not None and stored.get("model.path") == config.model.path
    return replace(config, name=earlier) if is_same else config


def has_begun(config: Config) -> bool:
    """Return whether the run of this config has a folder with an identity.

    Raises:
        ConfigError: the identity is damaged.
    """
    return RunFolder.of(config).stored_identity() is not None


def open_run(config: Config, *, may_lengthen: bool = False) -> RunFolder:
    """Return the folder of this run after checking that it is new or was made by the same config.

    Args:
        may_lengthen: one that differs in the lengths of its stages alone is taken too (`has_other_length`).

    Raises:
        ConfigError: the folder belongs to another config, is no run folder, or has symbolic links in it.
    """
    folder = RunFolder.of(config)
    paths.require_no_links(folder.path(), key=f"name={config.name}")
    if folder.exists():
        stored = folder.stored_identity()
        if stored is not None and not (may_lengthen and is_of_other_length(stored, config)):
            require_same(stored, config, folder=folder.path())
    elif _holds_files(folder):
        raise ConfigError(
            f"name={config.name}; {folder.path()} exists and is not a run folder "
            "(it has no identity.json); choose another name=."
        )
    return folder


def has_other_length(folder: RunFolder, config: Config) -> bool:
    """Whether the folder was made by this config but for the lengths and schedules of its stages.

    Raises:
        ConfigError: its identity is damaged.
    """
    stored = folder.stored_identity()
    return stored is not None and is_of_other_length(stored, config)


def _holds_files(folder: RunFolder) -> bool:
    """Return whether the folder has files other than hidden ones.

    A start that is killed in `create` leaves a temporary file with a leading dot.
    """
    try:
        return any(not name.startswith(".") for name in paths.list_names(folder.path()))
    except NotADirectoryError:
        return True
