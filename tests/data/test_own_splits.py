"""Evaluation and test of the user's own: files, splits of the Hub, and files of a folder by their names."""

import json
import logging
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.preparing import REPOSITORY, all_rows, chat_source, prepared, text_source, texts, write_lines
from tests.data.readers import spec_for
from tests.hub import HubServer
from tpu_experiments.config.data_schema import DuplicatesConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.audit.findings import audit_findings
from tpu_experiments.data.audit.summary import audit_table
from tpu_experiments.data.cleaning.split import SPLITS
from tpu_experiments.data.documents import Document
from tpu_experiments.data.reading.parts import list_parts, split_in_name


@pytest.fixture
def make(tmp_path, tokenizer):
    def make(source, **settings):
        made = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, **settings)
        return made["a"]

    return make


@pytest.fixture
def held(tokenizer):
    """Numbers of the documents of each split."""

    def held(source, count=400):
        found = {s: tokenizer.decode(all_rows(source, s).ids_NT.ravel(), skip_special_tokens=True) for s in SPLITS}
        return [{i for i in range(count) if f"numărul {i}." in found[split]} for split in SPLITS]

    return held


def manifest_of(source):
    manifest = source.manifests[64]
    assert manifest["documents_in"] == manifest["documents_out"] + sum(manifest["documents_reported"].values())
    return manifest


def numbers(*bounds):
    return set(range(*bounds))


def test_an_evaluation_file_is_the_evaluation_and_all_of_path_is_train(tmp_path, make, held, caplog):
    path, own = texts(tmp_path / "a.jsonl", 100), texts(tmp_path / "dev.jsonl", 20, first=100)
    with caplog.at_level(logging.INFO):
        source = make(text_source(path, eval_path=str(own)))
    assert held(source) == [numbers(100), numbers(100, 120), set()]
    told = f"train: all of path; evaluation: eval_path={own}; test: none, since no test_path is given"
    assert told in caplog.text
    manifest = manifest_of(source)
    assert manifest["files"] == 2
    assert (manifest["config"]["eval_fraction"], manifest["config"]["test_fraction"]) == (0.0, 0.0)
    assert not audit_findings([manifest])
    assert "evaluation: eval_path=" in " ".join(audit_table([manifest]).split())


def test_a_test_file_leaves_evaluation_to_the_hash(tmp_path, make, held):
    path, own = texts(tmp_path / "a.jsonl", 200), texts(tmp_path / "bench" / "a.jsonl", 20, first=200)
    source = make(text_source(path, test_path=str(own.parent), eval_fraction=0.2))
    train, evaluation, test = held(source)
    assert test == numbers(200, 220)
    assert train | evaluation == numbers(200)
    assert 20 < len(evaluation) < 60
    hashed = make(text_source(path, eval_fraction=0.2))
    assert evaluation == held(hashed)[1]


def test_patterns_and_other_suffixes(tmp_path, make, held):
    path = texts(tmp_path / "a.jsonl", 60)
    for i in range(2):
        texts(tmp_path / "own" / f"part{i}.jsonl", 10, first=100 + 10 * i)
    (tmp_path / "own.csv").write_text("text\n" + "".join(f"numărul {i}.\n" for i in range(200, 205)))
    source = make(text_source(path, eval_path=f"{tmp_path}/own/*.jsonl", test_path=str(tmp_path / "own.csv")))
    assert held(source) == [numbers(60), numbers(100, 120), numbers(200, 205)]


@pytest.mark.parametrize("workers", [1, 2])
def test_own_files_are_read_whole_and_ray_cuts_the_same_blocks(tmp_path, make, held, workers):
    path, own = texts(tmp_path / "a.jsonl", 100), texts(tmp_path / "dev.jsonl", 40, first=100)
    source = make(text_source(path, eval_path=str(own), max_documents=30), workers=workers)
    assert held(source) == [numbers(30), numbers(100, 140), set()]


def folder_of(tmp_path, *names):
    for number, name in enumerate(names):
        texts(tmp_path / "set" / name, 10, first=100 * number)
    return tmp_path / "set"


def test_files_named_as_splits_are_these_splits(tmp_path, make, held, caplog):
    folder = folder_of(tmp_path, "train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl", "test/x.jsonl")
    with caplog.at_level(logging.INFO):
        source = make(text_source(folder))
    assert held(source) == [numbers(10), numbers(100, 110), numbers(200, 210)]
    assert "evaluation: validation-00000-of-00001.jsonl, by name; test: test/x.jsonl, by name" in caplog.text
    assert "test: test/x.jsonl, by name" in " ".join(audit_table([manifest_of(source)]).split())
    pool = make(text_source(folder, named_splits="ignore", eval_fraction=0.4))
    train, evaluation, _ = held(pool)
    assert train & numbers(200, 210)
    assert evaluation & numbers(10)
    assert "named_splits=ignore: " in manifest_of(pool)["origins"]["train"]
    assert pool.folders != source.folders


def test_train_and_test_files_evaluate_on_a_share_of_train(tmp_path, make, held):
    folder = folder_of(tmp_path, "train.jsonl", "test.jsonl")
    texts(folder / "train.jsonl", 100)
    train, evaluation, test = held(make(text_source(folder)))
    assert test == numbers(100, 110)
    assert train | evaluation == numbers(100)
    assert evaluation


def test_a_file_of_path_that_a_key_names_is_not_trained_on(tmp_path, make, held):
    folder = folder_of(tmp_path, "a.jsonl", "b.jsonl", "dev.jsonl", "test.jsonl")
    source = make(text_source(folder, eval_path=str(folder / "b.jsonl")))
    assert held(source) == [numbers(10), numbers(100, 110), numbers(300, 310)]
    assert manifest_of(source)["origins"]["left out"] == "dev.jsonl, named as a split that comes from a key"


@pytest.mark.parametrize("names", [("dev.jsonl", "test.jsonl"), ("test.jsonl",)])
def test_a_folder_of_test_files_is_not_trained_on(tmp_path, make, names):
    folder = folder_of(tmp_path, *names)
    with pytest.raises(ConfigError, match=r"data\.a\.path=.*nothing is left to train on.*data\.a\.named_splits=ignore"):
        make(text_source(folder))
    assert make(text_source(folder / "test.jsonl")).manifests, "a file that is named is taken"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("my_data-train_sft-00000-of-00002.parquet", "train"),
        ("set/Validation/0.csv", "evaluation"),
        ("test_sft-0.parquet", "test"),
        ("train/test.jsonl", "test"),
        ("latest.jsonl", None),
        ("evaluations.jsonl", None),
        ("contest/devices.jsonl", None),
    ],
)
def test_names(name, split):
    assert split_in_name(name) == split


def test_what_train_shares_with_own_files_is_an_error_or_left_out(tmp_path, make, held):
    path, own = texts(tmp_path / "a.jsonl", 110), texts(tmp_path / "dev.jsonl", 20, first=100)
    source = make(text_source(path, eval_path=str(own)))
    manifest = manifest_of(source)
    assert manifest["overlaps"]["evaluation_content_in_train"] == 10
    assert held(source) == [numbers(110), numbers(100, 120), set()]
    (error,) = [finding for finding in audit_findings([manifest]) if finding.severity == "error"]
    assert "train holds 10 documents of the evaluation split" in error.message
    assert "data.a.held_out_copies=drop" in error.message
    for exact in ("drop", "keep"):
        values = {"held_out_copies": "drop", "duplicates": DuplicatesConfig(exact=exact)}
        source = make(text_source(path, eval_path=str(own), **values))
        assert held(source) == [numbers(100), numbers(100, 120), set()]
        manifest = manifest_of(source)
        assert manifest["documents_reported"] == {"held_out_copy": 10}
        assert manifest["examples"]["held_out_copy"][0]["message"] == "repeats line 1 of eval_path/dev.jsonl."
        assert not audit_findings([manifest])


def test_held_out_copies_are_word_for_word_and_those_inside_path_letter_for_letter(tmp_path, make):
    path = write_lines(
        tmp_path / "a.jsonl", [{"text": text} for text in ("O mare.", "o  MARE.", "Un om.", "un OM.", "Da.")]
    )
    own = write_lines(tmp_path / "dev.jsonl", [{"text": "O Mare."}])
    for exact, left in (("drop", 3), ("folded", 2), ("keep", 3)):
        values = {"held_out_copies": "drop", "duplicates": DuplicatesConfig(exact=exact)}
        manifest = manifest_of(make(text_source(path, eval_path=str(own), **values)))
        assert manifest["splits"]["train"]["documents"] == left
        assert manifest["documents_reported"]["held_out_copy"] == 2
        assert "error" not in {finding.severity for finding in audit_findings([manifest])}


def test_copies_inside_own_files_stay_and_those_of_train_go(tmp_path, make):
    row = {"text": "Același text."}
    path = write_lines(tmp_path / "a.jsonl", [row, row, *({"text": f"Textul {i}."} for i in range(9))])
    own = write_lines(tmp_path / "dev.jsonl", [{"text": "Altul."}] * 3)
    manifest = manifest_of(make(text_source(path, eval_path=str(own))))
    assert {split: n["documents"] for split, n in manifest["splits"].items()} == {
        "train": 10,
        "evaluation": 3,
        "test": 0,
    }
    assert manifest["documents_reported"] == {"exact_duplicate": 1}


def test_near_copies_of_own_files_leave_train(tmp_path, make, held):
    words = [f"cuvântul {k}" for k in range(60)]
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"text": " ".join([*words, f"numărul {i}."])} for i in range(2)]
        + [{"text": f"Cu totul altceva, numărul {i}."} for i in range(2, 20)],
    )
    own = write_lines(tmp_path / "dev.jsonl", [{"text": " ".join([*words, "numărul 100."])}])
    values = {"held_out_copies": "drop", "duplicates": DuplicatesConfig(near=0.8)}
    source = make(text_source(path, eval_path=str(own), **values), seq_lens=[64])
    assert held(source)[0] == numbers(2, 20)
    assert manifest_of(source)["documents_reported"] == {"held_out_copy": 2}


def test_a_shared_question_is_reported_with_what_helps(tmp_path, make):
    def rows(first, count):
        return [{"data": [f"întrebarea {i}", f"răspunsul {first}"]} for i in range(count)]

    path, own = write_lines(tmp_path / "a.jsonl", rows(1, 30)), write_lines(tmp_path / "dev.jsonl", rows(2, 5))
    found = audit_findings([manifest_of(make(chat_source(path, eval_path=str(own))))])
    (finding,) = [finding for finding in found if "question" in finding.message]
    assert finding.severity == "warning"
    assert "holds the first question of 5 documents of the evaluation split" in finding.message
    assert "split_by" not in finding.message


def test_own_files_of_one_source_that_another_trains_on(tmp_path, tokenizer):
    own = texts(tmp_path / "dev.jsonl", 20, first=100)
    sources = {
        "a": text_source(texts(tmp_path / "a.jsonl", 50), eval_path=str(own)),
        "b": text_source(texts(tmp_path / "b.jsonl", 40, first=90), eval_fraction=0.05, test_fraction=0),
    }
    made = prepared(sources, folder=tmp_path / "p", tokenizer=tokenizer)
    found = [f for f in audit_findings([s.manifests[64] for s in made.values()]) if f.severity == "error"]
    assert [finding.source for finding in found] == ["a"]
    assert "data.b trains on" in found[0].message
    assert "take these out of data.b.path" in found[0].message


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"eval_path": "{}/none.jsonl"}, r"data\.a\.eval_path=.*none\.jsonl; there is no such file or folder"),
        ({"test_path": "owner/set"}, r"data\.a\.test_path=owner/set; .*data\.a\.test_split="),
        ({"eval_split": "test"}, r"data\.a\.eval_split=test; .*is a file or folder; set data\.a\.eval_path="),
        ({"eval_path": "{}/a.jsonl"}, r"data\.a\.path=.*nothing is left to train on"),
        ({"eval_path": "{}/empty.jsonl"}, r"data\.a\.eval_path=.*empty\.jsonl; it is empty"),
        ({"eval_path": "{}/bad.jsonl"}, r"line 1 of eval_path/bad\.jsonl has no field 'text'"),
    ],
)
def test_sentences(tmp_path, make, values, sentence):
    path = texts(tmp_path / "a.jsonl", 20)
    (tmp_path / "empty.jsonl").touch()
    write_lines(tmp_path / "bad.jsonl", [{"body": "x"}])
    with pytest.raises(ConfigError, match=sentence):
        make(text_source(path, **{key: value.format(tmp_path) for key, value in values.items()}))


def test_path_and_split_of_one_kind_are_refused(make_config):
    overrides = ["data=sample_text", "data.sample_text.eval_path=a.jsonl", "data.sample_text.eval_split=test"]
    with pytest.raises(ConfigError, match=r"data\.sample_text\.eval_path=a\.jsonl and .*eval_split=test"):
        make_config(*overrides)


PREPARES = """
import json, sys
from tests.data.conftest import TOKENIZER
from tests.data.preparing import prepared, text_source
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
tokenizer = load_tokenizer(str(TOKENIZER), revision=None, chat_template_path=None)
source = text_source("org/set", **json.loads(sys.argv[1]))
prepared({"a": source}, folder=sys.argv[2], tokenizer=tokenizer, workers=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "place"), [("json", "row 21 of test.json"), ("parquet", "row 21 of org/set test")])
def test_a_split_of_the_hub(tmp_path, suffix, place):
    """Prepared by the Hub's clients in a process of its own: this one has them offline."""
    (tmp_path / "set").mkdir()
    for first, split in ((0, "train"), (100, "test")):
        rows = [{"text": f"Documentul numărul {first + i}." if i < 20 else " "} for i in range(21)]
        path = tmp_path / "set" / f"{split}.{suffix}"
        if suffix == "json":
            path.write_text(json.dumps(rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    values = {"eval_split": "test", "test_path": str(texts(tmp_path / "t.jsonl", 5, first=200))}
    with HubServer(tmp_path / "set") as hub:
        command = [sys.executable, "-c", PREPARES, json.dumps(values), str(tmp_path / "p")]
        environment = os.environ | hub.environment(tmp_path / "home")
        subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, timeout=300)
    assert max(hub.reads.values()) == 1 or suffix == "parquet"
    manifest = json.loads(next((tmp_path / "p").rglob("manifest.json")).read_text())
    assert manifest["origins"]["evaluation"] == "eval_split=test"
    counts = {split: numbers["documents"] for split, numbers in manifest["splits"].items()}
    assert counts == {"train": 20, "evaluation": 20, "test": 5}
    (report,) = (tmp_path / "p").rglob("reported.jsonl")
    assert json.loads(report.read_text().splitlines()[-1])["place"] == place


def test_a_reader_of_the_users_own_is_asked_for_each_path(tmp_path, tokenizer, held):
    def reader(spec):
        first = {"train": 0, "held": 100}[spec.path]
        return (Document(str(i), text=f"Documentul numărul {i}.") for i in range(first, first + 20))

    sources = {"a": text_source("train", eval_path="held")}
    made = prepared(sources, folder=tmp_path / "p", tokenizer=tokenizer, readers={"a": reader})
    assert held(made["a"]) == [numbers(20), numbers(100, 120), set()]


def test_a_sample_is_divided_by_the_hash(tmp_path, make, held):
    path = texts(tmp_path / "a.jsonl", 200)
    source = make(text_source("x.jsonl", eval_path="gone.jsonl", sample_path=str(path)), data_size="sample")
    assert all(held(source))


def test_own_files_decide_the_folder_and_no_other_source_moves(tmp_path, make):
    path, own = texts(tmp_path / "a.jsonl", 50), texts(tmp_path / "dev.jsonl", 10, first=100)
    plain, with_own = make(text_source(path)), make(text_source(path, eval_path=str(own)))
    assert plain.folders != with_own.folders
    assert make(text_source(path, test_path=str(own))).folders not in (plain.folders, with_own.folders)
    texts(own, 11, first=100)
    assert make(text_source(path, eval_path=str(own))).folders != with_own.folders
    assert "origins" not in manifest_of(plain)
    assert "own_splits" not in manifest_of(plain)["config"]


def test_parts_of_a_reader_have_no_files():
    assert [part.split for part in list_parts(spec_for("x", test_path="y"), has_reader=True).parts] == [None, "test"]


def test_the_report_names_own_files(tmp_path, make):
    path, own = texts(tmp_path / "a.jsonl", 20), texts(tmp_path / "dev.jsonl", 5, first=100)
    with own.open("a") as file:
        file.write('{"text": " "}\n')
    manifest_of(make(text_source(path, eval_path=str(own))))
    (report,) = tmp_path.rglob("reported.jsonl")
    assert json.loads(report.read_text())["place"] == "line 6 of eval_path/dev.jsonl"
