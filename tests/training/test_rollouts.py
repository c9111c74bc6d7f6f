"""A stored rollout is what was written, has the same bytes for the same values, and is refused where it is damaged."""

import hashlib
from dataclasses import fields, replace

import numpy as np
import pytest

from tpu_experiments.data.store.shards import decode_rows, encode_rows, row_dtype
from tpu_experiments.objectives.policy import Policy
from tpu_experiments.storage.sealed import DamagedFile
from tpu_experiments.training.rollouts import Rollout, RolloutStore

pytest_plugins = ("tests.gcs",)


def rollout(iteration=3, *, seed=0, **changed):
    """Two prompts with two answers each, the third of which was cut off, in rows of 10 tokens."""
    numbers = np.random.default_rng(seed)
    logps_NT = numbers.normal(size=(4, 10)).astype(np.float32)
    logps_NT[1, 4] = np.nan
    made = Rollout(
        iteration=iteration,
        version=6,
        ids_NT=numbers.integers(1, 100, (4, 10)).astype(np.int32),
        lengths_N=np.array([7, 5, 10, 9], np.int32),
        prompt_lengths_N=np.array([4, 4, 6, 6], np.int32),
        is_cut_N=np.array([False, False, True, False]),
        sampler_logps_NT=logps_NT,
        advantage_N=np.array([1, -1, 0.5, -0.5], np.float32),
        divisor_N=np.full(4, 2.5, np.float32),
        rewards_NF=np.array([[1, 0.25], [0, np.nan], [1, 1], [0, 1 / 3]]),
        reward_names=("number", "length"),
        prompt_index_N=np.array([8, 8, 2, 2], np.int32),
        old_logps_NT=logps_NT + 1,
    )
    return replace(made, **changed)


def require_equal(one, other):
    for field in fields(Rollout):
        if field.name == "sha256":  # of what was read
            continue
        first, second = getattr(one, field.name), getattr(other, field.name)
        if isinstance(first, np.ndarray):
            assert (first.dtype, first.shape) == (second.dtype, second.shape), field.name
            assert first.tobytes() == second.tobytes(), field.name
        else:
            assert first == second, field.name


def require_stored(folder):
    store = RolloutStore(folder)
    assert store.read(3) is None
    assert store.iterations() == []
    digests = [store.write(rollout(number, seed=number)) for number in (3, 4, 5, 1_000_001)]
    assert store.read(4).sha256 == digests[1]
    assert store.iterations() == [3, 4, 5, 1_000_001]
    require_equal(store.read(4, sha256=digests[1]), rollout(4, seed=4))
    assert store.write(rollout(4, seed=4)) == digests[1]
    store.remove_after(4)
    assert store.iterations() == [3, 4]
    assert store.read(5) is None
    store.remove_after(-1)
    assert store.iterations() == []


def test_on_a_disk(tmp_path):
    require_stored(str(tmp_path / "rollouts"))


def test_in_a_bucket(gcs_bucket):
    require_stored(f"{gcs_bucket}/run/rollouts")


def test_the_bytes_are_those_of_this_version(tmp_path):
    """Runs of before are resumed: another layout needs another name of the file."""
    store = RolloutStore(str(tmp_path))
    zeros_NT, ids_NT = np.zeros((4, 10), np.float32), np.arange(40, dtype=np.int32).reshape(4, 10)
    digest = store.write(rollout(ids_NT=ids_NT, sampler_logps_NT=zeros_NT, old_logps_NT=zeros_NT))
    assert digest == hashlib.sha256((tmp_path / "000003.safetensors").read_bytes()).hexdigest()
    assert digest == "f9c7f82b5e873e108930ac4d33efbc754fe02d61a39a925f729e56fa5519fe6b"


def test_every_changed_byte_is_refused(tmp_path):
    store = RolloutStore(str(tmp_path))
    store.write(rollout())
    file = tmp_path / "000003.safetensors"
    content = file.read_bytes()
    for place in range(0, len(content), 37):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedFile, match=r"000003.safetensors; .*; remove it and those after it"):
            store.read(3)
    for length in (0, 7, 100, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(DamagedFile):
            store.read(3)


def test_another_file_than_the_checkpoint_says_is_refused(tmp_path):
    store = RolloutStore(str(tmp_path))
    own = store.write(rollout(seed=1))
    store.write(rollout(seed=2))
    with pytest.raises(DamagedFile, match=f"and the checkpoint was trained on {own}: another run wrote it"):
        store.read(3, sha256=own)
    (tmp_path / "000004.safetensors").write_bytes((tmp_path / "000003.safetensors").read_bytes())
    with pytest.raises(DamagedFile, match="it is the file of iteration 3"):
        store.read(4)


def test_rows_learn_the_answers_alone_and_are_valid(tmp_path):
    found = rollout()
    rows = found.rows(masks_cut=False, pad_id=9)
    dtype = row_dtype(10, vocab_size=100, arrays=Policy.sampled)
    records = encode_rows(rows, dtype=dtype)  # refuses rows that training could not have
    assert np.array_equal(decode_rows(records, pad_id=9).ids_NT, rows.ids_NT)
    for n, (begin, end) in enumerate(((4, 7), (4, 5), (6, 10), (6, 9))):
        assert np.flatnonzero(rows.learn_NT[n]).tolist() == list(range(begin, end))
        assert np.count_nonzero(rows.segments_NT[n]) == end
        assert found.answer_ids(n) == rows.ids_NT[n, begin:end].tolist()
        for name in ("old_logps", "sampler_logps"):
            own = rows.more[name][n]
            assert not own[:begin].any()
            assert not own[end:].any()
            assert own[begin:end].tobytes() == getattr(found, f"{name}_NT")[n, begin:end].tobytes()
    assert np.isnan(rows.more["sampler_logps"][1, 4])
    assert not rows.more["start_logps"].any()
    assert rows.more.keys() == {array.name for array in Policy.sampled}


def test_what_was_cut_off_is_not_learnt_where_it_is_masked():
    kept, masked = (rollout().rows(masks_cut=cut, pad_id=0) for cut in (False, True))
    assert kept.learn_NT.sum(1).tolist() == [3, 1, 4, 3]
    assert masked.learn_NT.sum(1).tolist() == [3, 1, 0, 3]
    assert np.array_equal(kept.ids_NT, masked.ids_NT)
