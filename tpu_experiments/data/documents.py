"""What a source yields, and the settled description of a source that a reader takes."""

import json
from dataclasses import dataclass

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import DataSourceConfig
from tpu_experiments.data.paths import find_local

FORMATS_OF_KIND = {
    "text": ("text",),
    "chat": ("messages", "alternating", "question_answer"),
}


@dataclass(frozen=True)
class Document:
    """One text, or one conversation as (role, content) pairs; exactly one of the two is set."""

    id: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.messages is None), "set text or messages, not both"

    @property
    def is_empty(self) -> bool:
        """Nothing to read: white space, or no turn. The caller drops and counts such documents."""
        return not self.messages and not (self.text or "").strip()

    @property
    def content(self) -> str:
        """All of the document but its id, for hashing."""
        return self.text if self.text is not None else json.dumps(self.messages)


@dataclass(frozen=True)
class SourceSpec:
    """One source with its path settled; what a reader (`data.<name>._target_`) takes."""

    name: str
    path: str
    hub_config: str | None = None
    hub_split: str = "train"
    revision: str | None = None
    kind: str = "text"
    format: str = "text"
    max_documents: int | None = None

    @property
    def key(self) -> str:
        """Start of every error sentence about this source."""
        return f"data.{self.name}.path={self.path}"


def spec_of(name: str, source: DataSourceConfig, *, data_size: str) -> SourceSpec:
    """Settle the path of a configured source; `data_size` is `full` or `sample`.

    Raises:
        ConfigError: a sample is asked for and there is none, or `kind` and `format` do not agree.
    """
    path = source.sample_path if data_size == "sample" else source.path
    if path is None:
        raise ConfigError(f"data_size=sample but data.{name}.sample_path is not set; set it, or use data_size=full.")
    if source.format not in FORMATS_OF_KIND[source.kind]:
        kind = next(k for k, formats in FORMATS_OF_KIND.items() if source.format in formats)
        raise ConfigError(
            f"data.{name}.format={source.format} with data.{name}.kind={source.kind}; that format "
            f"gives {kind} documents; set data.{name}.kind={kind} or another format."
        )
    return SourceSpec(
        name=name,
        path=str(find_local(path) or path),
        hub_config=source.hub_config,
        hub_split=source.hub_split,
        revision=source.revision,
        kind=source.kind,
        format=source.format,
        max_documents=source.max_documents,
    )


def no_document(spec: SourceSpec) -> ConfigError:
    """The error for a source without a single document."""
    return ConfigError(
        f"{spec.key}; it is empty: 0 documents were read; point data.{spec.name}.path= at a file with at least one row."
    )
