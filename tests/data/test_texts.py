"""Documents as text: the same, in the same splits, that training would see; drawn by their content."""

import numpy as np
import pytest

from tests.data.preparing import chat_source, prepared, text_source, texts, write_lines
from tpu_experiments.config.data_schema import CleanConfig, DuplicatesConfig, PrepareConfig
from tpu_experiments.data.cleaning.split import SPLITS
from tpu_experiments.data.documents import Document
from tpu_experiments.data.held_out import held_out_documents
from tpu_experiments.data.prepare import Preparation
from tpu_experiments.data.texts import cleaned_texts, drawn

pytest_plugins = ("tests.gcs",)


@pytest.fixture
def cleaned(tmp_path):
    def cleaned(sources, *, folder=tmp_path / "p", readers=None, data_size="full"):
        settings = PrepareConfig(workers=1)
        return cleaned_texts(sources, data_size=data_size, settings=settings, folder=str(folder), readers=readers or {})

    return cleaned


def of_split(source, split):
    return list(source.texts(source.code_D == SPLITS.index(split)))


@pytest.fixture
def source(tmp_path):
    """Texts with a copy, a near copy, a short one and cedillas."""
    numbers = np.random.default_rng(0).integers(1000, 9999, (300, 9)).tolist()
    rows = [{"text": f"Ştire   numărul {i}: " + " apoi ".join(map(str, row))} for i, row in enumerate(numbers)]
    rows += [rows[5], {"text": "scurt"}, {"text": rows[8]["text"] + "!"}]
    rules = CleanConfig(romanian_letters="comma", whitespace="collapse", min_words=5)
    return text_source(
        write_lines(tmp_path / "a.jsonl", rows), clean=rules, duplicates=DuplicatesConfig(near=0.7, near_copies="drop")
    )


def test_texts_and_splits_are_those_that_training_sees(source, cleaned, tmp_path, tokenizer):
    (found,) = cleaned({"a": source})
    prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer, workers=1)
    preparation = Preparation(PrepareConfig(workers=1), str(tmp_path / "p"), tokenizer, {}, is_lookup=True)
    for split in SPLITS:
        seen = held_out_documents(
            "a", source, split=split, data_size="full", preparation=preparation, max_documents=None, seed=0
        )
        expected = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in seen.documents()]
        assert of_split(found, split) == expected
        assert expected
    assert all("Știre numărul" in text for text in of_split(found, "train"))
    assert np.count_nonzero(found.code_D < 0) == 2, "the copy and the near copy"
    sizes = [len(text.encode()) for text in found.texts(found.code_D > -9)]
    assert found.bytes_D.tolist() == sizes


def test_of_conversations_the_turns_and_none_without_an_answer(tmp_path, cleaned):
    turns = [
        [("system", "Ești scurt."), ("user", "Ce bei?"), ("assistant", "Ceai."), ("assistant", " ")],
        [("user", "Nimeni nu răspunde.")],
    ]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turn]} for turn in turns]
    source = chat_source(write_lines(tmp_path / "a.jsonl", rows), format="messages", eval_fraction=0, test_fraction=0)
    (found,) = cleaned({"a": source})
    assert of_split(found, "train") == ["Ești scurt.", "Ce bei?", "Ceai."]


def test_a_reader_of_the_users_own(tmp_path, cleaned):
    documents = [Document(str(i), text=f"Textul cu numărul {i}.") for i in range(9)]
    source = text_source(tmp_path / "none", eval_fraction=0, test_fraction=0)
    (found,) = cleaned({"a": source}, readers={"a": lambda spec: iter(documents)})
    assert of_split(found, "train") == [document.text for document in documents]


def test_what_was_cleaned_is_not_read_again(source, cleaned, tmp_path):
    before = cleaned({"a": source})[0]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "p").rglob("*.parquet")}
    after = cleaned({"a": source})[0]
    assert files
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "p").rglob("*.parquet")} == files
    assert of_split(before, "train") == of_split(after, "train")


def test_a_larger_draw_adds_to_a_smaller_one_whatever_the_order(tmp_path, cleaned):
    path = texts(tmp_path / "a.jsonl", 200)
    (found,) = cleaned({"a": text_source(path)})
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True), reverse=True)))
    (turned,) = cleaned({"a": text_source(path)})

    def taken(sources, **draw):
        masks = drawn([sources], splits=("train",), **draw)
        return set(sources.texts(masks[0]))

    small, large = (taken(found, max_bytes=n, seed=1) for n in (1000, 3000))
    assert small < large
    assert 900 < sum(len(text.encode()) for text in small) <= 1000
    assert taken(turned, max_bytes=1000, seed=1) == small
    assert taken(found, max_bytes=1000, seed=2) != small
    assert taken(found, max_bytes=None, seed=1) == set(of_split(found, "train"))
    assert len(taken(found, max_bytes=1, seed=1)) == 1, "never none"


def test_a_draw_is_over_all_sources(tmp_path, cleaned):
    sources = {name: text_source(texts(tmp_path / f"{name}.jsonl", 100, first=n)) for name, n in (("a", 0), ("b", 500))}
    found = cleaned(sources)
    masks = drawn(found, splits=("evaluation", "test"), max_bytes=600, seed=0)
    sizes = [int(source.bytes_D[mask].sum()) for source, mask in zip(found, masks, strict=True)]
    assert 500 < sum(sizes) <= 600
    assert min(sizes) > 0
    assert all((source.code_D[mask] > 0).all() for source, mask in zip(found, masks, strict=True))


def test_data_and_prepared_folder_in_a_bucket(gcs_bucket, tmp_path, cleaned):
    from tpu_experiments.storage import paths

    paths.write_bytes_atomic(f"{gcs_bucket}/a.jsonl", texts(tmp_path / "a.jsonl", 40).read_bytes())
    (remote,) = cleaned({"a": text_source(f"{gcs_bucket}/a.jsonl")}, folder=f"{gcs_bucket}/prepared")
    (local,) = cleaned({"a": text_source(tmp_path / "a.jsonl")})
    assert of_split(remote, "train") == of_split(local, "train")
    assert remote.folder.startswith(gcs_bucket)
