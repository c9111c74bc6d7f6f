import hashlib
import json
import logging
import re

import numpy as np
import pytest

from tests.data import templates
from tests.data.preparing import (
    SHARED,
    all_rows,
    chat_source,
    prepared,
    text_source,
    texts,
    write_lines,
)
from tests.data.small_tokenizers import byte_level, with_template
from tpu_experiments.config.data_schema import CleanConfig, DataSourceConfig, DuplicatesConfig, PrepareConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.audit.findings import audit_findings
from tpu_experiments.data.cleaning.duplicates import content_key
from tpu_experiments.data.cleaning.split import SPLITS, split_codes
from tpu_experiments.data.documents import Document
from tpu_experiments.data.steps.keys import content_of_documents, rows_key

SAMPLES = "tpu_experiments/samples"


@pytest.fixture
def hundred(tmp_path):
    return texts(tmp_path / "a.jsonl", 100)


def manifest_of(source, seq_len=64):
    manifest = source.manifests[seq_len]
    reported = sum(manifest["documents_reported"].values())
    assert manifest["documents_in"] == manifest["documents_out"] + reported
    return manifest


def test_every_document_is_in_the_split_its_hash_says(hundred, tmp_path, tokenizer):
    source = prepared({"a": text_source(hundred)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    held = {s: tokenizer.decode(all_rows(source, s).ids_NT.ravel(), skip_special_tokens=True) for s in SPLITS}
    for i in range(100):
        text = f"Acesta este documentul cu numărul {i}."
        numbers_1 = np.frombuffer(content_key(Document("", text=text))[:8], "<u8")
        (code,) = split_codes(numbers_1, eval_fraction=0.1, test_fraction=0.1)
        assert {split for split in SPLITS if text in held[split]} == {SPLITS[code]}


def test_a_document_stays_in_its_split_when_the_data_grows(tmp_path, tokenizer):
    splits = []
    for count in (60, 100):
        path = texts(tmp_path / f"{count}.jsonl", count)
        source = prepared({"a": text_source(path)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
        splits.append({s: manifest_of(source)["splits"][s]["documents"] for s in SPLITS})
    assert all(splits[0][split] <= splits[1][split] for split in SPLITS)
    assert sum(splits[1].values()) == 100


def test_found_again_and_not_made_again(hundred, tmp_path, tokenizer):
    def made():
        prepared({"a": text_source(hundred)}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[32, 64, 32])
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "p").rglob("*")}

    first = made()
    assert made() == first
    assert len([path for path in first if path.name == "manifest.json"]) == 2, "one for each length"
    assert len([path for path in first if path.name == "blocks.json"]) == 1, "tokenised once"


def test_what_decides_the_rows_names_the_folder(hundred, tmp_path, tokenizer):
    def folder_of(path=hundred, *, settings=None, **values):
        source = text_source(path, **values)
        return prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, **(settings or {}))["a"].folders[64]

    base = folder_of()
    assert folder_of(on_bad_row="skip") == base
    assert folder_of(settings={"workers": 2, "documents": "keep"}) == base
    others = [
        folder_of(test_fraction=0.2),
        folder_of(max_documents=90),
        folder_of(clean=CleanConfig(unicode="nfc")),
        folder_of(duplicates=DuplicatesConfig(exact="keep")),
        folder_of(settings={"packing": "pad", "long_documents": "truncate"}),
        folder_of(texts(tmp_path / "b.jsonl", 99)),
    ]
    assert len({base, *others}) == 7


def test_left_out_rows_are_counted_and_named(tmp_path, tokenizer):
    good = [{"data": [f"întrebare {i}", f"răspuns {i}"]} for i in range(60)]
    rows = [*good, good[0], {"data": ["singur"]}, {"data": []}, {"data": "text"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with path.open("ab") as file:
        file.write(b'{"data": ["a", "b"\n\xff\xfe\n')
    source = chat_source(path, on_bad_row="skip")
    source = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[32])["a"]
    manifest = manifest_of(source, 32)
    assert manifest["documents_in"] == 66
    assert manifest["documents_out"] == 60
    assert manifest["documents_reported"]["exact_duplicate"] == 1
    lines = (tmp_path / "p").rglob("reported.jsonl")
    reported = [json.loads(line) for path in lines for line in path.read_text().splitlines()]
    assert [entry["place"] for entry in reported] == [f"line {n} of a.jsonl" for n in (62, 63, 64, 65, 66, 61)] or {
        entry["place"] for entry in reported
    } == {f"line {n} of a.jsonl" for n in range(61, 67)}
    assert any("line 1 of a.jsonl" in entry["message"] for entry in reported if entry["reason"] == "exact_duplicate")


ALIKE = ("Marea e albastră.", "Marea e albastră. ", "marea e  albastră.", "Marea e albastră.", "Marea e verde.")


@pytest.mark.parametrize(
    ("exact", "dropped"), [("drop", ["line 4"]), ("folded", ["line 2", "line 3", "line 4"]), ("keep", [])]
)
def test_exact_duplicates_are_those_of_the_same_text(tmp_path, tokenizer, exact, dropped):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in ALIKE])
    rules = DuplicatesConfig(exact=exact)
    source = text_source(path, duplicates=rules, eval_fraction=0.0, test_fraction=0.0)
    manifest = manifest_of(prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer)["a"])
    assert manifest["documents_out"] == len(ALIKE) - len(dropped)
    reported = [json.loads(line) for line in next((tmp_path / "p").rglob("reported.jsonl")).read_text().splitlines()]
    assert [entry["place"] for entry in reported] == [f"{place} of a.jsonl" for place in dropped]


@pytest.mark.parametrize(("exact", "num_dropped"), [("drop", 1), ("folded", 2)])
def test_exact_duplicates_of_conversations_have_the_same_roles(tmp_path, tokenizer, exact, num_dropped):
    turns = [("user", "Ce e?"), ("assistant", "O mare."), ("user", "Da?"), ("assistant", "Da.")]
    rows = [turns, turns, [(role, text.upper()) for role, text in turns], [("system", "Ce e?"), *turns[1:]]]
    messages = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    source = chat_source(
        write_lines(tmp_path / "a.jsonl", messages),
        duplicates=DuplicatesConfig(exact=exact),
        eval_fraction=0.0,
        test_fraction=0.0,
    )
    manifest = manifest_of(prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer)["a"])
    assert manifest["documents_reported"] == {"exact_duplicate": num_dropped}


def test_folders_of_folded_duplicates_keep_their_names():
    """Until there was another rule it was called `drop`; what was prepared by it is found again."""
    source = text_source("a.jsonl", duplicates=DuplicatesConfig(exact="folded"))
    settings = PrepareConfig()
    assert rows_key("tokens", source=source, settings=settings, seq_len=64, pad_id=0) == "2f10a9f0f680e043"


def test_documents_of_a_reader_keep_their_key_where_they_have_nothing_new():
    turns = (("user", "a"), ("assistant", "b"))
    known = {"id": "1", "text": None, "messages": turns, "place": "", "group": None}
    before = hashlib.sha256(json.dumps(known, ensure_ascii=False).encode()).hexdigest()
    documents = [Document("1", messages=turns, **new) for new in ({}, {"context": (1,)}, {"tools": "[]"})]
    keys = [content_of_documents(lambda one=one: iter([one])) for one in documents]
    assert keys[0] == [before]
    assert len({key for (key,) in keys}) == 3


def test_a_bad_row_stops_the_run_by_name(tmp_path, tokenizer):
    path = texts(tmp_path / "a.jsonl", 20)
    with path.open("a") as file:
        file.write('{"text": "cut off\n')
    sentence = r"data\.a\.path=.*a\.jsonl; line 21 of a\.jsonl .*on_bad_row=skip"
    with pytest.raises(ConfigError, match=sentence):
        prepared({"a": text_source(path)}, folder=tmp_path / "p", tokenizer=tokenizer)
    assert not list((tmp_path / "p").rglob("manifest.json"))
    skipping = {"a": text_source(path, on_bad_row="skip")}
    source = prepared(skipping, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    assert sum(manifest_of(source)["documents_reported"].values()) == 1
    with pytest.raises(ConfigError, match=sentence):  # the rows are there, but were made with skip
        prepared({"a": text_source(path)}, folder=tmp_path / "p", tokenizer=tokenizer)


def test_shipped_samples(tmp_path, tokenizer):
    sources = {
        "wiki": text_source("org/none", sample_path=f"{SAMPLES}/wiki_ro.jsonl"),
        "chat": chat_source("org/none", sample_path=f"{SAMPLES}/ultrachat_ro.json"),
        "law": chat_source("org/none", sample_path=f"{SAMPLES}/uk_law.jsonl"),
    }
    result = prepared(sources, folder=tmp_path, tokenizer=tokenizer, seq_lens=[128, 512], data_size="sample", workers=1)
    assert list(result) == ["wiki", "chat", "law"]
    for source in result.values():
        for length in (128, 512):
            manifest = manifest_of(source, length)
            assert manifest["documents_reported"] == {}
            assert all(manifest["splits"][split]["rows"] > 0 for split in SPLITS)
            assert manifest["max_token_id"] < 4096
            train = manifest["splits"]["train"]
            rows = all_rows(source, "train", length)
            assert (train["tokens"], train["supervised_tokens"]) == (rows.num_tokens, rows.num_supervised)
            assert sum(train["length_histogram"]["documents"]) == train["documents"] == train["documents_per_turn"][0]


def test_per_turn_counts_are_those_of_the_conversations(tmp_path, tokenizer):
    rows = [
        {"data": [f"Întrebarea {i}", "Da.", "Și?", "Nu, nu."] if i % 2 else [f"Altă {i}", "Da."]} for i in range(40)
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = chat_source(path, eval_fraction=0, test_fraction=0)
    manifest = manifest_of(prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer)["a"])
    train = manifest["splits"]["train"]
    assert train["documents_per_turn"] == [40, 20]
    assert sum(train["supervised_per_turn"]) == train["supervised_tokens"]
    assert train["supervised_per_turn"][0] % 40 == 0
    assert train["supervised_per_turn"][1] % 20 == 0


def test_percentiles_of_the_lengths(tmp_path, tokenizer):
    rows = [{"text": "apă " * count} for count in range(1, 101)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = text_source(path, eval_fraction=0, test_fraction=0)
    found = manifest_of(prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer)["a"])["length_percentiles"]
    lengths = sorted(len(tokenizer(row["text"])["input_ids"]) for row in rows)
    extra = found["100"] - lengths[-1]  # the tokens put around a text
    assert {share: value - extra for share, value in found.items()} == {
        str(share): lengths[share - 1] for share in (50, 90, 95, 99, 100)
    }


def test_kept_documents_are_prepared_to_the_same_rows(tmp_path, tokenizer):
    rows = [{"data": [f"Întrebarea {i}  ", f" Răspunsul {i}"]} for i in range(40)]
    first = chat_source(write_lines(tmp_path / "a.jsonl", rows), clean=CleanConfig(whitespace="collapse"))
    made = prepared({"a": first}, folder=tmp_path / "p", tokenizer=tokenizer, documents="keep")["a"]
    (documents,) = (tmp_path / "p").rglob("documents")
    again = prepared({"a": chat_source(documents)}, folder=tmp_path / "q", tokenizer=tokenizer)["a"]
    for split in SPLITS:
        assert np.array_equal(all_rows(made, split).ids_NT, all_rows(again, split).ids_NT)
    assert manifest_of(made)["changes"]["whitespace"] == 40


def test_no_bar_when_stderr_is_no_terminal(hundred, tmp_path, tokenizer, capfd):
    prepared({"a": text_source(hundred)}, folder=tmp_path / "p", tokenizer=tokenizer)
    assert capfd.readouterr().err == ""


def test_log_names_the_numbers_and_the_folder(hundred, tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO, logger="tpu_experiments.data.prepare")
    source = prepared({"a": text_source(hundred)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    (message,) = caplog.messages
    assert re.match(r"data\.a: 100 documents in, 100 out -> \d+ rows of 64 \(\d+ to evaluate, \d+ to test\)", message)
    assert source.folders[64] in message


def test_own_reader_is_read_again_only_when_it_changes(tmp_path, tokenizer):
    def source_of(count):
        def read(spec):
            assert (spec.name, spec.path) == ("a", "org/none")
            return (Document(str(i), text=f"documentul {i}") for i in range(count))

        sources = {"a": text_source("org/none", _target_="my_lab.read")}
        return prepared(sources, folder=tmp_path, tokenizer=tokenizer, readers={"a": read})["a"]

    fifty, again, sixty = source_of(50), source_of(50), source_of(60)
    assert manifest_of(fifty)["documents_in"] == 50
    assert fifty.folders == again.folders != sixty.folders


def test_reader_without_documents(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"data\.a\.path=org/none; it is empty: 0 documents"):
        prepared(
            {"a": text_source("org/none")}, folder=tmp_path, tokenizer=tokenizer, readers={"a": lambda spec: iter(())}
        )


def test_nothing_held_out(tmp_path, tokenizer):
    path = texts(tmp_path / "a.jsonl", 2)
    sentence = r"data\.a\.eval_fraction=0\.001; no row was held out \(2 documents were read\); raise it"
    with pytest.raises(ConfigError, match=sentence):
        prepared({"a": text_source(path, eval_fraction=0.001)}, folder=tmp_path / "p", tokenizer=tokenizer)
    none = {"a": text_source(path, eval_fraction=0, test_fraction=0)}
    source = prepared(none, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    assert source.store("evaluation", 64).num_rows == 0


def test_nothing_to_train_on(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "unu"}, {"text": "doi"}, {"text": " "}])
    counts = r"no row is left to train on \(3 documents were read, left out: 1 empty\); "
    sentence = counts + r"line 3 of a\.jsonl has no text; lower"
    source = text_source(path, eval_fraction=0.5, test_fraction=0.4999)
    with pytest.raises(ConfigError, match=sentence):
        prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")
@pytest.mark.parametrize(
    ("file", "kind", "count"),
    [
        ("ro_text.jsonl", "text", 814),
        ("ro_chat.jsonl", "chat", 240),
        ("uk_law.jsonl", "chat", 455),
        ("instruct_en.jsonl", "chat", 1250),
        ("chat_messages.jsonl", "chat", 613),
    ],
)
def test_real_data(file, kind, count, tmp_path, tokenizer):
    source = DataSourceConfig(path=str(SHARED / file), kind=kind, duplicates=DuplicatesConfig(near=0.8))
    prepared_source = prepared({"a": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=[1024], workers=1)["a"]
    manifest = manifest_of(prepared_source, 1024)
    assert manifest["documents_in"] == count
    assert manifest["documents_out"] > 0.9 * count
    assert manifest["packing_efficiency"] > 0.95
    assert manifest["overlaps"]["evaluation_content_in_train"] == 0
    rows = all_rows(prepared_source, "train", 1024)
    assert np.all(rows.learn_NT <= (rows.positions_NT > 0)), "a segment's first token is never predicted"
    assert 0.05 < rows.num_supervised / rows.num_tokens <= 1


@pytest.mark.parametrize("rewritten", ["split", "context"])
def test_answers_that_the_template_rewrites(tmp_path, rewritten, caplog):
    """Reasoning of earlier turns is dropped: each answer gets a document, or the last alone is learnt."""
    qwen3 = with_template(byte_level(), templates.REWRITES)
    turns = [("user", "Cât?"), ("assistant", "Trei."), ("user", "Și acum?"), ("assistant", "Patru.")]
    rows = [{"messages": [{"role": r, "content": f"{c} {i}"} for r, c in turns]} for i in range(20)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = chat_source(path, rewritten_answers=rewritten)
    caplog.set_level("INFO")
    made = prepared({"a": source}, folder=tmp_path / "p", tokenizer=qwen3, seq_lens=[128])["a"]
    manifest = made.manifests[128]
    is_split = rewritten == "split"
    name = "rewritten_answer_learnt_apart" if is_split else "rewritten_answer_not_learnt"
    assert manifest["changes"] == {name: 20, "answer_as_context": 20}
    assert manifest["documents_in"] == manifest["documents_out"] == (40 if is_split else 20)
    rows = [all_rows(made, split, 128) for split in ("train", "evaluation", "test")]
    learnt = "".join(qwen3.decode(r.ids_NT[r.learn_NT]) for r in rows)
    assert learnt.count("<think>\n\n</think>\n\nPatru.") == 20
    assert learnt.count("<think>\n\n</think>\n\nTrei.") == learnt.count("Trei.") == (20 if is_split else 0)
    assert "the chat template renders 20 answers otherwise once turns follow" in caplog.text


def test_answers_that_are_not_learnt_are_counted(tmp_path, tokenizer):
    def turns(*answers):
        pairs = [[{"role": "user", "content": "?"}, {"role": "assistant", **answer}] for answer in answers]
        return {"messages": [turn for pair in pairs for turn in pair]}

    rows = [turns({"content": f"Răspunsul {i}."}) for i in range(40)]
    rows += [
        turns({"content": "Nu."}, {"content": " "}, {"content": f"Da, {i}."}, {"content": "x", "train": False})
        for i in range(4)
    ]
    rows += [turns({"content": "Nu.", "weight": 0}, {"content": f"Ba da, {i}."}) for i in range(5)]
    rows += [{"messages": [{"role": "assistant", "content": "Bună!"}, *rows[i]["messages"]]} for i in range(6)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = chat_source(path, eval_fraction=0, test_fraction=0, split_by="document")
    made = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, documents="keep")["a"]
    manifest = manifest_of(made)
    assert manifest["changes"] == {"answer_as_context": 5, "begins_with_answer": 6, "blank_answer_not_learnt": 4}
    rows = all_rows(made, "train")
    learnt = tokenizer.decode(rows.ids_NT[rows.learn_NT])
    assert learnt.count("Nu.") == 4
    assert learnt.count("Bună!") == 6
    assert "system" not in learnt
    assert "assistant" not in learnt
    assert learnt.count("<|im_end|>") == sum(map(learnt.count, (".<|im_end|>", "!<|im_end|>")))
    # Kept documents say the same.
    kept = chat_source(tmp_path / "p", eval_fraction=0, test_fraction=0, split_by="document")
    kept.path = str(next((tmp_path / "p").rglob("documents")))
    again = prepared({"b": kept}, folder=tmp_path / "q", tokenizer=tokenizer)["b"]
    assert (all_rows(again, "train").learn_NT == rows.learn_NT).all()


def test_answers_cut_from_their_questions_are_counted_and_found(tmp_path, tokenizer):
    rows = [{"data": [f"întrebarea {i}?", " ".join(f"cuvântul {k}" for k in range(60))]} for i in range(20)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = chat_source(path, eval_fraction=0, test_fraction=0, duplicates=DuplicatesConfig(exact="keep"))
    made = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[64, 512])["a"]
    numbers = manifest_of(made)["splits"]["train"]
    assert 0.5 < numbers["supervised_without_prompt"] / numbers["supervised_tokens"] < 1
    p99 = made.manifests[64]["length_percentiles"]["99"]
    (finding,) = [f for f in audit_findings([made.manifests[64]]) if "lost their prompt" in f.message]
    assert finding.severity == "warning"
    assert f"trainer.seq_len={-(-p99 // 128) * 128} holds 99 % of the documents ({p99} tokens" in finding.message
    assert made.manifests[512]["splits"]["train"]["supervised_without_prompt"] == 0
    plain = prepared({"b": text_source(texts(tmp_path / "b.jsonl", 50))}, folder=tmp_path / "p", tokenizer=tokenizer)
    assert "supervised_without_prompt" not in manifest_of(plain["b"])["splits"]["train"]


def test_left_out_rows_are_reported_with_how_they_begin(tmp_path, tokenizer):
    long = " ".join(["cuvânt"] * 300)
    rows = [{"text": f"Textul lung numărul {i}, {long}"} for i in range(30)]
    rows += [{"text": "Scurt\nși rău."}, rows[4], {"body": "altceva"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = text_source(path, on_bad_row="skip", format="text", clean=CleanConfig(min_words=5))
    made = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[64])["a"]
    examples = {reason: found[0] for reason, found in manifest_of(made)["examples"].items()}
    assert examples["too_few_words"]["text"] == "Scurt și rău."
    assert examples["no_field"]["text"] == '{"body": "altceva"}'
    assert examples["exact_duplicate"]["message"] == "repeats line 5 of a.jsonl."
    assert examples["exact_duplicate"]["text"].startswith("Textul lung numărul 4, cuvânt")
    assert all(len(example["text"]) <= 200 for example in examples.values())
    (report,) = (tmp_path / "p").rglob("reported.jsonl")
    texts_of = {entry["reason"]: entry.get("text") for entry in map(json.loads, report.read_text().splitlines())}
    assert texts_of["no_field"] == '{"body": "altceva"}'
