"""What stays in one split: threads of one question, rows of one field, and the same documents in several sources."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.preparing import SHARED, all_rows, chat_source, prepared, text_source, texts, write_lines
from tpu_experiments.config.data_schema import DuplicatesConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.audit.findings import audit_findings
from tpu_experiments.data.audit.summary import audit_json, audit_table
from tpu_experiments.data.cleaning.split import SPLITS, joined_groups
from tpu_experiments.data.documents import Document

QUESTIONS, THREADS = 120, 3


@pytest.fixture
def threads(tmp_path):
    """Several answers to each question, as trees of conversations have them."""
    rows = [
        {"data": [f"întrebarea numărul {i}", f"răspunsul {j} la {i}"], "tree": i // 4, "author": {"id": i}}
        for i in range(QUESTIONS)
        for j in range(THREADS)
    ]
    return write_lines(tmp_path / "threads.jsonl", rows)


def manifest_of(source):
    return source.manifests[64]


def texts_of(source, tokenizer):
    """The decoded rows of every split."""
    return {s: tokenizer.decode(all_rows(source, s).ids_NT.ravel(), skip_special_tokens=True) for s in SPLITS}


def test_threads_of_a_question_are_in_one_split(threads, tmp_path, tokenizer):
    source = prepared({"a": chat_source(threads)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    manifest = manifest_of(source)
    assert set(manifest["overlaps"].values()) == {0}
    assert all(manifest["splits"][split]["documents"] % THREADS == 0 for split in SPLITS)
    assert manifest["splits"]["evaluation"]["documents"]
    assert not audit_findings([manifest])


def test_split_by_document_is_reported(threads, tmp_path, tokenizer):
    source = prepared({"a": chat_source(threads, split_by="document")}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    (finding,) = [f for f in audit_findings([manifest_of(source)]) if "evaluation" in f.message]
    assert finding.severity == "warning"
    assert "train holds the first question of" in finding.message
    assert "data.a.split_by=first_turn" in finding.message


def test_rows_of_a_field_are_in_one_split(threads, tmp_path, tokenizer):
    source = prepared({"a": chat_source(threads, split_by="tree")}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    assert all(manifest_of(source)["splits"][split]["documents"] % (4 * THREADS) == 0 for split in SPLITS)
    by_turn = prepared({"a": chat_source(threads)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    assert by_turn.folders != source.folders


@pytest.mark.parametrize(("name", "held"), [("trees", "nothing"), ("author", "dict")])
def test_a_field_that_is_not_there_is_named(threads, tmp_path, tokenizer, name, held):
    with pytest.raises(ConfigError, match=rf"line 1 of threads.jsonl has {held} in the field '{name}'"):
        prepared({"a": chat_source(threads, split_by=name)}, folder=tmp_path / "p", tokenizer=tokenizer)


def test_a_reader_of_the_users_own_sets_the_group(tmp_path, tokenizer):
    def reader(grouped):
        return lambda _spec: (
            Document(str(i), text=f"Acesta este textul {i}.", group=str(i // 5) if grouped else None)
            for i in range(100)
        )

    sources = {"a": text_source(tmp_path, split_by="shelf")}
    (source,) = prepared(sources, folder=tmp_path / "p", tokenizer=tokenizer, readers={"a": reader(True)}).values()
    assert all(manifest_of(source)["splits"][split]["documents"] % 5 == 0 for split in SPLITS)
    with pytest.raises(ConfigError, match="has no `group`"):
        prepared(sources, folder=tmp_path / "q", tokenizer=tokenizer, readers={"a": reader(False)})


def two_sources(tmp_path, tokenizer, **fractions):
    path = texts(tmp_path / "a.jsonl", 400)
    other = texts(tmp_path / "b.jsonl", 200, first=300)  # 100 documents are in both
    sources = {"a": text_source(path, eval_fraction=0.05), "b": text_source(other, **fractions)}
    made = prepared(sources, folder=tmp_path / "p", tokenizer=tokenizer)
    return made, [manifest_of(source) for source in made.values()]


def test_what_another_source_trains_on_is_an_error(tmp_path, tokenizer):
    made, manifests = two_sources(tmp_path, tokenizer, eval_fraction=0.3)
    found = [finding for finding in audit_findings(manifests) if finding.severity == "error"]
    assert {finding.source for finding in found} == {"b"}
    held, trained = texts_of(made["b"], tokenizer)["evaluation"], texts_of(made["a"], tokenizer)["train"]
    shared = [i for i in range(300, 400) if f"numărul {i}." in held and f"numărul {i}." in trained]
    assert shared
    assert f"data.a trains on {len(shared)} texts or first questions of its evaluation split" in found[0].message
    assert "give both the same eval_fraction (now 0.3 and 0.05)" in found[0].message
    assert audit_json(manifests)["sources"][1]["across"][0]["groups"] == len(shared)
    assert f"evaluation in train of a {len(shared)}" in audit_table(manifests)
    assert manifests[1]["audit_hash"] == audit_json(manifests)["sources"][1]["audit_hash"]


def test_sources_of_equal_fractions_hold_out_the_same(tmp_path, tokenizer):
    made, manifests = two_sources(tmp_path, tokenizer, eval_fraction=0.05)
    assert not [finding for finding in audit_findings(manifests) if finding.severity == "error"]
    held = {name: texts_of(source, tokenizer) for name, source in made.items()}
    for i in range(300, 400):
        places = {split for texts in held.values() for split in SPLITS if f"numărul {i}." in texts[split]}
        assert len(places) == 1


def test_training_stops_at_an_error_or_tells_it(tmp_path, tokenizer, make_config, caplog):
    from tpu_experiments.tasks.setup import check_findings

    made, _ = two_sources(tmp_path, tokenizer, eval_fraction=0.3)
    with pytest.raises(ConfigError, match=r"data\.b; data\.a trains on .* prepare\.on_finding=warn"):
        check_findings(make_config(), SimpleNamespace(sources=made, prompts={}), said=set())
    said = set()
    check_findings(make_config("prepare.on_finding=warn"), SimpleNamespace(sources=made, prompts={}), said=said)
    assert "data.a trains on" in caplog.text
    logged = caplog.text
    check_findings(make_config("prepare.on_finding=warn"), SimpleNamespace(sources=made, prompts={}), said=said)
    assert caplog.text == logged, "the runs of a pack say what they have in common once"


@pytest.mark.skipif(not SHARED.exists(), reason="shared/data is not here")
def test_no_held_out_thread_of_real_trees_is_answered_in_train(tmp_path, tokenizer):
    """Of 71 held-out documents 35 had an answer in train verbatim with the same context, split by document."""
    path = SHARED / "chat_messages.jsonl"
    source = prepared({"a": chat_source(path)}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[512])["a"]
    manifest = source.manifests[512]
    assert set(manifest["overlaps"].values()) == {0}
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({row[0]["content"] for row in rows}) < len(rows)
    assert manifest["splits"]["evaluation"]["documents"] + manifest["splits"]["test"]["documents"] > 40


@pytest.fixture
def alike(tmp_path):
    """Texts in chains: each is nearly the one before, and its neighbour of the next chain has another question."""
    words = [f"cuvântul{k}" for k in range(80)]
    rows = [
        {"text": " ".join([f"tema{i}", *(f"{word}-{i}" for word in words), f"sfârșitul{j}"])}
        for i in range(60)
        for j in range(4)
    ]
    return write_lines(tmp_path / "alike.jsonl", rows)


def sides(source, tokenizer):
    """The splits that documents of each theme are in."""
    found = texts_of(source, tokenizer)
    return [{split for split in SPLITS if f"tema{i} " in found[split]} for i in range(60)]


def test_near_copies_that_stay_are_in_one_split(alike, tmp_path, tokenizer):
    def made(duplicates):
        source = text_source(alike, duplicates=duplicates, eval_fraction=0.3)
        return prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[64, 1024])["a"]

    plain = made(DuplicatesConfig())
    assert sum(len(found) > 1 for found in sides(plain, tokenizer)) > 20, "by the hash of each they are on both sides"
    kept = made(DuplicatesConfig(near=0.8, near_copies="keep"))
    assert all(len(found) == 1 for found in sides(kept, tokenizer))
    assert 10 < sides(kept, tokenizer).count({"evaluation"}) < 26, "0.3 of 60, however many are in a group"
    manifest = manifest_of(kept)
    assert manifest["documents_out"] == manifest["documents_in"] == 240
    assert "near kept in one split (similarity 0.8)" in " ".join(audit_table([manifest]).split())
    dropped = made(DuplicatesConfig(near=0.8))
    assert manifest_of(dropped)["documents_out"] == 60
    assert len({source.folders[64] for source in (plain, kept, dropped)}) == 3
    assert "near_copies" not in manifest_of(dropped)["config"]["duplicates"]


def test_joined_groups_are_the_components():
    groups = np.array([50, 40, 30, 20, 10, 50, 60], np.uint64)
    # 0 is like 1, 2 like 5, which is of the group of 0, and 4 like 3.
    first = np.array([-1, 0, -1, -1, 3, 2, -1])
    joined = joined_groups(groups, first_D=first)
    assert joined[6] == 60
    assert len(set(joined.tolist())) == 3
    assert len(set(joined[[0, 1, 2, 5]].tolist())) == len(set(joined[[3, 4]].tolist())) == 1
    assert joined_groups(groups[:0], first_D=first[:0]).tolist() == []


def test_near_copies_are_kept_only_where_they_are_looked_for(make_config):
    with pytest.raises(ConfigError, match=r"data\.sample_text\.duplicates\.near_copies=keep; nothing looks"):
        make_config("data=sample_text", "data.sample_text.duplicates.near_copies=keep")


def test_near_copies_of_one_source_do_not_hide_what_another_trains_on(alike, tmp_path, tokenizer):
    sources = {
        "a": text_source(alike, duplicates=DuplicatesConfig(near=0.8, near_copies="keep"), eval_fraction=0.3),
        "b": text_source(alike, eval_fraction=0.3),
    }
    made = prepared(sources, folder=tmp_path / "p", tokenizer=tokenizer)
    errors = [f for f in audit_findings([manifest_of(s) for s in made.values()]) if f.severity == "error"]
    assert {finding.source for finding in errors} == {"a", "b"}
    assert "make one source of the two" in errors[0].message
