"""The profile of a run, read back: its steps are in it, and it changes nothing."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.runs import finished, losses, records

pytestmark = pytest.mark.xla
COMMON = (
    "model=qwen05b",
    "data=[sample_text]",
    "debug=smoke",
    "lora=all_linear_r8",
    "trainer.log_every_steps=1",
    "sample.max_new_tokens=0",
    "trainer.profile.start_step=3",
    "trainer.profile.num_steps=2",
)


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def parts(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message; texts and messages as bytes."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
        else:
            size, at = varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def names_of(plane: bytes, number: int) -> dict[int, str]:
    """`event_metadata` (4) or `stat_metadata` (5) of an XPlane: number to name."""
    entries = [dict(parts(value)) for field, value in parts(plane) if field == number]
    return {entry.get(1, 0): dict(parts(entry[2])).get(2, b"").decode() for entry in entries}


def steps_of(space: bytes, name: str) -> list[int]:
    """`step_num` of every event called `name` in an XSpace (tsl/profiler/protobuf/xplane.proto)."""
    found = []
    for plane in (value for field, value in parts(space) if field == 1):
        events, stats = names_of(plane, 4), names_of(plane, 5)
        for line in (value for field, value in parts(plane) if field == 3):
            for event in (value for field, value in parts(line) if field == 4):
                if events.get(dict(parts(event)).get(1, 0)) != name:
                    continue
                values = [dict(parts(value)) for field, value in parts(event) if field == 4]
                found += [v.get(3, v.get(4)) for v in values if stats.get(v.get(1, 0)) == "step_num"]
    return found


def profiles(output_dir: Path, ending: str) -> list[Path]:
    return list(output_dir.glob(f"*/profile/plugins/profile/*/*{ending}"))


@pytest.mark.slow
def test_the_steps_are_in_the_profile_and_nothing_is_compiled_for_it(tmp_path):
    result = finished(*COMMON, output_dir=tmp_path)
    assert result["num_compiles"] == result["expected_programs"]
    (space,) = profiles(tmp_path, ".xplane.pb")
    assert steps_of(space.read_bytes(), "train") == [3, 4]
    measured = [record["step"] for record in records(tmp_path) if "perf/step_seconds" in record]
    assert measured == [3, 4, 5, 6]


@pytest.mark.slow
def test_a_profile_that_the_end_of_the_stage_cuts_short_is_written(tmp_path):
    finished(*COMMON, "trainer.profile.num_steps=50", output_dir=tmp_path)
    (space,) = profiles(tmp_path, ".xplane.pb")
    assert steps_of(space.read_bytes(), "train") == [3, 4, 5, 6]


def test_the_eager_runtime_writes_its_own(tmp_path):
    finished(*COMMON, "hw.runtime=eager", output_dir=tmp_path)
    (trace,) = profiles(tmp_path, ".trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert len([e for e in events if e.get("name") == "train" and e.get("cat") == "user_annotation"]) == 2
    assert len(losses(tmp_path)) == 6
