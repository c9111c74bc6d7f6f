"""A path or URL that would be read or written somewhere else than it says is refused with the config."""

import copy
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from tests.config.composing import composed, refusal
from tpu_experiments.config.checks import check
from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import GROUPS, Config

REPOSITORY = Path(__file__).parents[2]
FOLDER_KEYS = (
    "output_dir", "prepare.folder", "data.sample_text.path", "data.sample_text.sample_path", "model.path",
    "model.tokenizer_path", "model.chat_template_path", "hw.compile_cache",
)  # fmt: skip
TASK_KEYS = {
    "generate": ("run", "adapter", "base", "prompts_file", "output"),
    "evaluate": ("run", "adapter", "documents"),
    "doctor": ("json",),
    "plan": ("compiled_folder", "libtpu"),
}
BAD = {
    "gs://": "the bucket's name is missing after gs:// (is a variable empty?); write gs://bucket/folder.",
    "gcs://": "the bucket's name is missing",
    "gs:///x": "the bucket's name is missing",
    "gs:////x": "the bucket's name is missing",
    "gs:/x": "it is neither a URL nor a usual path; a URL begins with gs://",
    "gs:x": "it is neither a URL nor a usual path",
    "foo:/x": "it is neither a URL nor a usual path",
    "gs://bucket//x": "there is an empty name between two slashes (is a variable empty?)",
    "gs://bucket/a//x": "there is an empty name between two slashes",
    "gs://bucket/../x": "a bucket has no . and no ..",
    "gs://b/x": "'b' is no name of a bucket",
    "gs://My_Bucket/x": "'My_Bucket' is no name of a bucket",
    "foo://x": "there is no storage foo://; supported: a local path or gs://bucket/folder.",
    "GS://bucket/x": "there is no storage GS://",
    "https://host/x": "https:// is for reading data only",
    "s3://bucket/x": "was not tried with s3://; write a local path or gs://bucket/folder, and copy it afterwards.",
    "az://box/x": "runs are kept on a disk or in gs:// alone",
    "file://": "it names nothing after file://",
    "": "it is empty",
    " ": "it is empty",
    "a\0b": "it holds the control character '\\x00'",
    "a\nb": "it holds the control character '\\n'",
    "x" * 256: "one of its names has 256 bytes and a disk takes 255",
    "ț" * 128: "one of its names has 256 bytes",
    "x/" * 2100: "Linux takes 4095",
    "a\udcffb": "it is not UTF-8",
    "~/runs": "~ is not replaced here",
}
GOOD = (
    "outputs", ".", "..", "/tmp/x", "a b", "gs://bkt", "gs://bkt/", "gs://bkt/runs/a", "gcs://my-bucket.example.com/x",
    "memory://runs", "file:///tmp/x", "x:y", "C", "a//b", "runs/2026-01-01T00:00", "ț" * 127,
)  # fmt: skip


@pytest.fixture(scope="module")
def config() -> Config:
    return composed()


def with_place(config: Config, key: str, value: str) -> Config:
    """The config with another value of a dotted key; the command line's own quoting is no matter here."""
    changed = copy.deepcopy(config)
    *parents, name = key.split(".")
    node = changed
    for parent in parents:
        node = node[parent] if isinstance(node, dict) else getattr(node, parent)
    setattr(node, name, value)
    return changed


def refused(config: Config, key: str, value: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        check(with_place(config, key, value))
    return str(refusal.value)


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:24])
@pytest.mark.parametrize("key", ["output_dir", "prepare.folder"])
def test_a_place_that_is_not_what_it_says_is_refused(config: Config, key: str, value: str) -> None:
    message = refused(config, key, value)
    assert message.startswith(f"{key}=")
    assert BAD[value] in message
    assert message.count("\n") == 0


@pytest.mark.parametrize("value", GOOD)
def test_every_usual_place_is_taken(config: Config, value: str) -> None:
    check(with_place(with_place(config, "output_dir", value), "prepare.folder", value))


@pytest.mark.parametrize("value", ["gs://", "gs:/x", "gs:///x", "foo://x", "a\0b", "", "x" * 300])
@pytest.mark.parametrize("key", FOLDER_KEYS)
def test_every_key_of_a_place_is_checked(config: Config, key: str, value: str) -> None:
    assert refused(config, key, value).startswith(f"{key}=")


@pytest.mark.parametrize(("task", "key"), [(task, key) for task, keys in TASK_KEYS.items() for key in keys])
def test_every_key_of_a_task_is_checked(task: str, key: str) -> None:
    config = composed(f"task={task}")
    for value in ("gs://", "gs:/x", "foo://x", ""):
        assert f"task.{key}=" in refused(config, f"task.{key}", value)


def test_the_runs_of_a_report_are_checked_one_by_one() -> None:
    assert "task.runs=gs://; the bucket's name" in refusal("task=report", "task.runs=[outputs/a,'gs://']")


def test_data_may_come_from_the_web_and_a_model_may_not() -> None:
    composed("data.sample_text.path=https://host/a//b.jsonl", "data.sample_chat.path='gs://bkt/*/x.jsonl'")
    assert "a model is not read from a URL" in refusal("model.path=gs://bkt/model")


def test_no_key_of_the_schema_that_is_a_place_was_forgotten() -> None:
    """By its name or its words: a new key of a file or folder has to be made with `place`."""
    kinds: list[type] = [Config, DataSourceConfig, *(kind for group in GROUPS.values() for kind in group.values())]
    seen, forgotten = set[type](), []
    while kinds:
        kind = kinds.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for spec in fields(kind):
            if isinstance(spec.default_factory, type) and is_dataclass(spec.default_factory):
                kinds.append(spec.default_factory)
            is_named = any(word in spec.name for word in ("path", "folder", "_dir", "file", "cache"))
            if is_named and spec.type in (str, "str", str | None) and "place" not in spec.metadata:
                forgotten.append(f"{kind.__name__}.{spec.name}")
    assert not forgotten


def test_a_name_too_long_for_a_folder_is_refused() -> None:
    assert "it has 201 letters; use at most 200" in refusal(f"name={'x' * 201}")


def test_the_command_ends_with_2_and_nothing_is_made(tmp_path: Path) -> None:
    for argument in ("output_dir=gs://", "+plan=foo://x", "+plan=gs:/x"):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", str(REPOSITORY / "run.py"), argument],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        errors = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
        assert done.returncode == 2, done.stderr
        assert len(errors) == 1, done.stderr
        assert errors[0].startswith(f"error: {argument}; "), done.stderr
        assert not any(line.endswith("| torch") for line in done.stderr.splitlines())
        assert not list(tmp_path.iterdir())
