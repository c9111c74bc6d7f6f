"""Labels of texts: read from a field, found in the training split, one for each text of a packed row."""

import doctest
from dataclasses import replace

import numpy as np
import pytest

from tests.data.preparing import all_rows, chat_source, text_source, write_lines
from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.masking import LABEL
from tpu_experiments.data.held_out import held_out_documents
from tpu_experiments.data.prepare import Preparation, labels_of, prepare
from tpu_experiments.data.steps import labels as module
from tpu_experiments.data.steps.labels import LABELS, cut_texts, labels_of_training
from tpu_experiments.data.steps.pack import flatten
from tpu_experiments.data.store.shards import row_dtype, write_shard
from tpu_experiments.data.tokens.tokenize import LEARN, Tokens
from tpu_experiments.data.tokens.tokenizer import closing_texts, load_tokenizer, own_ends

SHIPPED = "tpu_experiments/samples/tokenizer"
NAMES = ("da", "nu")
SEQ_LEN = 32


@pytest.fixture(scope="module")
def closing():
    """The shipped tokenizer, which begins and closes a text as a classifier's does."""
    return closing_texts(load_tokenizer(SHIPPED, revision=None, chat_template_path=None))


def rows_of(*labels, count=60):
    """Rows of different texts, with these labels in turn."""
    return [{"text": f"Textul cu numărul {i}.", "kind": labels[i % len(labels)]} for i in range(count)]


def sources(path, rows, **values):
    return {"a": text_source(write_lines(path / "a.jsonl", rows), **{"label_field": "kind", **values})}


def settings(path, tokenizer, *, labels=None, **values):
    return Preparation(
        PrepareConfig(**values), str(path / "p"), tokenizer, {}, is_labelled=True, labels=labels, arrays=(LABELS,)
    )


def made(path, rows, tokenizer, *, labels=NAMES, seq_len=SEQ_LEN, prepare_settings=None, **values):
    preparation = settings(path, tokenizer, labels=labels, **(prepare_settings or {}))
    return prepare(sources(path, rows, **values), data_size="full", seq_lens=[seq_len], preparation=preparation)["a"]


def found(path, rows, tokenizer, **values):
    counts = labels_of(sources(path, rows, **values), data_size="full", preparation=settings(path, tokenizer))
    return labels_of_training(counts)


def test_the_example_is_right():
    assert doctest.testmod(module).attempted == 1
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["nu", "da"], ["da", "nu"]),
        ([10, 9, 2], ["2", "9", "10"]),
        (["10", 9], ["9", "10"]),
        ([True, False], ["false", "true"]),
        (["b", 1], ["1", "b"]),
    ],
)
def test_labels_of_the_training_split_are_found_and_sorted(tmp_path, closing, given, names):
    assert found(tmp_path, rows_of(*given), closing) == names


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"kind": 0.5}, r"the number 0\.5 \(kind\); a label is a string or an integer"),
        ({"kind": None}, r"its kind is null"),
        ({"kind": ""}, r"has no label: its kind is"),
        ({"kind": " "}, r"a label that is blank"),
        ({"kind": ["da"]}, r"no single value"),
        ({"sort": "da"}, r"has no field 'kind', which data\.a\.label_field names"),
    ],
)
def test_a_row_without_a_label_stops_the_run_by_name(tmp_path, closing, row, says):
    rows = [*rows_of(*NAMES), {"text": "Fără etichetă.", **row}]
    with pytest.raises(ConfigError, match=rf"line 61 of a\.jsonl.*{says}.*on_bad_row=skip"):
        found(tmp_path, rows, closing)
    assert found(tmp_path, rows, closing, on_bad_row="skip") == list(NAMES)


def test_one_label_is_refused(tmp_path, closing):
    with pytest.raises(ConfigError, match=r"data\.a\.label_field; the \d+ training texts have 1 label \(da\)"):
        found(tmp_path, rows_of("da"), closing)


def test_a_label_that_only_held_out_texts_have_is_refused(tmp_path, closing):
    write_lines(tmp_path / "b.jsonl", [{"text": f"Altul {i}.", "kind": "poate"} for i in range(3)])
    values = {"eval_path": str(tmp_path / "b.jsonl")}
    assert found(tmp_path, rows_of(*NAMES), closing, **values) == list(NAMES)
    says = r"data\.a\.label_field; 3 of 3 texts of the evaluation split .* first 'poate'.*objective\.labels="
    with pytest.raises(ConfigError, match=says):
        made(tmp_path, rows_of(*NAMES), closing, **values)


@pytest.mark.parametrize("labels", [("da",), ("da", "da")])
def test_labels_of_the_command_are_two_or_more(tmp_path, closing, labels):
    with pytest.raises(ConfigError, match=r"objective\.labels=.*name two or more, each once"):
        made(tmp_path, rows_of("da"), closing, labels=labels)


def test_conversations_and_sources_without_a_field_are_refused(tmp_path, closing):
    path = write_lines(tmp_path / "a.jsonl", rows_of(*NAMES))
    preparation = settings(tmp_path, closing)
    with pytest.raises(ConfigError, match=r"data\.a\.kind=chat with objective=classify.*data\.a\.kind=text"):
        labels_of({"a": chat_source(path, label_field="kind")}, data_size="full", preparation=preparation)
    with pytest.raises(ConfigError, match=r"data\.a\.label_field=null with objective=classify"):
        labels_of({"a": text_source(path)}, data_size="full", preparation=preparation)


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_every_text_of_a_row_has_its_own_label_behind_it(tmp_path, closing, packing):
    given = rows_of("nu", "da", "nu")
    wanted = {(*closing(row["text"])["input_ids"], NAMES.index(row["kind"])) for row in given}
    source = made(tmp_path, given, closing, prepare_settings={"packing": packing})
    seen = set()
    for split in ("train", "evaluation", "test"):
        rows = all_rows(source, split, SEQ_LEN)
        if packing == "pad":
            assert rows.segments_NT.max() == 1
        elif split == "train":
            assert rows.segments_NT.max() > 1
        for row in range(rows.num_rows):
            for number in range(1, rows.segments_NT[row].max() + 1):
                here = rows.segments_NT[row] == number
                assert rows.learn_NT[row, here].tolist() == [False] * (here.sum() - 1) + [True]
                assert rows.positions_NT[row, here].tolist() == list(range(here.sum()))
                assert rows.more[LABEL][row, here][:-1].tolist() == [0] * (here.sum() - 1)
                seen.add((*rows.ids_NT[row, here].tolist()[:-1], int(rows.more[LABEL][row, here][-1])))
    assert seen == wanted


def test_a_text_longer_than_a_row_is_cut_and_keeps_its_ends(tmp_path, closing):
    long = {"text": "foarte " * 60, "kind": "nu"}
    given = [*rows_of(*NAMES), long]
    source = made(tmp_path, given, closing)
    ids = closing(long["text"])["input_ids"]
    manifest = source.manifests[SEQ_LEN]
    splits = {split: manifest["splits"][split]["documents_truncated"] for split in manifest["splits"]}
    (split,) = (name for name, count in splits.items() if count)
    assert sum(splits.values()) == 1
    assert manifest["splits"][split]["tokens_dropped"] == len(ids) + 1 - SEQ_LEN
    rows = all_rows(source, split, SEQ_LEN)
    row = rows.ids_NT.tolist().index([*ids[: SEQ_LEN - 2], ids[-1], 0])
    assert rows.more[LABEL][row].tolist() == [0] * (SEQ_LEN - 1) + [NAMES.index("nu")]


def test_long_texts_can_be_dropped(tmp_path, closing):
    given = [*rows_of(*NAMES), {"text": "foarte " * 60, "kind": "nu"}]
    source = made(tmp_path, given, closing, prepare_settings={"long_documents": "drop"})
    assert source.manifests[SEQ_LEN]["documents_reported"]["too_long"] == 1


@pytest.mark.parametrize("lengths", [[9, 3, 20, 5], [5], [40, 40]])
def test_texts_are_cut_behind_their_beginning(lengths):
    texts = [Tokens(np.arange(n, dtype=np.int32), np.full(n, LEARN, np.uint8), str(n)) for n in lengths]
    short, counts = cut_texts(flatten(texts), max_tokens=8, num_closing=1)
    expected = [[*range(6), n - 2, n - 1] if n > 8 else [*range(n)] for n in lengths]
    assert short.ids_L.tolist() == [token for one in expected for token in one]
    assert short.lengths_D.tolist() == [len(one) for one in expected]
    assert counts == {
        "documents_truncated": sum(n > 8 for n in lengths),
        "tokens_dropped": sum(max(0, n - 8) for n in lengths),
    }


def test_counts_are_in_the_manifest_and_the_order_of_labels_names_the_folder(tmp_path, closing):
    given = rows_of("nu", "da", "nu")
    source = made(tmp_path, given, closing)
    counts = source.manifests[SEQ_LEN]["labels"]
    assert list(counts["train"]) == list(NAMES)
    assert {name: sum(split[name] for split in counts.values()) for name in NAMES} == {"da": 20, "nu": 40}
    other = made(tmp_path, given, closing, labels=NAMES[::-1])
    assert other.folders[SEQ_LEN] != source.folders[SEQ_LEN]


def test_rows_prepared_before_labels_were_an_array_are_read_as_those_of_today(tmp_path, closing):
    """Their shards had the label's number as the id of its place, and their manifest no `arrays`."""
    source = made(tmp_path, rows_of("nu", "da", "nu"), closing)
    wanted, manifest = all_rows(source, "train", SEQ_LEN), dict(source.manifests[SEQ_LEN])
    assert wanted.more[LABEL].any()
    of_before = replace(wanted, ids_NT=wanted.ids_NT + wanted.more[LABEL], more={})
    record = write_shard(str(tmp_path / "0.npy"), of_before, dtype=row_dtype(SEQ_LEN, vocab_size=2**16))
    del manifest["arrays"]
    manifest["splits"] = {"train": {"shards": [record]}}
    old = replace(source, folders={SEQ_LEN: str(tmp_path)}, manifests={SEQ_LEN: manifest})
    found = all_rows(old, "train", SEQ_LEN)
    assert (found.ids_NT * (found.segments_NT > 0) == wanted.ids_NT * (wanted.segments_NT > 0)).all()
    assert (found.more[LABEL] == wanted.more[LABEL]).all()
    assert old.arrays(SEQ_LEN) == source.arrays(SEQ_LEN) == (LABELS,)


def test_equal_texts_of_two_labels_are_both_kept_in_one_split(tmp_path, closing):
    given = [*rows_of("da"), *rows_of("nu", count=10), *rows_of("nu", count=10)]
    source = made(tmp_path, given, closing)
    manifest = source.manifests[SEQ_LEN]
    assert manifest["documents_out"] == 70
    assert not any(manifest["overlaps"].values())


def test_held_out_texts_have_their_labels(tmp_path, closing):
    given = rows_of("nu", "da", "nu")
    made(tmp_path, given, closing)
    preparation = settings(tmp_path, closing, labels=NAMES)
    source = sources(tmp_path, given)["a"]
    held_out = held_out_documents(
        "a", source, split="test", data_size="full", preparation=preparation, max_documents=None, seed=0
    )
    wanted = {(*closing(row["text"])["input_ids"], NAMES.index(row["kind"])) for row in given}
    last_D = np.cumsum(held_out.flat.lengths_D) - 1
    labels = held_out.flat.more[LABEL][last_D].tolist()
    documents = {(*ids[:-1].tolist(), label) for (ids, _), label in zip(held_out.documents(), labels, strict=True)}
    assert documents
    assert documents <= wanted
    assert max(held_out.cut(5).flat.lengths_D) == 5


def test_a_tokenizer_without_ends_of_its_own_gets_bos_and_eos(closing, tmp_path):
    text = closing.encode("Un text.")
    assert (text[0], text[-1]) == (closing.bos_token_id, closing.eos_token_id)
    assert own_ends(closing) == ([closing.bos_token_id], [closing.eos_token_id])
    closing.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path), revision=None, chat_template_path=None)
    assert again.encode("Un text.") == text
    assert closing_texts(again).encode("Un text.") == text
