"""Preference pairs from file to rows: tokens, the two segments of a pair, cut prompts, splits, duplicates, bad rows."""

import html
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.data import trl_pairs
from tests.data.preparing import REPOSITORY, all_rows, digests, prepared, write_lines
from tests.data.readers import read
from tests.data.small_tokenizers import byte_level, with_template
from tests.data.templates import QWEN25
from tpu_experiments.config.data_schema import CleanConfig, DataSourceConfig, DuplicatesConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.audit.findings import audit_findings
from tpu_experiments.data.audit.page import audit_pages
from tpu_experiments.data.audit.summary import answers_text, audit_table, pairs_text
from tpu_experiments.data.batches import Batch
from tpu_experiments.data.documents import Document
from tpu_experiments.data.steps.blocks import read_texts
from tpu_experiments.data.steps.pack import FlatTokens, flatten, pack
from tpu_experiments.data.steps.pairs import MARGIN, cut_prompts
from tpu_experiments.data.tokens.tokenize import CUT, LEARN, SECOND, DocumentTokenizer, Tokens, tokenize_pairs

WORDS = ["casa", "masa", "apa", "drum", "munte", "soare", "lună", "stea", "floare", "pădure"]


def pair_source(path, **values):
    return DataSourceConfig(path=str(path), kind="preference", **values)


def pair_row(number, *, words=3, prompt=None):
    """A pair of its own, with a prompt of so many words."""
    generator = random.Random(number)
    text = " ".join(generator.choices(WORDS, k=words))
    return {
        "prompt": f"Întrebarea {number}: {text}?" if prompt is None else prompt,
        "chosen": f"Da, {number}.",
        "rejected": f"Nu {number}, " + " ".join(generator.choices(WORDS, k=generator.randint(1, 9))) + ".",
    }


def tokens_of(documents, tokenizer):
    made = [each for _, each in tokenize_pairs(documents, tokenizer=DocumentTokenizer(tokenizer, marks_prompts=True))]
    assert all(isinstance(each, Tokens) for each in made), made
    return made


def documents_of(tmp_path, rows, **values):
    path = write_lines(tmp_path / "rows.jsonl", rows)
    documents = read(path, **({"kind": "preference", "format": "auto"} | values))
    assert all(isinstance(each, Document) for each in documents), documents
    return documents


def halves(tokens):
    """Ids and learnt of the chosen and of the rejected conversation."""
    at = int(np.flatnonzero(tokens.flags & SECOND)[0])
    learn = (tokens.flags & LEARN) > 0
    return (tokens.ids[:at], learn[:at]), (tokens.ids[at:], learn[at:])


@pytest.mark.parametrize("layout", trl_pairs.ROWS)
def test_tokens_are_those_of_trl(tmp_path, tokenizer, layout):
    """TRL also learns the line break behind the end of a turn, which no model generates."""
    recorded = json.loads(trl_pairs.FILE.read_text())[layout]
    documents = documents_of(tmp_path, trl_pairs.ROWS[layout], format=layout)
    for tokens, theirs in zip(tokens_of(documents, tokenizer), recorded, strict=True):
        for name, (ids, learn) in zip(("chosen", "rejected"), halves(tokens), strict=True):
            answer = theirs[f"{name}_ids"]
            assert ids.tolist() == theirs["prompt_ids"] + answer
            shown = [tokenizer.decode([token]) for token in answer]
            assert shown[-1] == "\n"
            assert learn.tolist() == [False] * len(theirs["prompt_ids"]) + [True] * (len(answer) - 1) + [False]


@pytest.mark.slow
def test_recorded_tokens_are_still_those_of_trl(tmp_path):
    code = "import json; from tests.data.trl_pairs import recorded; print(json.dumps(recorded()))"
    env = os.environ | {"USE_TORCH_XLA": "0", "HF_DATASETS_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(trl_pairs.FILE.read_text())


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_a_pair_is_two_segments_beside_each_other(tmp_path, tokenizer, packing):
    rows = [pair_row(number, words=1 + number % 7) for number in range(200)]
    source = pair_source(write_lines(tmp_path / "a.jsonl", rows), eval_fraction=0.0, test_fraction=0.0)
    found = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(256,), packing=packing)["x"]
    packed = all_rows(found, "train", 256)
    batch = Batch(packed.ids_NT, packed.learn_NT, packed.positions_NT, packed.segments_NT, labels=[])
    assert batch.num_answers == 2 * len(rows)
    wanted = {
        tuple(map(tuple, (chosen.tolist(), rejected.tolist()))): (first, second)
        for tokens in tokens_of(documents_of(tmp_path, rows), tokenizer)
        for (chosen, first), (rejected, second) in [halves(tokens)]
    }
    num_pairs = []
    for ids, learn, positions, segments in zip(
        packed.ids_NT, packed.learn_NT, packed.positions_NT, packed.segments_NT, strict=True
    ):
        last = int(segments.max())
        assert last % 2 == 0
        num_pairs.append(last // 2)
        used = segments[segments > 0]
        assert (np.diff(used) >= 0).all(), "segments are in order"
        assert not segments[len(used) :].any(), "padding is behind them"
        for chosen in range(1, last, 2):
            sides = [(ids[segments == each], learn[segments == each]) for each in (chosen, chosen + 1)]
            first, second = wanted.pop((tuple(sides[0][0].tolist()), tuple(sides[1][0].tolist())))
            assert (sides[0][1].tolist(), sides[1][1].tolist()) == (first.tolist(), second.tolist())
        for each in range(1, last + 1):
            assert positions[segments == each].tolist() == list(range(int((segments == each).sum())))
    assert not wanted, "every pair is in a row, once"
    assert (max(num_pairs) == 1) == (packing == "pad")
    assert found.manifests[256]["splits"]["train"]["documents"] == len(rows)


def turns(*texts):
    """A conversation of a user and an assistant by turns, each with the role's letter."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def cut_of(tmp_path, tokenizer, row, *, max_tokens):
    """The texts of both halves after a cut to so many tokens, and the counts."""
    [tokens] = tokens_of(documents_of(tmp_path, [row]), tokenizer)
    flat, counts = cut_prompts(flatten([tokens]), max_tokens=max_tokens)
    assert len(flat.ids_L) == len(flat.flags_L) == flat.lengths_D.sum()
    before = halves(tokens)
    after = halves(flat.document(0, start=0))
    for (ids, learn), (old, old_learn) in zip(after, before, strict=True):
        assert ids[learn].tolist() == old[old_learn].tolist(), "answers are never cut"
    assert len(before[0][0]) - len(after[0][0]) == len(before[1][0]) - len(after[1][0])
    return [tokenizer.decode(ids) for ids, _ in after], counts, len(tokens.ids)


CONVERSATION = turns("prima întrebare", "primul răspuns", "a doua întrebare, mai lungă", "al doilea", "a treia")


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Fii scurt."}]])
def test_whole_turns_of_a_long_prompt_go_first(tmp_path, tokenizer, system):
    row = {"prompt": [*system, *CONVERSATION], "chosen": "da da da", "rejected": "nu"}
    (_, _), _, whole = cut_of(tmp_path, tokenizer, row, max_tokens=10_000)
    head = "<s>" + "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in system)
    for max_tokens, kept in ((whole - 1, CONVERSATION[2:]), (whole - 60, CONVERSATION[4:])):
        texts, counts, _ = cut_of(tmp_path, tokenizer, row, max_tokens=max_tokens)
        for text, answer in zip(texts, ("da da da", "nu"), strict=True):
            own = [*kept, {"role": "assistant", "content": answer}]
            assert text == head + "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in own)
        assert (counts["documents_truncated"], counts["documents_truncated_in_turn"]) == (1, 0)


def test_the_last_question_is_cut_at_its_beginning(tmp_path, tokenizer):
    row = {"prompt": "unu doi trei patru cinci șase șapte opt nouă zece", "chosen": "da", "rejected": "nu nu"}
    _, _, whole = cut_of(tmp_path, tokenizer, row, max_tokens=10_000)
    texts, counts, _ = cut_of(tmp_path, tokenizer, row, max_tokens=whole - 5)
    for text, answer in zip(texts, ("da", "nu nu"), strict=True):
        asked = text.removeprefix("<s><|im_start|>user\n")
        question, _, rest = asked.partition("<|im_end|>")
        assert rest == f"\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert question != row["prompt"]
        assert row["prompt"].endswith(question)
    assert counts == {"documents_truncated": 1, "documents_truncated_in_turn": 1, "tokens_dropped": 6}


def test_a_pair_whose_answers_do_not_fit_is_dropped_and_counted(tmp_path, tokenizer):
    rows = [pair_row(number) for number in range(20)]
    rows[7]["rejected"] = " ".join(WORDS * 20)
    rows[8]["prompt"] = " ".join(WORDS * 20)
    source = pair_source(write_lines(tmp_path / "a.jsonl", rows), eval_fraction=0.0, test_fraction=0.0)
    kept = {}
    for long_documents in ("split", "drop"):
        folder = tmp_path / long_documents
        found = prepared(
            {"x": source}, folder=folder, tokenizer=tokenizer, seq_lens=(128,), long_documents=long_documents
        )
        manifest = found["x"].manifests[128]
        train = manifest["splits"]["train"]
        kept[long_documents] = (train["documents"], train["documents_truncated"], manifest["documents_reported"])
        assert train["documents_split"] == 0
        assert manifest["noticed"]["pairs"]["count"] == 20
        left_out = {"split": 1, "drop": 2}[long_documents]
        assert f"20 to train, {left_out} of them too long for a row but counted here, chosen" in plain(manifest)
    assert kept["split"] == (19, 1, {"too_long": 1})
    assert kept["drop"] == (18, 0, {"too_long": 2})


def plain(manifest):
    return pairs_text(manifest).replace("\xa0", " ")


@pytest.mark.parametrize("ends", [("da", "nu"), ("da", "da, dar altfel")])
def test_turns_of_answers_are_no_prompt(tmp_path, tokenizer, ends):
    """The two answers begin in one turn and go on with questions of their own, which stay."""
    sides = [[*CONVERSATION, {"role": "assistant", "content": end}, *turns("alta", end)] for end in ends]
    row = {"chosen": sides[0], "rejected": sides[1]}
    _, _, whole = cut_of(tmp_path, tokenizer, row, max_tokens=10_000)
    for less in range(1, 200, 9):
        texts, counts, _ = cut_of(tmp_path, tokenizer, row, max_tokens=whole - less)
        for text, end in zip(texts, ends, strict=True):
            own = turns("alta", end)
            answer = [{"role": "assistant", "content": end}, *own]
            assert text.endswith("".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in answer)), less
    assert counts["documents_truncated"] == 0


def test_special_tokens_in_a_prompt_are_text_and_the_prompt_is_still_cut(tmp_path, tokenizer):
    row = {
        "prompt": "<|im_end|> unu doi trei patru cinci șase <|im_start|> șapte opt",
        "chosen": "da",
        "rejected": "nu",
    }
    _, _, whole = cut_of(tmp_path, tokenizer, row, max_tokens=10_000)
    texts, _, _ = cut_of(tmp_path, tokenizer, row, max_tokens=whole - 20)
    assert all("șapte opt<|im_end|>\n<|im_start|>assistant" in text for text in texts)
    assert all(text.startswith("<s><|im_start|>user\n") for text in texts)


def test_a_default_system_text_stays_when_a_prompt_is_cut(tmp_path):
    tokenizer = with_template(byte_level(), QWEN25)
    row = {"prompt": CONVERSATION, "chosen": "da", "rejected": "nu"}
    _, _, whole = cut_of(tmp_path, tokenizer, row, max_tokens=10_000)
    texts, counts, _ = cut_of(tmp_path, tokenizer, row, max_tokens=whole - 1)
    for text in texts:
        assert text.startswith("<|im_start|>system\nYou are Qwen")
        assert "<|im_start|>user\na doua întrebare" in text
        assert "primul" not in text
    assert counts["documents_truncated_in_turn"] == 0


def test_random_pairs_fit_after_the_cut_or_stay_whole(tmp_path, tokenizer):
    generator = random.Random(0)
    rows = []
    for number in range(120):
        texts = [
            " ".join(generator.choices(WORDS, k=generator.randint(1, 30))) for _ in range(generator.choice((1, 3, 5)))
        ]
        rows.append({**pair_row(number), "prompt": turns(*texts)})
    flat = flatten(tokens_of(documents_of(tmp_path, rows), tokenizer))
    cut, counts = cut_prompts(flat, max_tokens=128)
    changed = cut.lengths_D != flat.lengths_D
    assert 20 < counts["documents_truncated"] == np.count_nonzero(changed) < 120
    assert (cut.lengths_D[changed] <= 128).all()
    assert counts["tokens_dropped"] == flat.lengths_D.sum() - cut.lengths_D.sum()
    packed = pack(cut, seq_len=128, pad_id=0, long_documents="drop")
    assert packed.rows.num_supervised == np.count_nonzero(flat.flags_L & LEARN)
    assert packed.counts["too_long"] == np.count_nonzero(cut.lengths_D > 128)


@pytest.mark.parametrize(("lengths", "segments"), [((9, 4), [[1, 1, 2, 2, 0, 0]]), ((9,), [])])
def test_a_pair_without_a_row_may_stand_in_front(lengths, segments):
    """Its second conversation was looked for in the last pair of a row, or among none."""
    flags = [np.full(length, LEARN, np.uint8) for length in lengths]
    for own in flags:
        own[len(own) // 2] |= SECOND
    ids = np.arange(sum(lengths), dtype=np.int32)
    flat = FlatTokens(ids, np.concatenate(flags), np.array(lengths))
    assert pack(flat, seq_len=6, pad_id=0, long_documents="drop").rows.segments_NT.tolist() == segments


@pytest.mark.parametrize("near", [None, 0.8])
def test_all_pairs_of_a_prompt_are_on_one_side(tmp_path, tokenizer, near):
    systems = ("", "Fii scurt.", "Fii politicos.")
    rows = [
        {
            **pair_row(10 * number + answer, prompt=f"Întrebarea {number}: {WORDS[number % 10]}?"),
            "system": systems[answer],
        }
        for number in range(60)
        for answer in range(3)
    ]
    source = pair_source(
        write_lines(tmp_path / "a.jsonl", rows),
        eval_fraction=0.3,
        test_fraction=0.2,
        duplicates=DuplicatesConfig(near=near),
    )
    found = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(256,))["x"]
    side = {}
    for split in ("train", "evaluation", "test"):
        packed = all_rows(found, split, 256)
        for ids, segments in zip(packed.ids_NT, packed.segments_NT, strict=True):
            for segment in range(1, int(segments.max()) + 1):
                text = tokenizer.decode(ids[segments == segment])
                prompt = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
                side.setdefault(prompt, set()).add(split)
    assert len(side) == 60
    assert all(len(splits) == 1 for splits in side.values())
    assert {split for splits in side.values() for split in splits} == {"train", "evaluation", "test"}
    overlaps = found.manifests[256]["overlaps"]
    assert not any(overlaps.values())


def test_duplicates_are_of_whole_pairs(tmp_path, tokenizer):
    rows = [pair_row(number, words=12) for number in range(30)]
    rows += [
        rows[3],
        {**rows[4], "rejected": "altceva"},
        {**rows[5], "chosen": rows[5]["rejected"], "rejected": rows[5]["chosen"]},
    ]
    long = " ".join(f"{word}{number}" for number in range(12) for word in WORDS)
    rows += [{"prompt": long, "chosen": "da", "rejected": "nu"}, {"prompt": long, "chosen": "da", "rejected": "nu."}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = pair_source(path, eval_fraction=0.0, test_fraction=0.0, duplicates=DuplicatesConfig(near=0.8))
    manifest = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(4096,))["x"].manifests[4096]
    reported = manifest["documents_reported"]
    assert reported["exact_duplicate"] == 1
    assert reported["near_duplicate"] >= 1
    assert manifest["documents_in"] == len(rows)


def test_bad_pairs_stop_the_run_or_are_counted(tmp_path, tokenizer):
    rows = [pair_row(number) for number in range(20)]
    rows[4]["rejected"] = f"{rows[4]['chosen']}  "
    rows[5]["rejected"] = rows[5]["chosen"]
    rows[6]["chosen"] = ""
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = pair_source(path, eval_fraction=0.0, test_fraction=0.0)
    with pytest.raises(
        ConfigError, match=r"line 6 of a.jsonl has the same answer as chosen and rejected, .*on_bad_row=skip"
    ):
        prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(128,))
    source.on_bad_row = "skip"
    rows[7] |= {"chosen": "if a:\n    b", "rejected": "if a:\n b"}
    write_lines(tmp_path / "a.jsonl", rows)
    manifest = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(128,))["x"].manifests[128]
    assert manifest["documents_reported"] == {"empty_answer": 1, "same_answers": 2}
    told = [example["message"] for example in manifest["examples"]["same_answers"]]
    assert [("blanks at their ends" in message) for message in told] == [False, True]
    trims = with_template(tokenizer, tokenizer.chat_template.replace("message['content']", "message['content'] | trim"))
    manifest = prepared({"x": source}, folder=tmp_path, tokenizer=trims, seq_lens=(128,))["x"].manifests[128]
    assert manifest["documents_reported"] == {"empty_answer": 1, "same_answers": 2}
    places = [example["place"] for example in manifest["examples"]["same_answers"]]
    assert places == ["line 6 of a.jsonl", "line 5 of a.jsonl"]


def test_kept_documents_are_read_back_as_the_same_pairs(tmp_path, tokenizer):
    rows = [
        pair_row(number) | {"score_chosen": 2.0, "score_rejected": 1.0, "system": "Fii scurt."} for number in range(9)
    ]
    rows[0]["prompt"] = CONVERSATION
    source = pair_source(write_lines(tmp_path / "a.jsonl", rows), eval_fraction=0.0, test_fraction=0.0)
    prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(256,), documents="keep")
    (kept,) = tmp_path.rglob("*.parquet")
    first = documents_of(tmp_path, rows)
    again = read(kept, kind="preference", format="auto")
    assert [(each.content, each.scores) for each in again] == [(each.content, each.scores) for each in first]
    texts = read_texts(str(kept.parent), kept.stem)
    assert texts[1] == [text for half in (first[1], first[1].rejected) for _, text in half.messages]


OF_MARGINS = {"reads_margin": True, "arrays": (MARGIN,)}


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_margins_are_at_the_last_tokens_of_their_pairs(tmp_path, tokenizer, packing):
    """Also of pairs whose prompts are cut; data prepared without margins lies beside, and is found again."""
    rows = [pair_row(number, words=1 + number % 7) | {"margin": 0.5 + number / 8} for number in range(40)]
    rows[3]["prompt"], rows[4]["margin"] = " ".join(WORDS * 20), "-1.25"
    source = pair_source(write_lines(tmp_path / "a.jsonl", rows), eval_fraction=0.0, test_fraction=0.0)
    common = {"folder": tmp_path, "tokenizer": tokenizer, "seq_lens": (128,), "packing": packing}
    plain_one = prepared({"x": source}, **common)["x"]
    assert plain_one.manifests[128]["not_read"] == {"margin": 40}
    before = digests(plain_one.folders[128])
    found = prepared({"x": source}, own=OF_MARGINS, documents="keep", **common)["x"]
    assert found.arrays(128) == (MARGIN,)
    assert found.manifests[128]["not_read"] == {}
    packed, margins = all_rows(found, "train", 128), []
    for ids, segments, margin in zip(packed.ids_NT, packed.segments_NT, packed.more["margin"], strict=True):
        last = np.flatnonzero((segments > 0) & (segments % 2 == 0) & (segments != np.append(segments[1:], 0)))
        assert not np.delete(margin, last).any()
        text = tokenizer.decode(ids)
        numbers = [int(number) for number in re.findall(r"Nu (\d+),", text)]
        assert margin[last].tolist() == [-1.25 if number == 4 else 0.5 + number / 8 for number in numbers]
        margins += numbers
    assert sorted(margins) == list(range(40))
    (kept,) = tmp_path.rglob("*.parquet")
    again = read(kept, kind="preference", format="auto", reads_margin=True)
    assert [each.margin for each in again][3:6] == [0.875, -1.25, 1.125]
    assert prepared({"x": source}, **common)["x"].folders == plain_one.folders
    assert digests(plain_one.folders[128]) == before


@pytest.mark.parametrize("value", [None, "mult", True, float("inf"), [1.0], "lipsă"])
def test_a_margin_that_is_no_number_is_told_with_its_column(tmp_path, tokenizer, value):
    rows = [pair_row(number) | {"how_much": 1} for number in range(8)]
    rows[5]["how_much"] = value
    if value == "lipsă":
        del rows[5]["how_much"]
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = pair_source(path, eval_fraction=0.0, test_fraction=0.0, fields={"margin": "how_much"})
    shown = "null" if value == "lipsă" else re.escape(json.dumps(value))
    with pytest.raises(
        ConfigError, match=rf"line 6 of a.jsonl has {shown} in 'how_much', which objective.margin=true reads as"
    ):
        prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(128,), own=OF_MARGINS)
    source.on_bad_row = "skip"
    found = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(128,), own=OF_MARGINS)["x"]
    assert found.manifests[128]["documents_reported"] == {"bad_margin": 1}


def test_a_reader_of_the_users_own_gives_pairs(tmp_path, tokenizer):
    sides = [
        (("user", f"Întrebarea {n}"), ("assistant", answer)) for n in range(8) for answer in (f"da {n}", f"nu {n}")
    ]
    own = [
        Document(str(n), messages=chosen, rejected=Document(str(n), messages=rejected))
        for n, (chosen, rejected) in enumerate(zip(sides[::2], sides[1::2], strict=True))
    ]
    source = pair_source(tmp_path, eval_fraction=0.0, test_fraction=0.0, on_bad_row="skip")
    readers = {"x": lambda spec: iter([*own, Document("9", messages=sides[0])])}
    found = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(128,), readers=readers)["x"]
    assert found.manifests[128]["splits"]["train"]["documents"] == 8
    assert found.manifests[128]["documents_reported"] == {"no_pair": 1}


SOURCES = ("ultrafeedback_binarized", "orca_dpo_pairs", "ro_dpo_helpsteer", "stories_pairs_ro")


@pytest.mark.parametrize("name", SOURCES)
def test_the_samples_of_shipped_sources_are_read_whole(tmp_path, tokenizer, name):
    values = OmegaConf.to_object(OmegaConf.load(REPOSITORY / "conf" / "data" / f"{name}.yaml"))[name]
    source = DataSourceConfig(**values | {"clean": CleanConfig(**values.get("clean", {}))})
    assert source.kind == "preference"
    sources = {"x": replace(source, eval_fraction=0.0, test_fraction=0.0, max_documents=100)}
    found = prepared(sources, folder=tmp_path, tokenizer=tokenizer, seq_lens=(512,), data_size="sample")
    manifest = found["x"].manifests[512]
    with open(REPOSITORY / source.sample_path, encoding="utf-8") as file:
        num_lines = min(100, sum(1 for _ in file))
    assert manifest["splits"]["train"]["documents"] == manifest["noticed"]["pairs"]["count"] == num_lines
    assert manifest["not_read"] == ({"prompt_id": num_lines} if name == "ultrafeedback_binarized" else {})
    assert not [f for f in audit_findings([manifest]) if f.severity == "error"]


def audited(tmp_path, tokenizer, rows, **fields):
    """The manifest and the training rows of pairs that are all trained on."""
    path = write_lines(tmp_path / "a.jsonl", rows)
    source = pair_source(path, eval_fraction=0.0, test_fraction=0.0, fields=fields)
    found = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(256,))["x"]
    return found.manifests[256], found.store("train", 256)


def scored(number, *, chosen, rejected):
    """A pair with scores and answers of equal length."""
    row = pair_row(number) | {"chosen": f"Da, {number}.", "rejected": f"Nu, {number}."}
    return row | {"score_chosen": chosen, "score_rejected": rejected}


def test_scores_that_contradict_the_order_are_counted_and_swapped_columns_are_an_error(tmp_path, tokenizer):
    rows = [scored(n, chosen=5.0, rejected=7.0 if n < 3 else 5.0 if n < 6 else 2.0) for n in range(20)]
    manifest, _ = audited(tmp_path / "few", tokenizer, [*rows, pair_row(30)])
    pairs = manifest["noticed"]["pairs"]
    assert (pairs["count"], pairs["scored"], pairs["contradicted"]) == (21, 20, 3)
    assert "scores contradict the order in 3 of 20" in " ".join(audit_table([manifest]).split())
    (few,) = [f for f in audit_findings([manifest]) if "scores" in f.message]
    assert few.severity == "warning"
    swapped = {
        "chosen": "rejected",
        "rejected": "chosen",
        "score_chosen": "score_rejected",
        "score_rejected": "score_chosen",
    }
    manifest, _ = audited(tmp_path / "most", tokenizer, rows[6:], **swapped)
    (most,) = [f for f in audit_findings([manifest]) if "scores" in f.message]
    assert most.severity == "error"
    assert most.message.startswith("data.x; 14 of 14 training pairs (100.0 %) with scores have the higher score at")


def test_a_side_that_is_longer_is_told_with_lengths(tmp_path, tokenizer):
    rows = [scored(n, chosen=1, rejected=0) for n in range(20)]
    manifest, _ = audited(tmp_path / "even", tokenizer, rows)
    assert not [f for f in audit_findings([manifest]) if "longer" in f.message]
    rows = [row | {"chosen": f"Da, {row['prompt']}"} for row in rows[:17]] + rows[17:]
    manifest, _ = audited(tmp_path / "long", tokenizer, rows)
    pairs = manifest["noticed"]["pairs"]
    assert (pairs["chosen_longer"], pairs["rejected_longer"]) == (17, 0)
    tokens = tokens_of(documents_of(tmp_path, rows), tokenizer)
    lengths = np.array([[learn.sum() for _, learn in halves(each)] for each in tokens])
    assert [pairs["chosen_tokens"], pairs["rejected_tokens"]] == lengths.sum(axis=0).tolist()
    (longer,) = [f for f in audit_findings([manifest]) if "longer" in f.message]
    assert longer.severity == "warning"
    assert "the chosen answer is the longer one of 17 of 20 training pairs (85.0 %)" in longer.message


def test_the_page_shows_pairs_side_by_side(tmp_path, tokenizer):
    rows = [pair_row(number) for number in range(12)]
    manifest, store = audited(tmp_path, tokenizer, rows)
    pages = audit_pages([manifest], stores={("x", 256): store}, tokenizer=tokenizer, name="audit")
    (text,) = pages.values()
    table = text[text.index("Pairs, side by side") :].partition("</table>")[0]
    cells = [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", line)] for line in table.split("<tr>")[2:]]
    assert cells
    for prompt, chosen, rejected, lengths in cells:
        (row,) = [row for row in rows if row["prompt"] in prompt]
        assert chosen == f"{row['chosen']}<|im_end|>"
        assert rejected == f"{row['rejected']}<|im_end|>"
        first, second = map(int, lengths.split(" and "))
        assert first == len(tokenizer(chosen)["input_ids"]) - len(tokenizer("")["input_ids"])
        assert second == len(tokenizer(rejected)["input_ids"]) - len(tokenizer("")["input_ids"])


def test_tokens_of_conversations_have_no_flag_of_pairs(tmp_path, tokenizer):
    """Their flags have no bit of pairs, so that tokens of before are read as ever."""
    texts = write_lines(
        tmp_path / "chat.jsonl", [{"messages": turns("a", "b", "c", "d")}, {"messages": turns("e", "f")}]
    )
    [first, second] = read(texts, kind="chat", format="messages")
    made = DocumentTokenizer(tokenizer).tokenize([first, second])
    assert all((each.flags & ~np.uint8(LEARN | CUT) == 0).all() for each in made)


def single(number, *, good=True, answer="Da, {number}."):
    """A single answer with its label."""
    row = pair_row(number)
    return {"prompt": row["prompt"], "completion": answer.format(number=number), "label": good}


def test_a_single_answer_is_one_side_of_a_pair(tmp_path, tokenizer):
    """The other side is one token, the first one, which is not learnt; the label says which side it is."""
    plain = [single(number, good=number % 3 > 0) for number in range(6)]
    asked = [{"role": "user", "content": row["prompt"]} for row in plain]
    told = [{"role": "assistant", "content": row["completion"]} for row in plain]
    words = ("good", "bad", "desirable", "undesirable", 1, 0, "True", "false", 1.0, 0.0)
    rows = {
        "plain": plain,
        "turns": [
            {"prompt": [q], "completion": [a], "label": row["label"]}
            for q, a, row in zip(asked, told, plain, strict=True)
        ],
        "whole": [{"messages": [q, a], "kto_tag": row["label"]} for q, a, row in zip(asked, told, plain, strict=True)],
    }
    found = {}
    for name, own in rows.items():
        (tmp_path / name).mkdir()
        found[name] = [
            (t.ids.tolist(), t.flags.tolist()) for t in tokens_of(documents_of(tmp_path / name, own), tokenizer)
        ]
    assert found["plain"] == found["turns"] == found["whole"]
    pairs = [{**row, "chosen": row["completion"], "rejected": "Nu."} for row in plain]
    for row, tokens, pair in zip(
        plain,
        tokens_of(documents_of(tmp_path, plain), tokenizer),
        tokens_of(
            documents_of(tmp_path, [{k: p[k] for k in ("prompt", "chosen", "rejected")} for p in pairs]), tokenizer
        ),
        strict=True,
    ):
        own, other = halves(tokens)[:: 1 if row["label"] else -1]
        assert [each.tolist() for each in own] == [each.tolist() for each in halves(pair)[0]]
        assert (other[0].tolist(), other[1].tolist()) == (own[0][:1].tolist(), [False])
    labels = documents_of(tmp_path, [{**single(n), "label": word} for n, word in enumerate(words)])
    assert [document.label for document in labels] == ["true", "false"] * 5


def test_single_answers_keep_their_side_in_rows_and_are_counted(tmp_path, tokenizer):
    rows = [
        single(number, good=number % 10 < 7, answer="Da, {number}." if number % 2 else "Nu {number}.")
        for number in range(200)
    ]
    source = pair_source(write_lines(tmp_path / "a.jsonl", rows), eval_fraction=0.0, test_fraction=0.0)
    found = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(256,))["x"]
    packed, sides = all_rows(found, "train", 256), [0, 0]
    for learn, segments in zip(packed.learn_NT, packed.segments_NT, strict=True):
        for number in range(1, int(segments.max()) + 1, 2):
            learnt = [bool(learn[segments == each].any()) for each in (number, number + 1)]
            assert sum(learnt) == 1
            sides[learnt.index(True)] += 1
            assert int((segments == number + learnt.index(False)).sum()) == 1
    assert sides == [140, 60]
    manifest = found.manifests[256]
    assert manifest["noticed"]["answers"] == {"good": 140, "bad": 60}
    assert answers_text(manifest).replace("\xa0", " ") == (
        "140 good (70.0 %), 60 bad (30.0 %), balanced by objective.undesirable_weight=1.75 to 2.33"
    )


@pytest.mark.parametrize("good", [True, False])
def test_the_prompt_of_a_single_answer_is_cut(tmp_path, tokenizer, good):
    row = {"prompt": CONVERSATION, "completion": "da da da", "label": good}
    [tokens] = tokens_of(documents_of(tmp_path, [row]), tokenizer)
    flat, counts = cut_prompts(flatten([tokens]), max_tokens=len(tokens.ids) - 1)
    own, other = halves(flat.document(0, start=0))[:: 1 if good else -1]
    assert counts["documents_truncated"] == 1
    assert len(other[0]) == 1
    text = tokenizer.decode(own[0])
    assert "prima" not in text
    assert text.startswith("<s><|im_start|>user\na doua întrebare")
    assert "da da da" in text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "Ce?", "completion": "Da.", "label": "maybe"}, "has \"maybe\" in 'label'"),
        ({"prompt": "Ce?", "completion": "Da.", "label": 2}, "has 2 in 'label'"),
        ({"prompt": "Ce?", "completion": " ", "label": True}, "has an empty answer in 'completion'"),
        ({"prompt": "Ce?", "output": [{"role": "assistant", "content": " "}], "kto_tag": 1}, "answer in 'output'"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], "label": 1},
            "'messages'",
        ),
        ({"question": " ", "completion": "Da.", "label": True}, "has nothing in 'question', which"),
        ({"question": None, "completion": "Da.", "label": True}, "has nothing in 'question', which"),
        ({"prompt": "Ce?", "response": None, "label": True}, "has an empty answer in 'response'"),
        ({"prompt": "Ce?", "response": "Da.", "kto_tag": None}, "has null in 'kto_tag'"),
        ({"prompt": "Ce?", "label": True}, "a turn of the assistant in 'prompt' nor a field 'completion or response"),
    ],
)
def test_a_bad_single_answer_is_told(tmp_path, row, said):
    path = write_lines(tmp_path / "rows.jsonl", [single(0), row])
    _, refused = read(path, kind="preference", format="unpaired")
    assert said in refused.message


def test_an_empty_answer_of_a_pair_is_told_with_its_column(tmp_path):
    row = {"prompt": "Ce?", "chosen_response": "Da.", "rejected_response": [{"role": "assistant", "content": " "}]}
    path = write_lines(tmp_path / "rows.jsonl", [row])
    (refused,) = read(path, kind="preference", format="explicit_prompt")
    assert "has an empty answer in 'rejected_response'" in refused.message


@pytest.mark.parametrize("format", ["explicit_prompt", "implicit_prompt"])
def test_a_null_is_told_with_its_column(tmp_path, format):
    prompt = [{"role": "user", "content": "Ce?"}]
    chosen = [*(prompt if format == "implicit_prompt" else []), {"role": "assistant", "content": "Da."}]
    rows = [{"question": "Ce?", "chosen": chosen, "rejected_response": None}]
    if format == "explicit_prompt":
        rows.append({"question": None, "chosen": "Da.", "rejected_response": "Nu."})
    found = read(write_lines(tmp_path / "rows.jsonl", rows), kind="preference", format=format)
    assert "has an empty answer in 'rejected_response'" in found[0].message
    assert all("has nothing in 'question', which" in refused.message for refused in found[1:])


def test_a_system_turn_in_one_conversation_alone_is_told(tmp_path):
    turns = [{"role": "user", "content": "Ce?"}, {"role": "assistant", "content": "Da."}]
    other = [{"role": "system", "content": "Scurt."}, turns[0], {"role": "assistant", "content": "Nu."}]
    path = write_lines(tmp_path / "rows.jsonl", [{"chosen": turns, "rejected": other}])
    (refused,) = read(path, kind="preference", format="implicit_prompt")
    assert "in 'chosen' and 'rejected' that begin with a system turn in the rejected one alone" in refused.message


def test_turns_behind_the_answers_are_told_as_not_read(tmp_path):
    turns = [{"role": "user", "content": "Ce?"}, {"role": "assistant", "content": "Da."}]
    more = [turns[0], {"role": "assistant", "content": "Nu."}, {"role": "user", "content": "Mulțumesc."}]
    path = write_lines(
        tmp_path / "pairs.jsonl", [{"chosen": turns, "rejected": more}, {"chosen": turns, "rejected": more[:2]}]
    )
    found = read(path, kind="preference", format="implicit_prompt")
    assert [each.unread for each in found] == [("rejected[] after its last answer",), ()]
    path = write_lines(tmp_path / "single.jsonl", [{"messages": more, "label": True}])
    (single_answer,) = read(path, kind="preference", format="unpaired")
    assert single_answer.unread == ("messages[] after its last answer",)
    (conversation,) = read(write_lines(tmp_path / "chats.jsonl", [{"messages": more}]), kind="chat", format="messages")
    assert conversation.unread == ("turns after the last answer",)
    assert len(conversation.messages) == 2
    assert [role for role, _ in single_answer.messages] == ["user", "assistant"]


def test_rows_without_a_label_are_no_single_answers(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "Ce?", "completion": "Da."}])
    with pytest.raises(
        ConfigError, match=r"they have prompt \(str\), completion \(str\).*prompt, completion and label"
    ):
        read(path, kind="preference", format="auto")


def test_contradicting_labels_of_one_answer_are_no_duplicates(tmp_path, tokenizer):
    rows = [single(number, good=good) for number in range(20) for good in (True, False, True)]
    source = pair_source(write_lines(tmp_path / "a.jsonl", rows), eval_fraction=0.0, test_fraction=0.0)
    found = prepared({"x": source}, folder=tmp_path, tokenizer=tokenizer, seq_lens=(256,))["x"]
    assert found.manifests[256]["noticed"]["answers"] == {"good": 20, "bad": 20}
