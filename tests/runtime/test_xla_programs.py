"""Programs on the CPU device: what is compiled after the first calls is refused, or told once."""

import logging
from types import SimpleNamespace

import pytest
import torch

from tpu_experiments.runtime.base import UnexpectedProgram
from tpu_experiments.runtime.xla.programs import Compiles, XlaProgram

pytestmark = pytest.mark.xla


def rows(length: int, *, width: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    import torch_xla

    return {"ids": torch.ones(width, length, dtype=dtype).to(torch_xla.device())}


def make(function, *, policy: str = "error", shapes=None, every: int = 1, held=dict):
    compiles = Compiles(policy=policy, trace_every=every)
    if shapes is not None:
        compiles.expect({"train": shapes})
    return compiles, XlaProgram(function, name="train", compiles=compiles, held=held)


def rolled(python: SimpleNamespace):
    """A program that a Python number is part of."""
    return lambda batch: {"out": batch["ids"].roll(python.shift, 1).sum(0)}


def test_the_same_inputs_and_numbers_compile_once():
    compiles, program = make(rolled(SimpleNamespace(shift=1)), shapes={(3, 101)})
    for _ in range(4):
        program(rows(101))
    assert compiles.counters().compiles_after_warmup == 0


def test_a_number_that_changes_is_found_and_its_line_named():
    python = SimpleNamespace(shift=1)
    compiles, program = make(rolled(python), shapes={(3, 102)})
    program(rows(102))
    python.shift = 5
    out = program(rows(102))
    assert out["out"].cpu().sum() == 3 * 102  # the call that compiled again is whole
    with pytest.raises(UnexpectedProgram, match=r"train was compiled again at its call 2 .*ids 3 x 102 float") as found:
        program(rows(102))
    line = rolled.__code__.co_firstlineno + 2
    said = f"s64[] constant(101) became s64[] constant(97) (runtime/test_xla_programs.py:{line})"
    assert found.value.explain() == said
    assert compiles.counters().compiles_after_warmup >= 1


def test_a_warning_is_given_once_and_then_the_value(caplog):
    python = SimpleNamespace(shift=1)
    _, program = make(rolled(python), policy="warn", shapes={(3, 103)})
    with caplog.at_level(logging.WARNING):
        for shift in (1, 2, 3, 4, 5):
            python.shift = shift
            program(rows(103))
    again, value = [record.getMessage() for record in caplog.records]
    assert "compiled again at its call 2" in again
    assert "s64[] constant(102) became s64[] constant(100)" in value


@pytest.mark.parametrize("other", [{"length": 96}, {"length": 104, "width": 5}])
def test_another_shape_is_refused_before_anything_is_compiled(other):
    compiles, program = make(rolled(SimpleNamespace(shift=1)), shapes={(3, 104)})
    program(rows(104))
    num = compiles.counters().num_compiles
    shape = rf"{other.get('width', 3)} x {other['length']}"
    with pytest.raises(UnexpectedProgram, match=rf"ids was 3 x 104 float32 and is {shape} float32"):
        program(rows(**other))
    assert compiles.counters().num_compiles == num
    program(rows(104))  # and the program that is known goes on


def test_another_type_is_refused():
    _, program = make(rolled(SimpleNamespace(shift=1)), shapes={(3, 105)})
    program(rows(105))
    with pytest.raises(UnexpectedProgram, match="ids was 3 x 105 float32 and is 3 x 105 int32"):
        program(rows(105, dtype=torch.int32))


def test_every_expected_shape_may_compile_and_one_that_is_not_counts_as_late():
    compiles, program = make(rolled(SimpleNamespace(shift=1)), policy="warn", shapes={(3, 106), (3, 107)})
    for length in (106, 107, 106, 107):
        program(rows(length))
    assert compiles.counters().compiles_after_warmup == 0
    program(rows(108))
    assert compiles.counters().compiles_after_warmup == 1


def test_arithmetic_outside_of_the_programs_may_compile_the_first_time_only():
    compiles, program = make(rolled(SimpleNamespace(shift=1)), shapes={(3, 109)})
    program(rows(109))
    for number in (2, 3):
        (rows(109)["ids"].roll(number, 1) * number).sum().item()
        if number == 2:
            program(rows(109))
    assert compiles.counters().compiles_after_warmup >= 1
    with pytest.raises(UnexpectedProgram, match=r"compiled between train and train: .*code of your own"):
        program(rows(109))
