"""A sharded state saved and read by several processes, each one host: any other number reads it; killed and damaged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ("tests.gcs",)
Ask = Callable[..., list[Any]]
FOUR = {"fsdp": 4, "tensor": 2}
"""Two devices of each of four hosts."""


@pytest.fixture(scope="module")
def ask(gcs_server) -> Iterator[Ask]:
    """Runs a call of host_lab.py on hosts of its own, and returns what each answered."""
    host, port = gcs_server._api._httpd.server_address
    cloud = {"STORAGE_EMULATOR_HOST": f"http://{host}:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    command = [sys.executable, "-m", "tests.checkpoint.host_lab"]
    with subprocess.Popen(
        command,
        env=os.environ | cloud,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as lab:
        assert lab.stdin is not None
        assert lab.stdout is not None

        def call(num_hosts: int, name: str, **given: Any) -> list[Any]:
            lab.stdin.write(json.dumps({"hosts": num_hosts, "call": name, **given}) + "\n")
            lab.stdin.flush()
            return json.loads(lab.stdout.readline())

        yield call
        lab.stdin.close()
        lab.wait(60)


def test_four_hosts_write_what_any_number_reads(ask, tmp_path):
    folder = str(tmp_path)
    assert ask(4, "write", folder=folder, steps=[1, 2, 3], mesh=FOUR) == [3] * 4
    target = tmp_path / "step_00000003"
    sizes = {path.name: path.stat().st_size for path in target.glob("*.safetensors")}
    assert sorted(sizes) == [f"host-0{r}-of-04.{g}.safetensors" for r in range(4) for g in ("optimizer", "parameters")]
    each = [sum(size for name, size in sizes.items() if name.startswith(f"host-0{rank}")) for rank in range(4)]
    assert max(each) < 1.1 * min(each)
    total = sum(each)
    for num_hosts, mesh in ((2, {"fsdp": 2}), (1, {}), (8, {"fsdp": 8}), (4, FOUR)):
        found = ask(num_hosts, "read", folder=folder, mesh=mesh)
        assert [one["step"] for one in found] == [3] * num_hosts, found
        if num_hosts > 1:  # all bytes are verified once, by all together, and headers are read twice
            assert total < sum(one["verified"] for one in found) < 1.5 * total
        if mesh == FOUR:  # its own, and what every host has whole
            assert all(one["read"] < 1.3 * total / 4 for one in found)
    assert ask(1, "whole", folder=folder) == [3]


def test_one_process_s_checkpoint_is_read_by_several_and_theirs_by_one(ask, tmp_path):
    folder = str(tmp_path)
    assert ask(1, "write", folder=folder, steps=[1], mesh={"fsdp": 2}) == [1]
    assert {path.name for path in tmp_path.glob("*/*.safetensors")} == {
        "optimizer.safetensors",
        "parameters.safetensors",
    }
    assert [one["step"] for one in ask(2, "read", folder=folder, mesh={"fsdp": 2})] == [1, 1]
    settings = {"max_copy_gib": 0.0, "max_shard_gib": 1e-5}  # streamed, in files of 10 kB
    assert ask(2, "write", folder=folder, steps=[2], mesh={"fsdp": 2}, **settings) == [2, 2]
    assert len(list(tmp_path.glob("step_00000002/host-01-of-02.*.safetensors"))) > 4
    assert ask(1, "whole", folder=folder) == [2]


def test_what_is_whole_on_every_host_is_written_by_the_first_as_ever(ask, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert ask(1, "write", folder=str(one), steps=[1, 2], mesh={}) == [2]
    assert ask(2, "write", folder=str(two), steps=[1, 2], mesh={"data": 2}) == [2, 2]
    content = [
        {path.relative_to(base): path.read_bytes() for path in base.glob("*/*.safetensors")} for base in (one, two)
    ]
    assert content[0] == content[1]


def test_hosts_that_cannot_read_back_or_see_each_other_end_alike(ask, tmp_path):
    given = {"steps": [1, 2, 3], "mesh": {"fsdp": 2}}
    for part in ("parameters", "optimizer"):
        found = ask(2, "spoil", rank=1, part=part, folder=str(tmp_path / part[:3]), **given)
        own = f"host-01-of-02.{part}.safetensors differs from its commit record: another SHA-256, right after it was"
        assert all(answer.startswith("TrainingStopped: ") and own in answer for answer in found), found
        assert found[0].startswith("TrainingStopped: host 1 of 2: ")
        assert not list(tmp_path.glob("*/*/COMMIT.json"))
    found = ask(2, "apart", folder=str(tmp_path / "apart"), **given)
    assert all("output_dir= must be a bucket or a folder that all hosts share" in answer for answer in found), found


def test_hosts_save_to_a_bucket(ask, gcs_bucket):
    folder = f"{gcs_bucket}/runs/x/checkpoints"
    assert ask(2, "write", folder=folder, steps=[1, 2, 3], mesh={"fsdp": 2}) == [3, 3]
    assert [one["step"] for one in ask(4, "read", folder=folder, mesh={"fsdp": 4})] == [3] * 4


def is_whole_after(ask: Ask, folder: Path, *, rank: int, at: int) -> int:
    """Kill one host before an operation of three saves; return the step that two others read and go on from."""
    given = {"folder": str(folder), "mesh": {"fsdp": 4}}
    answers = ask(2, "die", rank=rank, at=at, steps=[2, 3, 4], **given)
    assert answers[rank] == "ended with 9", answers
    assert str(answers[1 - rank]).startswith("HostLost: ") or answers[1 - rank] == "ended with 1", answers
    steps = [one["step"] for one in ask(2, "read", **given)]
    committed = sorted(int(path.parent.name[5:]) for path in folder.glob("*/COMMIT.json"))
    assert steps == [committed[-1] if committed else 0] * 2, at
    assert ask(2, "write", steps=[4, 5], **given) == [5, 5]
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000004", "step_00000005"]
    return steps[0]


def operations(ask: Ask, folder: Path) -> list[int]:
    """Number of file operations of each of two hosts in three saves."""
    return ask(2, "die", rank=0, at=-1, steps=[2, 3, 4], folder=str(folder), mesh={"fsdp": 4})


def test_a_host_killed_in_a_save_leaves_the_checkpoint_before_it(ask, tmp_path):
    """In the first save, and in the last; the slow test goes through all of them."""
    totals = operations(ask, tmp_path / "counted")
    assert is_whole_after(ask, tmp_path / "first", rank=1, at=totals[1] // 6) == 0
    assert is_whole_after(ask, tmp_path / "last", rank=1, at=totals[1] - 8) == 3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_killed_at_any_instant_leaves_a_whole_checkpoint(rank, ask, tmp_path):
    total, found = operations(ask, tmp_path / "counted")[rank], set()
    for at in range(0, total - 2, 3):
        found.add(is_whole_after(ask, tmp_path / str(at), rank=rank, at=at))
    assert {0, 2, 3} <= found
