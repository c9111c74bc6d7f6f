"""What is suspicious about documents: seen in each, and counted over the training split whoever prepares it."""

import json
import random

import numpy as np
import pytest

from tests.data.preparing import all_rows, chat_source, prepared, text_source, write_lines
from tests.data.small_tokenizers import with_template
from tests.data.templates import CHATML
from tpu_experiments.config.data_schema import DuplicatesConfig
from tpu_experiments.data.audit.findings import audit_findings
from tpu_experiments.data.documents import Document
from tpu_experiments.data.steps import blocks
from tpu_experiments.data.steps.notices import ECHO, EMPTY_THOUGHT, OPEN, RENDERED, Noticed, marker_of, notices_of
from tpu_experiments.data.tokens.tokenize import LEARN, Tokens

THINKS = CHATML.replace(
    "message['content']",
    "('<think>\\n\\n</think>\\n\\n' if message['role'] == 'assistant' and '<think>' not in message['content'] else '')"
    " + message['content']",
)


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("<|im_start|>user\nSalut<|im_end|>\n", "<|im_start|>"),
        ("<s>[INST] Salut [/INST] Bună! </s>", "[INST]"),
        ("[INST] <<SYS>>\nScurt.\n<</SYS>>\n\nSalut [/INST]", "[INST]"),
        ("<start_of_turn>user\nSalut<end_of_turn>\n<start_of_turn>model\n", "<start_of_turn>"),
        ("<|turn>user\nSalut<turn|>\n", "<|turn>"),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nSalut<|eot_id|>", "<|begin_of_text|>"),
        ("<|user|>\nSalut</s>\n<|assistant|>\nBună!</s>", "<|user|>"),
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Salut", "<|START_OF_TURN_TOKEN|>"),
        ("<｜begin▁of▁sentence｜><｜User｜>Salut<｜Assistant｜>Bună!", "<｜begin▁of▁sentence｜>"),
        ("<｜User｜>Salut<｜Assistant｜>Bună!", "<｜User｜>"),
        ("<|start|>user<|message|>Salut<|end|><|start|>assistant<|channel|>final<|message|>Bună!", "<|start|>"),
        ("[|user|]Salut\n[|assistant|]Bună!", "[|user|]"),
        ("<extra_id_1>User\nSalut\n<extra_id_1>Assistant\nBună!", "<extra_id_1>User"),
        ("<human>: Salut\n<bot>: Bună!", "<human>:"),
        ("### Human: Salut\n### Assistant: Bună!", "### Human: and ### Assistant:"),
        ("Below is.\n\n### Instruction:\nSalută.\n\n### Response:\nBună!", "### Instruction: and ### Response:"),
        ("A chat. USER: Salut ASSISTANT: Bună!", "USER: and ASSISTANT:"),
        ("\n\nHuman: Salut\n\nAssistant: Bună!", "Human: and Assistant:"),
    ],
)
def test_marks_of_every_family_are_seen(text, marker):
    assert marker_of(Document("1", text=text)) == marker


@pytest.mark.parametrize(
    "text",
    [
        "let f = x <| y |> z // F#, and a <|> b of a parser, a<||>b",
        "[INSTALL] Run it. [/INSTALLED] [1|2] [a | b] <http://a.ro> <div>| x |</div>",
        "User: root\nHost: a\n",
        "The assistant: a play. USER manual. Human: a story.",
        "### Introduction:\nText.\n### Results:\nMore.\n## Response: a heading",
        "Ana are mere. #### Human rights",
        "<p>Hello</p> a < b | c > d",
    ],
)
def test_other_texts_have_none(text):
    assert marker_of(Document("1", text=text)) == ""


def test_conversations_are_looked_at_turn_by_turn():
    def marker(*contents):
        roles = ("user", "assistant") * 2
        return marker_of(Document("1", messages=tuple(zip(roles, contents, strict=False))))

    assert marker("Salut", "<|im_start|>assistant\nBună!") == "<|im_start|>"
    assert marker("### Human: Salut", "### Assistant: Bună!") == "", "a mark in words needs both sides in one turn"
    assert marker("User: a\nAssistant: b", "Continuă.") == "", "a dialogue may be quoted"


def tokens(*flags):
    return Tokens(np.arange(len(flags), dtype=np.int32), np.array(flags, np.uint8), "1")


def test_the_arrays_of_a_block():
    chat = Document(
        "1", messages=(("user", "Ce?"), ("assistant", "Da."), ("user", "Și apoi"), ("assistant", "Și apoi "))
    )
    context = Document(
        "2", messages=(("user", "Da."), ("assistant", "Da."), ("user", "b"), ("assistant", "și")), context=(3,)
    )
    text = Document("3", text="<|im_start|>user\nDa.")
    thought = tokens(0, LEARN)
    thought.has_empty_thought = True
    made = [(chat, tokens(0, LEARN, 0, LEARN, LEARN)), (context, thought), (text, tokens(0, *[LEARN] * 5))]
    arrays, examples = notices_of(made)
    assert arrays["marks"].tolist() == [OPEN | ECHO, EMPTY_THOUGHT | ECHO, RENDERED]
    assert arrays["ends"].tolist() == [[8, 2], [3, 1], [20, 5]]
    assert len(set(arrays["answers"].tolist())) == 3
    assert examples["markers"] == {"<|im_start|>": 1}
    arrays, examples = notices_of([])
    assert (arrays["ends"].shape, arrays["answers"].shape, examples) == ((0, 2), (0,), {"markers": {}})


def test_one_answer_of_most_is_found_in_little_memory(monkeypatch):
    monkeypatch.setattr("tpu_experiments.data.steps.notices._KEPT_SUM", 32)
    rng, noticed = np.random.default_rng(0), Noticed()
    for block in range(40):
        own = np.arange(60, dtype=np.uint64) + np.uint64(100 + 60 * block)
        answers = rng.permutation(np.concatenate([own, np.full(70, 7, np.uint64)]))
        arrays = {"marks": np.zeros(130, np.uint8), "ends": np.zeros((130, 2), np.int32), "answers": answers}
        noticed.add(arrays, {"markers": {}, "answer": [7, "Da."]}, chosen_D=np.ones(130, np.bool_))
        assert len(noticed.answers) <= 64
    assert noticed.counts()["same_answer"] == {"documents": 40 * 70, "text": "Da."}


def chats(path, count=300):
    """Conversations of each suspicious kind, some of them twice."""
    rng, rows = random.Random(0), []
    for i in range(count):
        question, answer = f"Întrebarea {i}?", f"Răspunsul {i}."
        if i % 10 == 0:
            answer = question
        elif i % 10 == 1:
            answer = "".join(rng.choices("abcdefgh ", k=299)) + "x"
        elif i % 10 == 2:
            question = f"<|im_start|>{question}"
        elif i % 10 == 3:
            answer = "<think>da</think>Da."
        elif i > count // 5:
            answer = "Nu știu."
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return write_lines(path, [*rows, *rows[:40]])


def test_counts_are_those_of_the_training_documents(tmp_path, tokenizer, monkeypatch):
    """Whatever the number of workers and blocks, and after a kill; copies and held-out documents are not counted."""
    path = chats(tmp_path / "a.jsonl")
    thinking = with_template(tokenizer, THINKS)
    source = chat_source(path, eval_fraction=0.2)

    def noticed(folder, **settings):
        made = prepared({"a": source}, folder=tmp_path / folder, tokenizer=thinking, seq_lens=[256], **settings)["a"]
        return made, made.manifests[256]["noticed"]

    made, whole = noticed("whole", workers=1, window_tokens=500)
    held = {text for split in ("evaluation", "test") for text in questions(made, split, thinking)}
    kept = [i for i in range(300) if f"Întrebarea {i}?" not in held]
    assert 200 < len(kept) < 290
    assert whole["documents"] == len(kept)
    assert whole["echoes"] == sum(i % 10 == 0 for i in kept)
    assert whole["rendered"] == sum(i % 10 == 2 for i in kept)
    assert whole["markers"] == ["<|im_start|>"]
    assert whole["empty_thoughts"] == sum(i % 10 != 3 for i in kept)
    same = sum(i % 10 > 3 and i > 60 for i in kept)
    assert whole["same_answer"] == {"documents": same, "text": "Nu știu."}
    cut = sum(i % 10 == 1 for i in kept)
    assert whole["equal_ends"]["characters"] == {
        "length": 300, "documents": cut, "inside_a_sentence": cut, "near": 0.0
    }  # fmt: skip
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 24)
    made, blocked = noticed("blocks", workers=1, window_tokens=500)
    assert blocked | {"learnt_per_turn": whole["learnt_per_turn"]} == whole, "windows end where blocks do"
    assert len(list((tmp_path / "blocks").rglob("*.index.safetensors"))) == 15
    for marker in [*(tmp_path / "blocks").rglob("manifest.json"), *(tmp_path / "blocks").rglob("blocks.json")]:
        marker.unlink()
    for index in sorted((tmp_path / "blocks").rglob("*.index.safetensors"))[::3]:
        index.unlink()  # written last, so what a kill leaves lacks it
    assert noticed("blocks", workers=2, window_tokens=500)[1] == blocked


def questions(source, split, tokenizer):
    rows = all_rows(source, split, 256)
    return {
        text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0].removeprefix("<|im_start|>")
        for row in range(rows.num_rows)
        for text in [tokenizer.decode(rows.ids_NT[row][rows.segments_NT[row] == n]) for n in range(1, 40)]
        if "<|im_start|>user\n" in text
    }


def test_thoughts_are_counted_where_they_are_learnt(tmp_path, tokenizer):
    """Not where the template writes none, where an answer is context, or in a question."""
    think = "<think> </think>"
    rows = [
        {"messages": [
            {"role": "user", "content": f"{think} {i}?"},
            {"role": "assistant", "content": f"{think}Da.", "train": False},
            {"role": "user", "content": "Și?"},
            {"role": "assistant", "content": f"<think>{i}</think>Nu.{think * (i % 2)}"},
        ]}
        for i in range(20)
    ]  # fmt: skip
    source = chat_source(write_lines(tmp_path / "a.jsonl", rows), eval_fraction=0, test_fraction=0)
    made = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=[256])["a"]
    assert made.manifests[256]["noticed"]["empty_thoughts"] == 10


def sentences(rng, count):
    return " ".join(
        "".join(rng.choices("abcdefgh", k=rng.randint(2, 9))) + "." * (rng.random() < 0.1) for _ in range(count)
    )


@pytest.mark.parametrize("limit", ["characters", "tokens"])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_what_was_cut_at_one_length_is_found(tmp_path, tokenizer, limit, kind):
    """A tenth of the answers reach the limit, as with max_tokens; without a limit nothing is found."""
    rng = random.Random(0)
    whole = [sentences(rng, int(rng.expovariate(1 / 60)) + 2) + "." for _ in range(500)]

    def cut(text):
        if limit == "characters":
            return text[:900]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokenizer.decode(ids[:400])

    def found(texts, name):
        rows = [{"data": [f"{i}?", text]} if kind == "chat" else {"text": text} for i, text in enumerate(texts)]
        make = chat_source if kind == "chat" else text_source
        source = make(write_lines(tmp_path / f"{name}.jsonl", rows), duplicates=DuplicatesConfig(exact="keep"))
        made = prepared({"a": source}, folder=tmp_path / name, tokenizer=tokenizer, seq_lens=[4096])["a"]
        return [finding.message for finding in audit_findings([made.manifests[4096]]) if "cut" in finding.message]

    assert found(whole, "whole") == []
    texts = [cut(text) for text in whole]
    assert 20 < sum(a != b for a, b in zip(texts, whole, strict=True)) < 120
    (message,) = found(texts, "cut")
    assert limit in message
    assert limit == "tokens" or "exactly 900 characters" in message


def test_a_cut_is_seen_beside_short_answers_that_have_no_full_stop():
    """60 have each length of 64 to 89 characters, and 41 were cut at 500."""
    noticed, lengths = Noticed(), [*np.repeat(np.arange(64, 90), 60), *[500] * 40, *range(480, 520)]
    arrays = {
        "marks": np.full(len(lengths), OPEN, np.uint8),
        "ends": np.stack([np.array(lengths, np.int32), np.zeros(len(lengths), np.int32)], axis=1),
        "answers": np.arange(len(lengths), dtype=np.uint64),
    }
    noticed.add(arrays, {"markers": {}}, chosen_D=np.ones(len(lengths), np.bool_))
    found = noticed.counts()["equal_ends"]["characters"]
    assert found == {"length": 500, "documents": 41, "inside_a_sentence": 41, "near": 0.39}


def test_a_share_is_at_most_all(tmp_path, tokenizer):
    """What pieces and truncation leave out of the rows is not among the tokens of the answers."""
    rows = [{"data": ["Ce?", "da " * (i % 7 * 9 + 3), f"Și {i}?", "nu " * (i % 5 * 9 + 1)]} for i in range(60)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    for long in ("split", "truncate", "drop"):
        source = chat_source(path, eval_fraction=0.2, split_by="document")
        made = prepared({"a": source}, folder=tmp_path / long, tokenizer=tokenizer, long_documents=long)["a"]
        manifest = made.manifests[64]
        for split, learnt in manifest["noticed"]["learnt_per_turn"].items():
            assert sum(learnt) == manifest["splits"][split]["supervised_tokens"] > 0
        assert json.dumps(manifest)
