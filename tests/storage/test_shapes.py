"""What a report takes from JSON that may hold anything."""

import math

import pytest

from tpu_experiments.storage.strict_json import RECORD, RESULT, shaped


@pytest.mark.parametrize("value", [None, True, "3", [], {}, math.nan, math.inf, 1e300, 10**400])
def test_what_is_no_number_counts_as_absent(value: object) -> None:
    found = shaped({"status": "finished", "eval_loss": value, "tokens": 7, "stages": [{"steps": 3}]}, RESULT)
    assert found == {"status": "finished", "tokens": 7, "stages": [{"steps": 3}]}


@pytest.mark.parametrize("stages", [-1, "x", [1], [{"steps": "3"}], [{"steps": 3}, -1], {"steps": 3}])
def test_a_list_with_one_item_of_another_kind_counts_as_absent(stages: object) -> None:
    assert shaped({"status": "finished", "stages": stages}, RESULT) == {"status": "finished"}


def test_a_record_keeps_its_step_and_its_numbers() -> None:
    assert shaped({"step": 3, "train/loss": 2, "text": "x"}, RECORD) == {"step": 3, "train/loss": 2}
    assert shaped({"step": 3.5}, RECORD) == {}
    assert shaped([3], RECORD) is None
