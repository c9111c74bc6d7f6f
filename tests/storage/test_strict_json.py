"""Numbers that JSON has no word for become null; everything else survives the round trip."""

import json

import numpy as np
import pytest

from tpu_experiments.storage.strict_json import dumps


def test_round_trip() -> None:
    value = {"a": [1, 2.5, None, True], "b": {"c": "Dunărea"}, "d": (1, 2)}
    assert json.loads(dumps(value)) == {"a": [1, 2.5, None, True], "b": {"c": "Dunărea"}, "d": [1, 2]}


def test_not_finite_is_null() -> None:
    value = {"loss": float("nan"), "perplexity": [float("inf"), -float("inf")], "n": np.float32("nan")}
    assert dumps(value) == '{"loss": null, "perplexity": [null, null], "n": null}'


def test_numpy_scalars_are_numbers() -> None:
    assert dumps([np.int64(3), np.float32(0.5)]) == "[3, 0.5]"


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError):
        dumps({"x": object()})
