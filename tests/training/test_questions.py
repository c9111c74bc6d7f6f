"""Questions are read and refused by one sentence, asked for the likeliest tokens, and scored by exact match."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.training.tiny import built
from tpu_experiments.config.checks import check
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import identity
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.training.batches import RunInputs, expected_programs, load_run_tokenizer, program_shapes
from tpu_experiments.training.cached_sampler import CachedSampler, Lengths, Writer, lengths_of
from tpu_experiments.training.evaluation import Sampler
from tpu_experiments.training.merged import MergedCopy
from tpu_experiments.training.questions import Question, ask, first_sentence, read_questions, scored, skill_fields

READER = ("model=reader", "data=stories_ro", "curriculum=single", "sample.window=64", "hw.runtime=eager")


def row(question="Ce bea Ana?", answer="Ana bea ceai."):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def read(make_config, path, *overrides):
    config = make_config(*READER, f"+data.stories_ro.questions.a='{path}'", *overrides)
    check(config)
    return read_questions(config, tokenizer=load_run_tokenizer(config))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" Ana bea ceai. Ana bea", "Ana bea ceai."),
        ("Ana bea ceai", "Ana bea ceai"),
        ("Are 3.5 lei! Da.", "Are 3.5 lei!"),
        ("", ""),
    ],
)
def test_the_first_sentence_ends_at_a_mark_before_a_blank(text, sentence):
    assert first_sentence(text) == sentence


def test_reasoning_is_no_part_of_an_answer():
    questions = [
        Question("?", expected, [], 4) for expected in ("Ana bea ceai.", "<think>\nCe?\n</think>\n\nAna bea ceai.")
    ]
    for written in ("<think>\n\n</think>\n\nAna bea ceai.", "Știu.\n</think>\n\nAna bea ceai.", "Ana bea ceai."):
        record = scored(questions, [written, written])
        assert (record.right, record.whole) == (2, 2)
    assert scored(questions, ["<think>\nAna bea ceai.\n</think>\n\nNu."] * 2).right == 0


def test_right_by_the_first_sentence_and_whole_by_all_of_it():
    questions = [Question("Ce bea Ana?", "Ana bea ceai.", [1], 5)] * 4
    record = scored(questions, ["Ana bea ceai.", "Ana bea ceai. Ana", "Ana bea apă.", ""])
    assert (record.asked, record.right, record.whole, len(record.shown)) == (4, 2, 1, 3)


def test_the_skill_is_that_of_the_first_set():
    questions = [Question("Ce bea Ana?", "Ana bea ceai.", [1], 5)]
    before = {name: scored(questions, ["Ana bea."]) for name in ("a", "b")}
    after = {"a": scored(questions, ["Ana bea ceai."]), "b": scored(questions, ["Nu."])}
    skill = skill_fields({"a": questions, "b": questions}, before=before, after=after)
    assert [skill[key] for key in ("before", "after", "asked")] == [0, 1, 1]
    assert skill["sets"]["b"] == {"before": 0, "after": 0, "asked": 1, "whole_before": 0, "whole_after": 0}
    assert skill["examples"][0]["before"] == "Ana bea."
    assert skill_fields({}, before={}, after={}) is None


def test_a_question_is_rendered_up_to_its_answer(make_config, tmp_path):
    (tmp_path / "a.jsonl").write_text(row())
    (question,) = read(make_config, tmp_path / "a.jsonl")["a"]
    assert (question.prompt, question.expected) == ("Ce bea Ana?", "Ana bea ceai.")
    assert question.num_new == 6  # Ana, bea, ceai, the full stop, </s> and one that shows whether more follows
    assert len(question.ids) == 6  # <s>, Ce, bea, Ana, the question mark, the line's end


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no such file"),
        ("", "it is empty: 0 questions were read"),
        (row() + "{", "line 2 of"),
        (row() + '{"messages": [{"role": "assistant", "content": "Da."}]}', "line 2 of"),
        (row() + '{"text": "Da."}', "line 2 of"),
        (row() + row(question="Ana " * 60), "line 2 has 69 tokens with its answer, and sample.window=64"),
        (b"\xff", "it is not UTF-8"),
    ],
)
def test_what_is_no_set_of_questions_is_refused(make_config, tmp_path, content, sentence):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refused:
        read(make_config, path)
    assert f"data.stories_ro.questions.a={path}; " in str(refused.value)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([f"+data.stories_ro.questions.{'a' * 41}=x.jsonl"], f"{'a' * 41!r} is no name of a set"),
        (["+data.stories_ro.questions.a=''"], "data.stories_ro.questions.a=; it is empty"),
        (
            ["data=[stories_ro,sample_chat]", "+data.sample_chat.questions.one_person=x.jsonl"],
            "data.sample_chat.questions.one_person; another source has a set of this name",
        ),
    ],
)
def test_a_set_has_a_name_and_a_place(make_config, overrides, sentence):
    with pytest.raises(ConfigError) as refused:
        check(make_config(*READER, *overrides))
    assert sentence in str(refused.value)


def test_a_run_without_questions_is_what_it_was(make_config):
    config = make_config()
    assert config.questions == {}
    assert not [key for key in identity(config) if "questions" in key]
    asking = identity(make_config(*READER))
    assert [key for key in asking if "questions" in key] == [
        "data.stories_ro.questions.one_person",
        "data.stories_ro.questions.several_persons",
    ]


def test_the_shipped_base_is_asked_before_training(make_config):
    config = make_config(*READER)
    tokenizer = load_run_tokenizer(config)
    questions = {name: each[:20] for name, each in read_questions(config, tokenizer=tokenizer).items()}
    runtime = make_runtime(config)
    model = built(config, runtime)
    parts = {"tokenizer": tokenizer, "settings": replace(config.sample, temperature=0.0), "seed": 0}
    writer = Writer(partial(MergedCopy, model, lora=config.lora, runtime=runtime), runtime=runtime, is_drawn=False)
    cached = CachedSampler(writer, **parts)
    passes = Sampler(model.module, runtime=runtime, parameters=model.trainable, **parts)
    random = torch.Generator().manual_seed(0)
    answers = []
    for _ in range(2):
        found = ask(cached, questions)  # 40, in two batches
        assert {name: record.asked for name, record in found.items()} == {"one_person": 20, "several_persons": 20}
        assert all(0 <= record.whole <= record.right <= 20 for record in found.values())
        shown = [answer for record in found.values() for answer in record.shown]
        prompts = [question.ids for each in questions.values() for question in each]
        answers.append(cached.write(prompts, max_new_tokens=8, rows=32))
        assert answers[-1] == passes.write(prompts, max_new_tokens=8, rows=32)
        assert answers[1:] or all(first_sentence(answer).endswith(".") for answer in shown), "it answers in sentences"
        for tensor in model.trainable.values():
            tensor += torch.randn(tensor.shape, generator=random) * 0.02
    assert answers[0] != answers[1], "the adapters are in the copy"


@pytest.mark.parametrize(("overrides", "shapes"), [(READER, {(32, 64)}), ((), set())])
def test_questions_are_one_program_of_passes(make_config, overrides, shapes):
    config = make_config(*overrides, "hw.runtime=xla")
    inputs = RunInputs(None, {}, resolve_stages(config))
    assert program_shapes(inputs, config, world_size=1)["ask"] == shapes


@pytest.mark.parametrize(("words", "merge"), [((), "merge"), (("optim.ema=0.9",), "merge averages")])
def test_with_a_cache_questions_and_samples_are_three_programs(make_config, words, merge):
    config = make_config(*READER, "hw.runtime=xla", "sample.max_new_tokens=12", *words)
    inputs = RunInputs(None, {}, resolve_stages(config), lengths=Lengths(56, 12))
    shapes = program_shapes(inputs, config, world_size=1)
    assert {name: shapes[name] for name in (merge, "read 56", "write 56")} == {
        merge: {()}, "read 56": {(32, 56)}, "write 56": {(32, 8)},
    }  # fmt: skip
    assert not {"sample", "ask"} & shapes.keys()
    assert expected_programs(inputs, config) == 5
    assert expected_programs(inputs, make_config(*READER)) == 0, "plain torch compiles nothing"


def test_lengths_are_those_of_the_longest_question_and_answer(make_config):
    config = make_config(*READER, "hw.runtime=xla", "sample.max_new_tokens=12")
    tokenizer = load_run_tokenizer(config)
    how = {"tokenizer": tokenizer, "kind": "chat"}
    assert lengths_of(config, questions=[(9, 30), (50, 4)], **how) == Lengths(56, 30)
    assert lengths_of(config, questions=[(3, 4)], **how).new == 12, "the sample's"
    silent = make_config(*READER, "hw.runtime=xla", "sample.max_new_tokens=0")
    assert lengths_of(silent, questions=[(3, 4)], **how) == Lengths(8, 4)
    assert lengths_of(silent, questions=[], **how) is None
    for words in (("hw.parallel=spmd", "hw.num_devices=4"), ("hw=v6e1",)):
        elsewhere = make_config(*READER, "hw.runtime=xla", *words)
        assert lengths_of(elsewhere, questions=[(3, 4)], **how) is None
