"""Which input of a program changed, in words."""

import torch

from tpu_experiments.runtime.base import difference, leading_shape, signature_of, signature_text


def batch(length: int, *, dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    rows = torch.zeros(1, 4, length, dtype=dtype)
    return {"ids": rows, "learn": rows, "lr": torch.zeros(1)}


def test_inputs_of_one_kind_stand_together():
    signature = signature_of(batch(16))
    assert signature_text(signature) == "ids, learn 1 x 4 x 16 int32; lr 1 float32"
    assert leading_shape(signature) == (1, 4, 16)


def test_a_changed_length_names_the_tensors_and_both_shapes():
    said = difference(signature_of(batch(24)), seen=[signature_of(batch(16))], expected=[(1, 4, 16)])
    assert said == "ids, learn was 1 x 4 x 16 int32 and is 1 x 4 x 24 int32"


def test_a_changed_type_is_named():
    said = difference(signature_of(batch(16, dtype=torch.int64)), seen=[signature_of(batch(16))], expected=[])
    assert said == "ids, learn was 1 x 4 x 16 int32 and is 1 x 4 x 16 int64"


def test_the_nearest_signature_is_compared_with():
    other = {"ids": torch.zeros(9), "learn": torch.zeros(9), "lr": torch.zeros(2)}
    now = batch(16) | {"lr": torch.zeros(3)}
    said = difference(signature_of(now), seen=[signature_of(other), signature_of(batch(16))], expected=[])
    assert said == "lr was 1 float32 and is 3 float32"


def test_added_and_missing_tensors_are_named():
    now = {"ids": batch(16)["ids"], "lr": torch.zeros(1), "weights": torch.zeros(4)}
    said = difference(signature_of(now), seen=[signature_of(batch(16))], expected=[])
    assert "weights was not there and is 4 float32" in said
    assert "learn was 1 x 4 x 16 int32 and is missing" in said


def test_without_a_call_before_the_expected_shape_is_named():
    said = difference(signature_of(batch(24)), seen=[], expected=[(1, 4, 16), (2, 2, 16)])
    assert said == "ids is 1 x 4 x 24, not 1 x 4 x 16 or 2 x 2 x 16"


def test_another_order_is_a_difference():
    now = dict(reversed(batch(16).items()))
    assert difference(signature_of(now), seen=[signature_of(batch(16))], expected=[]) == (
        "its inputs come in another order"
    )
