"""Our safetensors files are the library's, both ways; a header that is not exactly that is refused."""

import json

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load, save

from tpu_experiments.storage.tensors import DTYPES, chunks_of, tensors_in, unequal


def some_tensors() -> dict[str, torch.Tensor]:
    """Every type, a scalar, an empty one, an empty name and a name that is not ASCII."""
    generator = torch.Generator().manual_seed(0)
    named = {f"of {name}": (100 * torch.randn(3, 5, generator=generator)).to(dtype) for name, dtype in DTYPES.items()}
    return named | {"": torch.tensor(3.5), "empty": torch.empty(0, 4), "ă": torch.tensor([float("nan")])}


def file_of(tensors: dict[str, torch.Tensor]) -> bytearray:
    return bytearray(b"".join(chunks_of(tensors)))


def test_the_library_reads_what_we_write_and_we_what_it_writes():
    tensors = some_tensors()
    assert unequal(load(bytes(file_of(tensors))), tensors) is None
    assert unequal(tensors_in(bytearray(save(tensors, metadata={"format": "pt"}))), tensors) is None
    assert unequal(tensors_in(file_of(tensors)), tensors) is None
    assert unequal(tensors_in(file_of({})), {}) is None


def test_what_is_read_is_no_copy():
    content = file_of({"a": torch.zeros(4)})
    tensor = tensors_in(content)["a"]
    content[-1] = 0x40
    assert tensor[3] == 2.0


def with_header(header: object, data: bytes = b"\0" * 8) -> bytearray:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + data)


def one(**changed: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed}


BAD = {
    "nothing": (bytearray(), "its header should have 0 bytes and the file has 0"),
    "a header longer than the file": (bytearray((2**62).to_bytes(8, "little")), "its header should have"),
    "no JSON": (with_header(b"\x80\x04pickle"), "its header is not the JSON"),
    "NaN": (with_header(b'{"a": NaN}'), "it holds NaN"),
    "a name twice": (with_header(b'{"a": 1, "a": 2}'), "'a' comes twice"),
    "nested without end": (with_header(b"[" * 100_000), "nested too deeply"),
    "a list": (with_header([1]), "no table of tensors"),
    "a tensor that is a number": (with_header({"a": 3}), "a is not described"),
    "a type that is none": (with_header(one(dtype="OBJECT")), "a is not described"),
    "a type that is a list": (with_header(one(dtype=["F32"])), "a is not described"),
    "a negative size": (with_header(one(shape=[-2])), "not whole numbers"),
    "a size that is a truth": (with_header(one(shape=[True, 2])), "not whole numbers"),
    "more than there is": (with_header(one(shape=[4], data_offsets=[0, 16])), "is not where"),
    "less than its shape": (with_header(one(shape=[2**62, 2**62])), "is not where"),
    "a gap": (with_header(one(shape=[1], data_offsets=[4, 8])), "is not where"),
    "bytes of none": (with_header(one(shape=[1], data_offsets=[0, 4])), "belong to none"),
    "two in one place": (with_header({**one(), "b": one()["a"]}), "is not where"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_words(case):
    content, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        tensors_in(content)


def test_a_damaged_header_is_read_as_the_library_reads_it_or_refused():
    """2,000 files with one to three bytes of the header changed: never an error of another kind, never more lenient."""
    generator = np.random.Generator(np.random.Philox(key=7))
    whole = file_of({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int32)})
    length = 8 + int.from_bytes(whole[:8], "little")
    outcomes = set()
    for _ in range(2000):
        content = bytearray(whole)
        for place in generator.integers(0, length, generator.integers(1, 4)):
            content[place] = generator.integers(0, 256)
        try:
            found = tensors_in(content)
        except ValueError:
            outcomes.add("refused")
            continue
        try:
            assert unequal(found, load(bytes(content))) is None
            outcomes.add("read")
        except safetensors.SafetensorError as error:
            raise AssertionError(f"the library refuses it: {bytes(content[:length])!r}") from error
    assert outcomes == {"refused", "read"}
