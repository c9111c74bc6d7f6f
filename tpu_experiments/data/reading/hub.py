"""Rows of a data set on the Hugging Face Hub, streamed."""

from collections.abc import Iterator

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import SourceSpec
from tpu_experiments.data.reading.raw_rows import RawRow


def read_hub(spec: SourceSpec) -> Iterator[RawRow]:
    """Rows of `spec.hub_split`, in order, numbered from 1.

    Raises:
        ConfigError: the Hub is out of reach, or has no such data set, configuration or split.
    """
    number, name = 0, spec.path if spec.hub_split == "train" else f"{spec.path} {spec.hub_split}"
    try:
        import datasets  # seconds to import, and most runs read local files

        stream = datasets.load_dataset(
            spec.path,
            spec.hub_config,
            split=spec.hub_split,
            revision=spec.revision,
            streaming=True,
        )
        for fields in stream:
            number += 1
            yield RawRow(dict(fields), name, "row", number)
    except Exception as error:  # datasets, the Hub client and httpx raise a dozen unrelated types
        raise _out_of_reach(error, spec=spec, num_rows=number) from error


def fingerprint_of_hub(spec: SourceSpec) -> str:
    """The commit that `spec.revision` (or the newest) is now.

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
