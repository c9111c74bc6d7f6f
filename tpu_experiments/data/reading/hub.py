"""Rows of a data set on the Hugging Face Hub, streamed.

Sets of JSON files are read by this package's readers through huggingface_hub's file system: `datasets` loads a file
that is one array as a whole, in some 11 times its size. Other sets are streamed by `datasets`.
"""

from collections.abc import Generator
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Refused, SourceSpec
from tpu_experiments.data.reading.locations import JSON_SUFFIXES, SourceFile, suffixes_of
from tpu_experiments.data.reading.raw_rows import RawRow


class HubRows:
    """A split of a Hub data set: its files where they are JSON, else one stream of rows.

    Raises:
        ConfigError: the Hub is out of reach, or has no such data set or configuration.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        try:
            import datasets  # seconds to import, and most runs read local files

            self._builder = datasets.load_dataset_builder(spec.path, spec.hub_config, revision=spec.revision)
            self.files = _json_files(self._builder, spec=spec)
            """Empty where `datasets` streams the set."""
        except Exception as error:  # datasets, the Hub client and httpx raise a dozen unrelated types
            raise _out_of_reach(error, spec=spec, num_rows=0) from error

    def stream(self) -> Generator[RawRow | Refused]:
        """Yield rows streamed by `datasets`, in order, numbered from 1.

        Raises:
            ConfigError: there is no such split, or the Hub is out of reach.
        """
        spec, number = self._spec, 0
        name = spec.path if spec.hub_split == "train" else f"{spec.path} {spec.hub_split}"
        try:
            for fields in self._builder.as_streaming_dataset(split=spec.hub_split):
                number += 1
                yield RawRow(dict(fields), name, "row", number)
        except Exception as error:  # datasets, the Hub client and httpx raise a dozen unrelated types
            raise _out_of_reach(error, spec=spec, num_rows=number) from error


def _json_files(builder: Any, *, spec: SourceSpec) -> list[SourceFile]:
    """Return the files of the split if all are JSON in a layout that `read_raw` supports, else none."""
    from datasets.packaged_modules.json.json import Json

    if not isinstance(builder, Json) or builder.config.field is not None:
        return []
    urls = [str(url) for url in (builder.config.data_files or {}).get(spec.hub_split, [])]
    root = f"hf://datasets/{spec.path}@"
    if not all(url.startswith(root) and suffixes_of(url)[0] in JSON_SUFFIXES for url in urls):
        return []  # archives, addresses elsewhere
    return [SourceFile(url.removeprefix(root).partition("/")[2], url) for url in urls]


def fingerprint_of_hub(spec: SourceSpec) -> str:
    """Return the commit that `spec.revision` (or the newest) resolves to.

    Raises:
        ConfigError: the Hub is out of reach, or has no such data set or revision.
    """
    from huggingface_hub import HfApi  # a second to import, and most runs read local files

    try:
        return str(HfApi().dataset_info(spec.path, revision=spec.revision).sha)
    except Exception as error:  # the Hub client and httpx raise a dozen unrelated types
        raise _out_of_reach(error, spec=spec, num_rows=0) from error


def _out_of_reach(error: Exception, *, spec: SourceSpec, num_rows: int) -> ConfigError:
    complaint = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return ConfigError(
        f"{spec.key}; no such local file or folder, and the Hub gave no data set of that name "
        f"(hub_config={spec.hub_config}, hub_split={spec.hub_split}, revision={spec.revision}) "
        f"after {num_rows} rows: {type(error).__name__}: {complaint}; correct the name, or "
        f"download the data and point data.{spec.name}.path= at its folder."
    )
