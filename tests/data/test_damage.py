"""Damage to any file of a prepared folder: what is read of it is made again to the same bytes, or refused."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.data.preparing import all_rows, chat_source, prepared, text_source, texts, write_lines
from tpu_experiments.config.curriculum import Geometry, Stage
from tpu_experiments.config.data_schema import DuplicatesConfig, PrepareConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import ScheduleConfig
from tpu_experiments.data import prepare as prepare_module
from tpu_experiments.data.cleaning.split import SPLITS
from tpu_experiments.data.held_out import held_out_documents
from tpu_experiments.data.prepare import Preparation
from tpu_experiments.data.steps import blocks as blocks_module
from tpu_experiments.data.steps import epochs as epochs_module
from tpu_experiments.data.steps import keys as keys_module
from tpu_experiments.data.store.stream import CacheSettings
from tpu_experiments.storage import paths

pytest_plugins = ("tests.gcs",)
SEQ_LEN = 64
GEOMETRY = Geometry(global_rows=4, micro_rows=4, accumulation=1, num_shards=1, seq_len=SEQ_LEN)
TIMES = ("seal", "seconds", "peak_rss_gib", "tokens_per_second")
UNREAD = ("reported.jsonl",)
"""For people to look at."""
DAMAGES = {
    "first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a byte of the first third": lambda data: flipped(data, len(data) // 3),
    "a byte of the middle": lambda data: flipped(data, len(data) // 2),
    "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "cut": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "missing": lambda data: None,
}


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x04]) + data[at + 1 :]


class Job:
    """Two sources and the written epochs of a stage, in one folder."""

    def __init__(self, data: Path, tokenizer):
        question = {"role": "user", "content": "Câte picioare are o pisică?"}
        rows = [{"messages": [question, {"role": "assistant", "content": f"Patru, a {i}-a oară."}]} for i in range(24)]
        self.sources = {
            "a": text_source(texts(data / "a.jsonl", 40), duplicates=DuplicatesConfig(near=0.9)),
            "b": chat_source(write_lines(data / "b.jsonl", rows), split_by="document"),
        }
        self.tokenizer = tokenizer

    def __call__(self, folder, **settings):
        settings = {"window_tokens": 300, "workers": 1, **settings}
        found = prepared(self.sources, folder=folder, tokenizer=self.tokenizer, seq_lens=(SEQ_LEN,), **settings)
        stage = Stage("one", 0, ("a", "b"), GEOMETRY, 4, None, 1e-3, ScheduleConfig(), "adamw")
        how = PrepareConfig(written_epochs=2, shuffle_block_rows=8)
        return found, epochs_module.write_epochs(stage, sources=found, settings=how, seed=3, folder=str(folder))


@pytest.fixture(scope="module")
def job(tmp_path_factory, tokenizer):
    return Job(tmp_path_factory.mktemp("data"), tokenizer)


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """A folder that is never changed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        job(folder)
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    small(monkeypatch)


def small(patch):
    patch.setattr(blocks_module, "BLOCK_ROWS", 16)
    patch.setattr(keys_module, "REMEMBERED_BYTES", 16)


def contents(folder: Path) -> dict[str, object]:
    """Every file but times."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name not in UNREAD:
            data = path.read_bytes()
            found[name] = data
            if path.suffix == ".json":
                found[name] = {k: v for k, v in json.loads(data).items() if k not in TIMES}
    return found


def rows_of(made) -> list[np.ndarray]:
    sources, epochs = made
    parts = [all_rows(source, split) for source in sources.values() for split in SPLITS]
    parts += [epoch.rows.take(slice(0, epoch.rows.num_rows)) for epoch in epochs]
    arrays = [array for rows in parts for array in (rows.ids_NT, rows.learn_NT, rows.positions_NT, rows.segments_NT)]
    return [*arrays, *(epoch.origins_N for epoch in epochs)]


def damage(path: Path, how: str) -> None:
    data = DAMAGES[how](path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)


@pytest.mark.slow
def test_every_file_damaged_in_every_way_is_made_again(job, whole, tmp_path, caplog):
    """`verify="all"`, as task=prepare."""
    expected, count, kinds = contents(whole), 0, Counter[str]()
    assert {Path(name).suffix for name in expected} == {".json", ".npy", ".safetensors"}
    shutil.copytree(whole, tmp_path / "p")
    for name in expected:
        for how in DAMAGES:
            kind = (Path(name).parts[0].split("-")[:2], Path(name).parent.name, "".join(Path(name).suffixes))
            if kinds[str(kind)] > 1 or (kinds[str(kind)] and how != "a byte of the middle"):
                continue  # of a second file of a kind a byte alone and of others nothing, for the time it takes
            caplog.clear()
            damage(tmp_path / "p" / name, how)
            if Path(name).parent.name in SPLITS and name.endswith(".json"):
                (tmp_path / "p" / name).parents[1].joinpath("manifest.json").unlink()  # else it is not read
            job(tmp_path / "p", verify="all")
            count += 1
            assert contents(tmp_path / "p") == expected, (name, how)
            told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
            is_silent = how == "missing" and name.endswith((".json", ".index.safetensors"))  # as after a kill
            is_silent = is_silent or name in ("fingerprints.json", "formats.json")
            if not is_silent:
                assert any(name in text and "again" in text for text in told), (name, how, told)
        kinds[str(kind)] += 1
    print(f"{count} damages, {len(expected)} files")


def test_training_reads_the_same_rows_whatever_is_damaged(job, whole, tmp_path):
    """`verify="rows"`, as task=train: blocks of tokens are not looked at, and not read."""
    with_rows = rows_of(job(whole))
    shutil.copytree(whole, tmp_path / "p")
    for name in contents(whole):
        damage(tmp_path / "p" / name, "a byte of the middle")
        for one, other in zip(rows_of(job(tmp_path / "p")), with_rows, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def test_two_files_of_a_kind_that_changed_places(job, whole, tmp_path):
    expected = contents(whole)
    kinds = (
        "a-rows*/train/*.npy", "a-rows*/train/*.json", "*-rows*/manifest.json", "*-tokens-*/blocks.json",
        "a-tokens*/blocks/*.index.safetensors", "a-tokens*/blocks/*.tokens.safetensors",
        "a-tokens*/blocks/*.minhash.npy", "stage-*/*/manifest.json", "stage-*/epoch-000/?????.npy",
        "stage-*/epoch-000/*.origins.npy",
    )  # fmt: skip
    shutil.copytree(whole, tmp_path / "p")
    for kind in kinds:
        one, other, *_ = sorted((tmp_path / "p").glob(kind))
        assert one.read_bytes() != other.read_bytes()
        one.rename(tmp_path / "x")
        other.rename(one)
        (tmp_path / "x").rename(other)
        if kind == "a-rows*/train/*.json":
            one.parents[1].joinpath("manifest.json").unlink()  # else they are not read
        job(tmp_path / "p", verify="all")
        assert contents(tmp_path / "p") == expected, kind


def test_damaged_blocks_are_made_again_where_rows_are_made_from_them(job, whole, tmp_path, caplog):
    """Another row length, as of another curriculum, from blocks that an earlier run left."""
    for kind in ("*.index.safetensors", "*.tokens.safetensors", "*.minhash.npy"):
        folder = tmp_path / kind.replace("*", "")
        shutil.copytree(whole, folder)
        file = sorted(folder.glob(f"a-tokens-*/blocks/{kind}"))[1]
        damage(file, "a byte of the middle")
        prepared(job.sources, folder=folder, tokenizer=job.tokenizer, seq_lens=(32,), window_tokens=300, workers=1)
        assert file.read_bytes() == (whole / file.relative_to(folder)).read_bytes()
        assert str(file) in caplog.text


def test_where_nothing_is_made_damage_is_refused(job, whole, tmp_path):
    """task=evaluate reads the blocks of held-out documents, and makes none."""
    how = Preparation(PrepareConfig(window_tokens=300, workers=1), str(tmp_path / "p"), job.tokenizer, {}, None, True)
    files = [*whole.glob("b-tokens-*/blocks/*.index.*"), *whole.glob("b-tokens-*/blocks/*.tokens.*")]
    for file in [*files, *whole.glob("b-tokens-*/blocks.json")]:
        shutil.copytree(whole, tmp_path / "p")
        damage(tmp_path / "p" / file.relative_to(whole), "a byte of the middle")
        with pytest.raises(ConfigError, match=f"{file.name}; "):
            held_out_documents(
                "b", job.sources["b"], split="train", data_size="full", preparation=how, max_documents=None, seed=0
            )
        shutil.rmtree(tmp_path / "p")


def test_what_is_too_large_for_the_start_is_refused_when_it_is_opened(job, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "START_BYTES", 0)
    shutil.copytree(whole, tmp_path / "p")
    made = job(tmp_path / "p")
    shard = next((tmp_path / "p").glob("a-rows-*/train/00001.npy"))
    rows_of(made)
    damage(shard, "last byte")
    sources, _ = job(tmp_path / "p")
    assert sources["a"].check == "at_open"
    with pytest.raises(ConfigError, match=r"00001\.npy; the shard's sha256 is .* it is prepared again"):
        all_rows(sources["a"], "train")
    job(tmp_path / "p", verify="all")
    all_rows(job(tmp_path / "p")[0]["a"], "train")


def test_a_shard_in_a_bucket_is_compared_by_what_the_bucket_says(job, gcs_bucket, caplog):
    folder = f"{gcs_bucket}/p"
    made = job(folder)
    expected = rows_of(made)
    [name] = {n for n in paths.list_names(folder) if n.startswith("b-rows")}
    shard = f"{folder}/{name}/train/00000.npy"
    data = paths.read_bytes(shard)
    for wrong in (flipped(data, len(data) // 2), data[:-8]):
        paths.write_bytes_atomic(shard, wrong)
        caplog.clear()
        for one, other in zip(rows_of(job(folder)), expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert f"{shard}; the shard" in caplog.text
        assert paths.read_bytes(shard) == data
    paths.remove_tree(shard)
    rows_of(job(folder))
    assert paths.read_bytes(shard) == data


def test_a_damaged_local_copy_of_a_shard_is_fetched_again(job, gcs_bucket, tmp_path, caplog):
    folder, cache = f"{gcs_bucket}/p", CacheSettings(folder=str(tmp_path / "copies"))
    how = Preparation(PrepareConfig(window_tokens=300, workers=1), folder, job.tokenizer, {}, cache)

    def shuffled():
        source = prepare_module.prepare(
            {"a": job.sources["a"]}, data_size="full", seq_lens=(SEQ_LEN,), preparation=how
        )["a"]
        store = source.store("train", SEQ_LEN)
        order = np.random.default_rng(0).permutation(store.num_rows)
        first = store.take(order)
        opened = store._source()
        opened._copying.join(60)
        return first, store.take(order)

    expected, _ = shuffled()
    copies = sorted((tmp_path / "copies").glob("*.npy"))
    assert copies
    for copy in copies:
        damage(copy, "last byte")
    for rows in shuffled():
        np.testing.assert_array_equal(rows.ids_NT, expected.ids_NT)
        np.testing.assert_array_equal(rows.learn_NT, expected.learn_NT)
    assert "the local copy of" in caplog.text
