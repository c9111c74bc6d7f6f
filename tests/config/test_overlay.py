"""`+plan=FILE`: what an overlay may hold, and what is refused."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml

from tests.config.composing import composed, refusal
from tpu_experiments.command_line import with_plan_overlay
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.overlay import overlay_file, override_of, with_overlay
from tpu_experiments.config.schema import GROUPS, Config
from tpu_experiments.config.trust import search_keys
from tpu_experiments.config.tuned import SPEED


def test_an_overlay_stands_before_the_arguments_and_under_them() -> None:
    text = "sharding: fsdp\ntrainer.micro_batch_rows: 4\nmodel.remat: layer_inputs\n"
    laid = with_overlay(["hw=v6e8", "+plan=best.yaml", "sharding=replicated"], text=text, file="best.yaml")
    assert laid == ["trainer.micro_batch_rows=4", "model.remat=layer_inputs", "hw=v6e8", "sharding=replicated"]
    assert overlay_file(["task=plan", "hw=v6e8"]) is None
    assert overlay_file(["plan='a b.yaml'"]) == "a b.yaml"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "null"),
        (True, "true"),
        (1e-4, "0.0001"),
        (["a", 1], "[a,1]"),
        ("a, b", '"a, b"'),
        ({"x": 1}, "{x:1}"),
    ],
)
def test_values_are_written_as_hydra_reads_them(value: object, written: str) -> None:
    assert override_of("key", value) == f"key={written}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it holds no overrides"),
        ("- a\n", "it holds no overrides"),
        ("a: [", "it is not YAML"),
        (
            '{"method": "compiled", "model": "tiny"}',
            "it sets 'method', and such a file may set only trainer.",
        ),
    ],
)
def test_what_is_no_overlay_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        with_plan_overlay([f"+plan={file}"])
    assert str(caught.value).startswith(f"+plan={file}; {words}")
    assert "task=plan task.explore=search" in str(caught.value)


def test_a_missing_overlay_and_two_of_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\+plan=nowhere.yaml; there is no such file"):
        with_plan_overlay(["+plan=nowhere.yaml"])
    with pytest.raises(ConfigError, match=r"one overlay can be laid under a run"):
        with_plan_overlay(["+plan=a.yaml", "+plan=b.yaml"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer.seq_len: !!python/object/apply:os.system ['touch {tmp}/ran']", "YAML tags are not taken"),
        ("trainer.seq_len: !mine 3", "YAML tags are not taken"),
        ("name: 2020-02-31", "it is not YAML (day is out of range"),
        ("name: !!bool x", "it is not YAML ('x')"),
        ("name: !!timestamp x", "it is not YAML ("),
        ("name: !!int ''", "it is not YAML (string index"),
        ("sharding: ${{oc.env:HOME}}", "sharding='${oc.env:HOME}' is no name of a file in conf/sharding"),
        ("sharding: ../../../elsewhere", "sharding='../../../elsewhere' is no name of a file in conf/sharding"),
        ("sharding: /etc/passwd", "sharding='/etc/passwd' is no name"),
        ("sharding: [fsdp, replicated]", "sharding=['fsdp', 'replicated'] is no name"),
        ("model.remat: '${{oc.env:HOME}}'", "model.remat=${oc.env:HOME}; it is not a choice."),
        ("model.remat: [none]", "model.remat=['none'] is not of type str"),
        ("model.stack_group: true", "model.stack_group=True is not of type int"),
        ("model.stack_group: 0", "model.stack_group=0; it must be at least 1"),
        ("hw.attention_block: 1.5", "hw.attention_block=1.5 is not of type int"),
        ("trainer.micro_batch_rows: {{a: 1}}", "trainer.micro_batch_rows={'a': 1} is not of type"),
        ("model.remat=none model.remote_code: run", "it sets 'model.remat=none model.remote_code'"),
        ("~model: null", "it sets '~model'"),
        ("++hydra.run.dir: /tmp/x", "it sets '++hydra.run.dir'"),
        ("trainer: {{micro_batch_rows: 1}}", "it sets 'trainer'"),
        ("sharding@model: fsdp", "it sets 'sharding@model'"),
    ],
)
def test_an_overlay_runs_nothing_and_reads_no_environment(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    file.write_text(text.format(tmp=tmp_path))
    with pytest.raises(ConfigError) as caught:
        with_plan_overlay([f"+plan={file}"])
    assert str(caught.value).startswith(f"+plan={file}; {words}")
    assert [path.name for path in tmp_path.iterdir()] == ["best.yaml"]


def keys_of_the_schema(kind: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every key and group of a config, of all schemas that a group has."""
    for name, hint in get_type_hints(kind).items():
        key = f"{prefix}{name}"
        yield key
        of_values = get_args(hint)[-1:] if get_origin(hint) is dict else ()
        kinds = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each) and each not in of_values]
        for each in [*kinds, *(GROUPS.get(key, {}).values() if not prefix else ())]:
            yield from keys_of_the_schema(each, f"{key}.")
        for each in filter(dataclasses.is_dataclass, of_values):
            yield from keys_of_the_schema(each, f"{key}.x.")


ALL_KEYS = sorted(set(keys_of_the_schema()))


def test_an_overlay_sets_what_a_search_varies_and_no_other_key() -> None:
    """Each key of the schema: `model.remote_code`, `plugins`, `trainer._target_`, `output_dir` and 380 more."""
    taken = [key for key in ALL_KEYS if "may set only" not in said_of(f"{key}: null")]
    assert sorted(taken) == sorted(search_keys()) == sorted((*SPEED, "rollout.prompts"))
    assert len(ALL_KEYS) > 380
    assert {"model.remote_code", "plugins", "trainer._target_", "output_dir", "data.x.path", "hw.env"} < set(ALL_KEYS)


def said_of(text: str) -> str:
    try:
        with_overlay(["+plan=x"], text=text, file="x")
    except ConfigError as error:
        return str(error)
    return ""


def test_what_the_command_says_itself_is_not_taken_from_the_overlay() -> None:
    text = "model.attention: eager\nsharding: fsdp\n"
    with pytest.raises(ConfigError, match=r"it sets 'model.attention'"):
        with_overlay(["+plan=x"], text=text, file="x")
    assert with_overlay(["+plan=x", "model.attention=sdpa"], text=text, file="x") == [
        "sharding=fsdp",
        "model.attention=sdpa",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"trainer.micro_batch_rows": [1, 2, 4, 8, 16, 32, 64]},
        {"sharding": ["fsdp", "replicated", "hsdp"], "model.stack": ["scanned", "unrolled"]},
        {"model.remat": ["none", "save_dots"], "model.stack_group": [1, 6]},
        {"hw.fusion_memory_mib": [None, 64], "trainer.loss_chunk_tokens": [None, 512], "hw.attention_block": [256]},
    ],
)
def test_what_a_search_writes_is_taken(values: dict[str, list[Any]]) -> None:
    for key, each in values.items():
        for value in each:
            laid = with_overlay(["+plan=x"], text=yaml.safe_dump({key: value}), file="x")
            assert laid == [override_of(key, value)]


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("data.sample_text.fields={text: body}", {"text": "body"}),
        ("data.sample_text.fields.text=body", {"text": "body"}),
        ("+data.sample_text.fields.text=body", {"text": "body"}),
        ("++data.sample_text.fields={text: body, id: number}", {"text": "body", "id": "number"}),
    ],
)
def test_fields_are_renamed_from_the_command_line(override: str, found: dict[str, str]) -> None:
    assert composed("data=sample_text", override).data["sample_text"].fields == found


def test_questions_are_named_from_the_command_line() -> None:
    asked = composed("data=sample_chat", "data.sample_chat.questions={asked: questions.jsonl}").data["sample_chat"]
    assert asked.questions == {"asked": "questions.jsonl"}


def test_a_mapping_of_a_source_that_is_not_selected_is_refused_by_name() -> None:
    said = refusal("data=sample_text", "data.sampl_text.fields.text=body")
    assert said.startswith("data.sampl_text.fields.text=body; sampl_text is not selected. Did you mean 'sample_text'?")


def test_what_is_no_mapping_is_refused() -> None:
    said = refusal("data=sample_text", "data.sample_text.fields=3")
    assert said.endswith("it must be a mapping; write 'data.sample_text.fields={NAME: VALUE}'.")


def test_many_sources_make_a_name_that_a_folder_can_have(tmp_path: Path) -> None:
    names = [f"conversations_{i:02d}" for i in range(29)]
    (tmp_path / "data").mkdir()
    for name in [*names, "other"]:
        (tmp_path / "data" / f"{name}.yaml").write_text(f"{name}: {{path: {name}.jsonl, kind: chat}}\n")

    def default_name(*sources: str) -> str:
        found = composed(f"hydra.searchpath=[file://{tmp_path}]", f"data=[{','.join(sources)}]").name
        assert found is not None
        return found

    made = default_name(*names)
    assert made.startswith("tiny_conversations_00_and_28_more_")
    assert len(made.encode()) <= 200
    assert default_name(*names) == made
    assert default_name(*names[:-1], "other") != made
    assert default_name(*names[:2]) == "tiny_conversations_00_conversations_01_cpu"


@pytest.mark.parametrize("override", ["data.sample_text.keep.kind=[a,b]", "data.sample_text.keep={kind: [a, b]}"])
def test_kept_values_are_named_from_the_command_line(override: str) -> None:
    assert composed("data=sample_text", override).data["sample_text"].keep == {"kind": ["a", "b"]}


def test_a_field_without_values_keeps_nothing_and_is_refused() -> None:
    said = refusal("data=sample_text", "data.sample_text.keep.kind=[]")
    assert said == "data.sample_text.keep.kind=[]; name at least one value, each a text, a number, true or false."
    assert "it must be a list" in refusal("data=sample_text", "data.sample_text.keep.kind=a")
