"""Prompts are what stands before the answers that training learns, and are split as its rows are."""

from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.preparing import REPOSITORY, all_rows, chat_source, write_lines
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.prepare import Preparation, prepare
from tpu_experiments.data.prompts import FILE, read_prompts
from tpu_experiments.data.tokens.chat import render
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.rewards.functions import number


@pytest.fixture(scope="module")
def tokenizer():
    folder = REPOSITORY / "tpu_experiments" / "samples" / "tokenizer"
    return load_tokenizer(str(folder), revision=None, chat_template_path=None)


def turns(*contents):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def asked(numbers):
    return [{"messages": turns(f"Cât face {n} ori doi?", f"{2 * n}.")} for n in numbers]


@pytest.fixture
def read(make_config, tokenizer, tmp_path):
    """Read the prompts of files by their sources' names, with rows of 96 tokens and answers of at most 16."""
    words = ("curriculum=single", "prepare.packing=pad", "prepare.long_documents=drop")
    base = make_config("trainer.seq_len=96", "rollout.max_new_tokens=16", *words)

    def read(*files, readers=None, sources=None, source=None, seq_len=None, **rollout):
        data = {path.stem: chat_source(path, **(source or {})) for path in files}
        config = replace(base, data=data, rollout=replace(base.rollout, **rollout))
        folder = str(tmp_path / "prepared")
        preparation = Preparation(config.prepare, folder, tokenizer, readers or {}, needs_answers=False)
        return read_prompts(config, preparation=preparation, sources=sources, seq_len=seq_len), config, preparation

    return read


def test_a_prompt_is_what_the_template_asks_an_answer_with(read, tokenizer, tmp_path):
    rows = [{"messages": turns("Bună!", "Salut!", f"Ce faci, {name}?", "Bine."), "level": 3} for name in "ABCDEFGHIJ"]
    found, *_ = read(write_lines(tmp_path / "a.jsonl", rows))
    assert len(found.train) + len(found.held_out) == 10 - found.left_out.get("copies", 0)
    for prompt in found.train:
        messages = (("user", "Bună!"), ("assistant", "Salut!"), ("user", prompt.text))
        text = render(messages, tokenizer=tokenizer, ends_with="generation_prompt")
        assert prompt.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert prompt.row["answer"] == "Bine."
        assert prompt.row["level"] == 3
        assert len(prompt.row["messages"]) == 4


def test_they_are_the_beginnings_of_the_prepared_rows_of_their_split(read, tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", asked(range(80)))
    found, config, preparation = read(path, source={"eval_fraction": 0.3})
    source = prepare(config.data, data_size="full", seq_lens=[96], preparation=preparation)["a"]
    for split, prompts in (("train", found.train), ("evaluation", found.held_out)):
        rows = all_rows(source, split, 96)
        before = {tuple(ids[: learn.argmax()].tolist()) for ids, learn in zip(rows.ids_NT, rows.learn_NT, strict=True)}
        assert {tuple(prompt.ids) for prompt in prompts} == before
        assert len(prompts) == rows.num_rows > 10
    assert not {tuple(p.ids) for p in found.train} & {tuple(p.ids) for p in found.held_out}


def test_one_prompt_with_several_answers_is_there_once_and_on_one_side(read, tmp_path):
    rows = [
        {"messages": turns(f"Cât face {n} ori doi?", answer)} for n in range(40) for answer in ("Nu știu.", "Mult.")
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    by_turn, *_ = read(path)
    assert by_turn.left_out["copies"] >= len(by_turn.train)
    assert "held out too" not in by_turn.left_out
    by_row, *_ = read(path, source={"split_by": "document", "eval_fraction": 0.4})
    sides = [{p.text for p in each} for each in (by_row.train, by_row.held_out)]
    assert not sides[0] & sides[1]
    assert by_row.left_out["held out too"] > 0
    assert len(sides[0]) == len(by_row.train)


def test_a_row_without_an_answer_has_a_prompt_in_the_split_of_its_question(read, tmp_path):
    rows = asked(range(60))
    whole = write_lines(tmp_path / "whole.jsonl", rows)
    some = [row if n % 2 else {"messages": row["messages"][:1], "level": n} for n, row in enumerate(rows)]
    answered, *_ = read(whole)
    found, *_ = read(write_lines(tmp_path / "some.jsonl", some))
    for split in ("train", "held_out"):
        assert {p.text for p in getattr(found, split)} == {p.text for p in getattr(answered, split)}
    assert {"answer" in prompt.row for prompt in found.train} == {True, False}
    assert all(("answer" in prompt.row) != ("level" in prompt.row) for prompt in found.train)


def test_files_of_every_kind_give_the_same_prompts(read, tmp_path):
    rows = [{"question": f"Cât face {n} ori doi?", "answer": f"Doi ori {n}.\n#### {2 * n}"} for n in range(30)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines, *_ = read(write_lines(tmp_path / "a.jsonl", rows))
    table, *_ = read(tmp_path / "a.parquet")
    assert lines == table
    assert lines.train[0].row == rows[int(lines.train[0].text.split()[2])]


def test_a_special_token_in_a_question_is_plain_text(read, tokenizer, tmp_path):
    rows = [{"messages": turns(f"Ce este <|im_end|> numărul {n}?", "Nimic.")} for n in range(20)]
    found, *_ = read(write_lines(tmp_path / "a.jsonl", rows))
    (end,) = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    assert {prompt.ids.count(end) for prompt in found.train} == {1}
    assert "<|im_end|> numărul" in tokenizer.decode(found.train[0].ids)


def test_the_file_is_read_again_and_made_again_where_it_is_damaged(read, tmp_path, caplog):
    path = write_lines(tmp_path / "a.jsonl", asked(range(30)))
    first, *_ = read(path)
    (file,) = (tmp_path / "prepared").rglob(FILE)
    content, made = file.read_bytes(), file.stat().st_mtime_ns
    again, *_ = read(path)
    assert again == first
    assert file.stat().st_mtime_ns == made
    file.write_bytes(content.replace(b"ori doi", b"ori trei", 1))
    mended, *_ = read(path)
    assert mended == first
    assert file.read_bytes() == content
    assert "does not match the checksum" in caplog.text


def test_long_ones_are_counted_and_said_and_none_left_is_refused(read, tmp_path, caplog):
    rows = [*asked(range(30)), *({"messages": turns(f"Numărul {n} " * 60, "Da.")} for n in range(6))]
    path = write_lines(tmp_path / "a.jsonl", rows)
    caplog.set_level("INFO")
    found, *_ = read(path)
    assert found.left_out == {"of more than 80 tokens": 6}
    assert found.summary() in caplog.text
    longest = max(len(p.ids) for p in (*found.train, *found.held_out))
    assert f"the longest of {longest}; left out: 6 of more than 80 tokens" in found.summary()
    shorter, *_ = read(path, max_prompt_tokens=longest - 1)
    assert shorter.left_out[f"of more than {longest - 1} tokens"] > 6
    with pytest.raises(ConfigError, match=r"data=\[a\]; no prompt is left to train on \(\d+ of more than 4 tokens\)"):
        read(path, max_new_tokens=92)


def test_a_reader_of_the_users_own_has_rows_of_answers_alone(read, tmp_path):
    from tpu_experiments.data.documents import Document

    def documents(spec):
        for n in range(20):
            messages = (("user", f"Cât face {n} ori doi?"), ("assistant", str(2 * n)))
            yield Document(str(n), messages=messages, place=f"number {n}")

    found, *_ = read(tmp_path / "b", readers={"b": documents})
    assert found.train
    assert all(p.row == {"answer": str(2 * int(p.text.split()[2]))} for p in found.train)


def test_only_the_named_sources_are_read(read, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", asked(range(20)))
    other = write_lines(tmp_path / "b.jsonl", asked(range(100, 120)))
    found, *_ = read(path, other, sources=["b"])
    assert {int(p.text.split()[2]) >= 100 for p in found.train} == {True}


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("name", ["answer", "solution"])
def test_prompts_with_a_right_answer_beside_them_are_asked_as_trl_asks_them(read, tokenizer, tmp_path, name, is_chat):
    asked = [turns(f"{n}!", "Salut!", f"Cât face {n} ori doi?") if is_chat else f"Cât face {n}?" for n in range(40)]
    right = [str(n) if n % 2 else n for n in range(40)]
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": p, name: n} for p, n in zip(asked, right, strict=True)])
    fields = {} if name == "answer" else {"fields": {"answer": name}}
    found, config, preparation = read(path, source=fields)
    assert len(found.train) > 25
    for prompt in found.train:
        given = prompt.row["prompt"]
        messages = tuple((turn["role"], turn["content"]) for turn in given) if is_chat else (("user", given),)
        text = render(messages, tokenizer=tokenizer, ends_with="generation_prompt")
        assert prompt.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert str(prompt.row["answer"]) in prompt.text
    source = prepare(config.data, data_size="full", seq_lens=[96], preparation=preparation)["a"]
    assert not source.manifests[96]["not_read"], "the answer is read, by whatever name"
    rows = all_rows(source, "train", 96)
    assert rows.num_rows == len(found.train), "the answer is the reference"


def test_prompts_without_an_answer_say_where_one_is_named(read, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": f"Cât face {n}?", "solution": str(n)} for n in range(40)])
    _, config, preparation = read(path, source={"fields": {"answer": "solution"}})
    config = replace(config, data={"a": chat_source(path)})
    with pytest.raises(ConfigError, match=r"data\.a\.fields\.answer="):
        prepare(config.data, data_size="full", seq_lens=[96], preparation=preparation)
    with pytest.raises(ConfigError, match="no known format"):
        prepare(config.data, data_size="full", seq_lens=[96], preparation=replace(preparation, needs_answers=True))


@pytest.mark.parametrize("end", [[], [{"role": "assistant", "content": " "}]])
def test_a_question_at_the_end_is_asked_with_all_that_is_before_it(read, tokenizer, tmp_path, end):
    rows = [{"messages": turns("Cât face?", "Mult.", f"Cât, {n}?") + end} for n in range(20)]
    found, *_ = read(write_lines(tmp_path / "a.jsonl", rows), source={"split_by": "document", "eval_fraction": 0.2})
    assert len(found.train) > 10, "the same two turns before it make no copies of them"
    assert found.held_out
    for prompt in found.train:
        messages = tuple((turn["role"], turn["content"]) for turn in prompt.row["messages"][:3])
        text = render(messages, tokenizer=tokenizer, ends_with="generation_prompt")
        assert prompt.ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert prompt.text.startswith("Cât, ")
        assert "answer" not in prompt.row, "that of the first question is not the right one"


def test_the_sample_of_gsm8k_has_results_that_the_reward_reads(read):
    path = REPOSITORY / "tpu_experiments" / "samples" / "gsm8k.jsonl"
    found, *_ = read(path, seq_len=256)
    assert len(found.train) + len(found.held_out) > 20
    for prompt in found.train:
        assert prompt.row["question"] == prompt.text
        assert number(prompt.text, prompt.row["answer"], prompt.row) == 1
        assert number(prompt.text, prompt.row["answer"].rpartition("####")[0], prompt.row) == 1
