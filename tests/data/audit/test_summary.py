import json
from copy import deepcopy

import pytest

from tests.data.manifest_samples import manifest
from tpu_experiments.data.audit.summary import audit_hash, audit_json, audit_table


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 99.0},
        {"tokens_per_second": 1.0},
        {"peak_rss_gib": 7.0},
        {"path": "gs://bucket/other.json"},
        {"tokenizer": "elsewhere/tokenizer"},
        {"examples": {}},
        {"files": 2},
        {"source": "renamed"},
        {"audit_hash": "ffffffffffffffff"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_hash_does_not_depend_on_where_and_how_fast_it_was_made(change):
    assert audit_hash(manifest(**change)) == audit_hash(manifest())


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 2048},
        {"packing": "pad"},
        {"long_documents": "drop"},
        {"tokenizer_hash": "1" * 16},
        {"template_hash": "1" * 16},
        {"documents_out": 228},
        {"documents_reported": {"not_json": 11}},
        {"config": {"eval_fraction": 0.2}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_hash_changes_with_the_data(change):
    assert audit_hash(manifest(**change)) != audit_hash(manifest())


def test_the_hash_changes_with_a_shard_and_not_with_the_order_of_keys():
    other = deepcopy(manifest())
    other["splits"]["test"]["shards"][0]["sha256"] = "0" * 64
    assert audit_hash(other) != audit_hash(manifest())
    assert audit_hash(dict(reversed(manifest().items()))) == audit_hash(manifest())
    assert len(audit_hash(manifest())) == 16
    int(audit_hash(manifest()), 16)


def test_the_hash_is_the_same_on_every_machine():
    assert audit_hash(manifest()) == "e0654a61b8da031e"


TABLE = """\
source                split            documents          rows            tokens supervised   packed
ultrachat_ro          train                  190            88            89,000     22.5 %   98.8 %
                      evaluation              20             9             9,000     20.0 %   97.7 %
                      test                    19             8             8,000     25.0 %   97.7 %

ultrachat_ro: chat, rows of 1,024 tokens, best_fit, long documents: split
  reported          11 of 240 documents (4.6 %): too short 5, exact duplicate 3, near duplicate 2,
                    not json 1
    for example     not json: line 17 of a.jsonl is not JSON: Expecting value.
  changed           romanian letters 1,200, special tokens in text 1
  document length   50 % up to 380, 90 % up to 850, 95 % up to 1,010, 99 % up to 2,400, longest
                    5,120 tokens
  long documents    6 split, 3 truncated (3 inside a turn), 36 tokens dropped
  supervised in     answer 1 45.0 %, answer 2 30.0 %, answer 3 15.0 %, answer 4 10.0 %
  duplicates        exact 3 left out, near 2 left out (similarity 0.8)
  overlaps          evaluation content in train 0, evaluation prompt in train 0,
                    test content in train 0, test prompt in train 0
  tokenizer         /somewhere/tokenizer (0123456789abcdef)
  chat template     fedcba9876543210
  audit hash        e0654a61b8da031e
"""


def test_the_table_shows_every_number():
    assert audit_table([manifest()]) == TABLE


def test_the_table_ends_with_what_looks_wrong_errors_first():
    overlaps = {"test_prompt_in_train": 2, "evaluation_content_in_train": 1}
    lines = audit_table([manifest(overlaps=overlaps)]).splitlines()
    assert lines.index("errors") < lines.index("warnings")
    assert lines[lines.index("errors") + 1].startswith(
        "  - data.ultrachat_ro; train holds 1 document of the evaluation"
    )


def test_the_table_is_at_most_100_columns_wide():
    long = manifest(
        source="a_very_long_name_of_a_source_that_somebody_typed",
        tokenizer="/somewhere/" + "deep/" * 40,
        examples={"not_json": [{"place": "line 17 of a.jsonl", "message": "is not JSON: " + "x " * 500}]},
        documents_reported={f"a_rule_with_a_name_{i}": 10**9 for i in range(30)},
        overlaps={"test_prompt_in_train": 10**9},
    )
    for n in long["splits"].values():
        n.update(documents=10**9, rows=10**9, tokens=10**12, supervised_tokens=10**11)
    lines = audit_table([long, long]).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("x x x" in line for line in lines) <= 2 * 2  # two lines of the example, twice


def test_control_characters_of_a_file_do_not_reach_the_terminal():
    examples = {"not_json": [{"place": "line 1 of a", "message": "is not JSON: \x1b[31m\x07"}]}
    assert "\x1b" not in audit_table([manifest(examples=examples)])


def test_an_empty_split_and_a_text_source_can_be_shown():
    text = manifest(kind="text", template_hash="none", examples={}, changes={}, documents_reported={}, overlaps={})
    empty = dict.fromkeys(("documents", "rows", "tokens", "supervised_tokens"), 0)
    text["splits"]["test"] = empty
    table = audit_table([text])
    assert f"{'':22}test{'0':>22}{'0':>14}{'0':>18}{'-':>11}{'-':>9}\n" in table
    assert "  reported          0 of 240 documents (0.0 %)\n" in table
    assert "  changed           nothing\n" in table
    assert "  overlaps          not compared\n" in table
    assert "supervised in" not in table


def test_the_json_holds_everything_and_one_hash_over_all():
    other = manifest(source="wiki_ro", seq_len=512)
    audit = json.loads(json.dumps(audit_json([manifest(), other])))
    assert [source["source"] for source in audit["sources"]] == ["ultrachat_ro", "wiki_ro"]
    assert audit["sources"][0] == manifest() | {"audit_hash": audit_hash(manifest())}
    assert audit["audit_hash"] == audit_json([other, manifest()])["audit_hash"]
    assert audit["audit_hash"] != audit_json([manifest()])["audit_hash"]
    assert audit["findings"] == []


def test_the_table_of_many_sources_is_their_splits_and_what_is_wrong():
    made = [manifest(source=f"source_{i:02d}") for i in range(29)]
    made[5]["overlaps"] = {"test_content_in_train": 2}
    table = audit_table(made)
    assert len(table.splitlines()) < 29 * 3 + 10
    assert "data.source_05; train holds 2 documents" in " ".join(table.split())
    assert "chat template" in audit_table(made[:2])
