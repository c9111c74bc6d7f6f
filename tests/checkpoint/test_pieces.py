"""Shards of several hosts: who writes which, how files name them, and files that no host can have written."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved import load_latest
from tests.checkpoint.test_hostile import replaced
from tpu_experiments.checkpoint import reading
from tpu_experiments.checkpoint.manifest import COMMIT
from tpu_experiments.checkpoint.pieces import deal_files, dealt, entry_name, piece_of
from tpu_experiments.checkpoint.store import add_tensors, begin, commit, read_latest
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.storage.tensors import chunks_of, file_name

WHOLE = torch.arange(24.0).reshape(4, 6)
UP, DOWN = Box((0, 0), (2, 6)), Box((2, 0), (4, 6))


def save(folder: Path, step: int, *, whole: torch.Tensor = WHOLE) -> Path:
    """A checkpoint whose one parameter two hosts have written in halves."""
    draft = begin(str(folder), step=step, progress={"step": step})
    for rank, box in enumerate((UP, DOWN)):
        name = file_name("parameters", 1, 1, host=(rank, 2))
        add_tensors(draft, name, {entry_name("embed.weight", box, (4, 6)): whole[box.slices].contiguous()})
    commit(draft)
    return folder / f"step_{step:08d}"


def parts(folder: Path) -> dict[str, torch.Tensor]:
    """What a reader gets that takes tensors one by one, and boxes of them."""

    def restore(progress, groups):
        tensors = groups["parameters"]
        (middle,) = reading.boxes_in(tensors, "embed.weight", [Box((1, 2), (3, 4))])
        return {"middle": middle, **dict(tensors)}

    reading._verified.clear()
    return read_latest(str(folder), restore, max_held_bytes=0)


def test_halves_are_read_as_the_tensor_they_are_of(tmp_path):
    save(tmp_path, 1)
    assert torch.equal(load_latest(str(tmp_path))[1]["parameters"]["embed.weight"], WHOLE)
    found = parts(tmp_path)
    assert torch.equal(found["embed.weight"], WHOLE)
    assert torch.equal(found["middle"], WHOLE[1:3, 2:4])


def test_a_reader_of_a_part_does_not_touch_the_other_host_s_file(tmp_path):
    target = save(tmp_path, 1)

    def restore(progress, groups):
        (target / "host-01-of-02.parameters.safetensors").unlink()
        (upper,) = reading.boxes_in(groups["parameters"], "embed.weight", [Box((0, 1), (2, 3))])
        return upper

    assert torch.equal(read_latest(str(tmp_path), restore, max_held_bytes=0), WHOLE[:2, 1:3])


@pytest.mark.parametrize("name", ["embed@x.weight", "a@0/1", "model.layers.3.mlp.weight/first"])
@pytest.mark.parametrize(("box", "shape"), [(Box((2, 0), (4, 6)), (4, 6)), (Box((), ()), ()), (Box((7,), (7,)), (9,))])
def test_an_entry_says_which_part_of_which_tensor_it_is(name, box, shape):
    found, piece = piece_of(entry_name(name, box, shape), torch.empty(box.shape))
    assert (found, piece.shape, piece.box) == (name, shape, box)


FIRST, SECOND = (f"host-0{rank}-of-02.parameters.safetensors" for rank in (0, 1))
HOSTILE = {
    "overlap": ({"embed.weight@1,0/4,6": WHOLE[1:3]}, "two pieces of embed.weight overlap"),
    "repeated": ({"embed.weight@0,0/4,6": WHOLE[:2]}, "two pieces of embed.weight overlap"),
    "missing": ({"embed.weight@2,0/4,6": WHOLE[2:3]}, "the pieces of embed.weight hold 18 of its 24 elements"),
    "beyond": ({"embed.weight@3,0/4,6": WHOLE[2:]}, r"embed.weight@3,0/4,6 of shape \(2, 6\) reaches beyond its"),
    "other_shape": ({"embed.weight@2,0/5,6": WHOLE[2:]}, "belong to 2 tensors of other shapes or types"),
    "other_type": ({"embed.weight@2,0/4,6": WHOLE[2:].double()}, "belong to 2 tensors of other shapes or types"),
    "other_rank": ({"embed.weight@2/4": WHOLE[2:]}, "embed.weight@2/4 has 2 dimensions, unlike its name"),
    "no_piece": ({"embed.weight": WHOLE[2:]}, "embed.weight is not the name of a piece, NAME@START/SHAPE"),
    "negative": ({"embed.weight@-2,0/4,6": WHOLE[2:]}, "@-2,0/4,6 is not the name of a piece"),
    "huge": ({f"embed.weight@2,0/4,{10**40}": WHOLE[2:]}, "is not the name of a piece"),
    "empty": ({}, "the pieces of embed.weight hold 12 of its 24 elements"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_pieces_that_are_no_tensor_are_refused(kind, tmp_path):
    """Whoever can write the folder can also make the manifest agree."""
    tensors, complaint = HOSTILE[kind]
    target = save(tmp_path, 1)
    replaced(target, SECOND, b"".join(chunks_of({name: t.contiguous() for name, t in tensors.items()})))
    for read in (lambda: load_latest(str(tmp_path)), lambda: parts(tmp_path)):
        with pytest.raises(ConfigError, match=complaint) as caught:
            read()
        assert "this program did not write it" in str(caught.value)


def test_a_tensor_whole_and_in_pieces_is_refused(tmp_path):
    target = save(tmp_path, 1)
    replaced(target, "parameters.safetensors", b"".join(chunks_of({"embed.weight": WHOLE})))
    with pytest.raises(ConfigError, match=r"embed\.weight is in another file as well"):
        parts(tmp_path)


@pytest.mark.parametrize("damage", ["absent", "cut", "changed", "not_listed"])
def test_a_checkpoint_without_a_host_s_file_is_passed_over(damage, tmp_path, caplog):
    save(tmp_path, 1, whole=-WHOLE)
    target = save(tmp_path, 2)
    content = (target / FIRST).read_bytes()
    if damage == "absent":
        (target / FIRST).unlink()
    elif damage == "cut":
        (target / FIRST).write_bytes(content[:-8])
    elif damage == "changed":
        (target / FIRST).write_bytes(content[:-1] + b"\x01")
    else:  # that is no crash
        manifest = json.loads((target / COMMIT).read_text())
        del manifest["files"][FIRST]
        (target / COMMIT).write_text(json.dumps(manifest))
        with pytest.raises(ConfigError, match="hold 12 of its 24 elements"):
            parts(tmp_path)
        return
    assert torch.equal(parts(tmp_path)["embed.weight"], -WHOLE)
    assert "step_00000002 is incomplete" in caplog.text


def test_each_box_is_written_once_and_the_bytes_are_spread():
    """Two of four hosts hold each half of the matrix; all four hold the vectors."""
    tensors = {"matrix": torch.empty(8, 6), **{f"vector {i}": torch.empty(10) for i in range(8)}}
    halves, whole = (Box((0, 0), (4, 6)), Box((4, 0), (8, 6))), Box((0,), (10,))
    held = [{"matrix": [halves[rank // 2]], **{f"vector {i}": [whole] for i in range(8)}} for rank in range(4)]
    loads = [0] * 4
    found = dealt(held, tensors, loads=loads)
    written = [(name, box) for own in found for name, boxes in own.items() for box in boxes]
    assert sorted(written) == sorted({(name, box) for own in held for name, boxes in own.items() for box in boxes})
    assert all(
        box in held[rank][name] for rank, own in enumerate(found) for name, boxes in own.items() for box in boxes
    )
    assert sum(loads) == sum(t.nbytes for t in tensors.values())
    assert max(loads) - min(loads) <= 40  # a vector
    held[1] = held[0] = {**held[0], "matrix": [Box((0, 0), (3, 6))]}
    with pytest.raises(RuntimeError, match="matrix; the hosts hold other parts"):
        dealt(held, tensors, loads=[0] * 4)


def test_files_are_dealt_by_their_sizes():
    assert deal_files({"a": 5, "b": 3, "c": 2, "d": 1}, num_hosts=2) == [["a", "d"], ["b", "c"]]
    assert deal_files({"a": 5}, num_hosts=3) == [["a"], [], []]
