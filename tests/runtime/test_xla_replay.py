"""Calls that run the graph of an earlier trace, on the CPU device: same numbers, same buffers, same watch."""

import contextlib
import json
import logging
import queue
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.test_xla_programs import make, rolled, rows
from tests.training.runs import REPOSITORY
from tpu_experiments.runtime.base import UnexpectedProgram
from tpu_experiments.runtime.xla.programs import Compiles, XlaProgram
from tpu_experiments.runtime.xla.replay import NUM_FIRST, is_on_xla

pytestmark = pytest.mark.xla


@dataclass
class Report:
    """A view of a value, a value, an input as it came, and what is no tensor."""

    rows: Tensor
    loss: Tensor
    same: Tensor
    note: str | None = None


class Lab:
    """A weight and its momentum on the device, moved by a random step."""

    def __init__(self, *, width: int, every: int, holds: bool = True, policy: str = "error") -> None:
        import torch_xla

        self.device = torch_xla.device()
        self.state = {name: torch.full((4, width), value).to(self.device) for name, value in (("w", 1.0), ("m", 0.0))}
        self.frozen = torch.linspace(-1, 1, width).to(self.device)
        self.factor = 0.5
        held = (lambda: self.state) if holds else dict
        self.compiles, self.program = make(self.step, every=every, held=held, policy=policy)

    def step(self, batch: dict[str, Tensor]) -> Report:
        w, m = self.state["w"], self.state["m"]
        rows_4 = (batch["ids"] * w * self.frozen).sum(1) + torch.rand(4, device=self.device)
        new = m * 0.9 + rows_4.mean() * self.factor
        m.copy_(new)
        w.copy_(w - 0.01 * new)
        return Report(rows_4.detach()[None], rows_4.sum(), batch["ids"], "as it was")

    def run(self, num: int, **kwargs: Any) -> list[list[float]]:
        """Losses, rows and the sum of the weight after each of `num` steps with their own input and seed."""
        import torch_xla.core.xla_model as xm

        found = []
        for index in range(num):
            xm.set_rng_state(100 + index, str(self.device))
            ids = torch.full(self.state["w"].shape, 1.0 + index).to(self.device)
            report = self.program({"ids": ids}, **kwargs)
            assert torch.equal(report.same.cpu(), ids.cpu())
            assert (report.rows.shape, report.note) == ((1, 4), "as it was")
            found.append([float(report.loss.cpu()), *report.rows.cpu()[0].tolist(), float(self.state["w"].cpu()[0, 0])])
        return found


@contextlib.contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[Counter[str]]:
    """Count the calls of functions of torch_xla's extension, which are made as ever."""
    import torch_xla

    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(torch_xla._XLAC, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(torch_xla._XLAC, name, counting(name))
        yield counts


def test_replayed_calls_give_the_numbers_of_traced_ones_bit_for_bit():
    traced, replayed = Lab(width=31, every=1), Lab(width=31, every=50)
    assert replayed.run(20) == traced.run(20)
    assert (traced.program.num_traced, replayed.program.num_traced) == (20, 3)
    assert traced.compiles.counters().compiles_after_warmup == 0


def test_some_calls_are_traced_again_and_the_first_one_after_another_program():
    lab = Lab(width=33, every=6)
    lab.run(14)
    before = lab.program.num_traced
    assert NUM_FIRST < before <= NUM_FIRST + 3, "at a distance of 3 to 9 calls"
    other = XlaProgram(lambda batch: {"sum": batch["ids"].sum()}, name="evaluate", compiles=lab.compiles)
    other({"ids": torch.ones(4, 33).to(lab.device)})
    lab.run(1)
    assert lab.program.num_traced == before + 1


def test_programs_that_take_turns_are_replayed_to_the_numbers_of_traced_ones():
    """As an iteration of learning from rewards is: no program follows itself."""
    found = []
    for every in (1, 50):
        lab, sums = Lab(width=37, every=every), []
        other = XlaProgram(
            lambda batch, lab=lab: {"sum": (batch["ids"] * lab.state["w"]).sum()},
            name="write",
            compiles=lab.compiles,
            held=lambda lab=lab: lab.state,
        )
        for _ in range(8):
            sums += lab.run(1)
            sums.append(float(other({"ids": torch.ones(4, 37).to(lab.device)})["sum"].cpu()))
        found.append((sums, lab.program.num_traced, other.num_traced, lab.compiles.counters().compiles_after_warmup))
    (traced, *num), (replayed, *num_then) = found
    assert replayed == traced
    assert (num, num_then) == ([8, 8, 0], [3, 3, 0])


def test_state_is_donated_by_every_call_traced_or_not():
    import torch_xla
    import torch_xla.core.xla_model as xm

    lab, places = Lab(width=1024, every=50), []
    for _ in range(6):
        lab.run(1)
        xm.wait_device_ops()
        places.append([torch_xla._XLAC._unsafe_buffer_pointer(t) for t in lab.state.values()])
    assert lab.program.num_traced == 3
    assert places == [places[0]] * 6, "new values lie where the old ones lay"


def test_the_random_state_moves_on_as_after_a_trace():
    import torch_xla.core.xla_model as xm

    drawn = []
    for every in (1, 50):
        compiles = Compiles(policy="error", trace_every=every)
        program = XlaProgram(lambda b: {"x": torch.rand_like(b["x"])}, name="draw", compiles=compiles)
        batch = {"x": torch.zeros(35).to("xla")}
        xm.set_rng_state(7, str(batch["x"].device))
        numbers = []
        for _ in range(8):
            batch = program(batch)
            numbers.append(batch["x"].cpu().tolist())
        drawn.append(numbers)
    assert drawn[0] == drawn[1]
    assert len({tuple(numbers) for numbers in drawn[1]}) == 8


def test_a_closure_gets_the_outputs_of_its_own_call():
    lab, seen = Lab(width=36, every=50), queue.SimpleQueue()
    losses = [loss for loss, *_ in lab.run(8, on_output=lambda report: seen.put(float(report.loss.cpu())))]
    assert [seen.get(timeout=60) for _ in range(8)] == losses
    assert lab.program.num_traced == 3


def test_a_tensor_that_is_written_and_not_held_keeps_the_program_traced():
    held = Lab(width=37, every=50).run(8)
    lab = Lab(width=37, every=50, holds=False)
    for one, other in zip(lab.run(8), held, strict=True):  # it is another program: its outputs are more
        assert one == pytest.approx(other, rel=1e-5)
    assert lab.program.num_traced == 8


def test_a_held_tensor_that_is_replaced_is_read_anew():
    lab = Lab(width=38, every=50)
    lab.run(5)
    lab.state |= {name: torch.full((4, 38), 2.0).to(lab.device) for name in lab.state}
    fresh = Lab(width=38, every=1)
    fresh.state |= {name: torch.full((4, 38), 2.0).to(lab.device) for name in lab.state}
    assert lab.run(3) == fresh.run(3)
    assert lab.program.num_traced == 3


def test_a_held_tensor_that_is_given_its_own_value_keeps_the_program_traced():
    state = {"w": torch.ones(4, 43).to("xla"), "still": torch.ones(4, 43).to("xla")}

    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        state["w"].copy_(state["w"] + batch["ids"] * state["still"])
        state["still"].copy_(state["still"])
        return {"sum": state["w"].sum()}

    compiles, program = make(step, every=50, held=lambda: state)
    sums = [float(program({"ids": torch.ones(4, 43).to("xla")})["sum"].cpu()) for _ in range(6)]
    assert sums == [4.0 * 43 * (2 + index) for index in range(6)]
    assert program.num_traced == 6
    assert compiles.counters().compiles_after_warmup == 0


def test_a_number_that_changes_from_the_first_calls_on_is_reported_and_right(caplog):
    def losses(lab: Lab) -> list[list[float]]:
        found = []
        for index in range(6):
            lab.factor = 0.5 + index / 16
            found += lab.run(1)
        return found

    expected, lab = losses(Lab(width=39, every=1)), Lab(width=39, every=50)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()  # a test before it may have left the log at INFO
    with caplog.at_level(logging.WARNING):
        assert losses(lab) == expected
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "a number that Python hands to train has changed at its call 2 (0.5 became 0.5625), so every"
    )
    assert lab.program.num_traced == 6


def test_a_number_that_changes_later_stops_the_program_with_its_values():
    lab = Lab(width=40, every=5)
    lab.run(4)
    lab.factor = 2.5
    lab.run(3)  # two that are replayed with 0.5, and one that is traced
    with pytest.raises(
        UnexpectedProgram,
        match=r"a number that Python hands to train has changed at its call 7 \(0.5 became 2.5\); the 3 calls before",
    ):
        lab.run(1)


def test_a_baked_value_that_changes_later_is_found_and_its_line_named():
    python = SimpleNamespace(shift=1)
    _, program = make(rolled(python), every=5)
    for index in range(7):
        python.shift = 1 if index < 4 else 5
        program(rows(141))
    with pytest.raises(UnexpectedProgram, match=r"train was compiled again at its call 7 .*; the 3 calls") as found:
        program(rows(141))
    assert "s64[] constant(140) became s64[] constant(136) (runtime/test_xla_programs.py:" in found.value.explain()


def test_state_that_is_split_over_devices_is_donated_and_stays_where_it_is():
    command = [sys.executable, "-m", "tests.runtime.donated_state", "4"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    is_gone, sums, shardings, num_traced, num_compiles = json.loads(done.stdout.splitlines()[-1])
    assert is_gone == [[True, True]] * 6
    assert num_traced == 3
    assert num_compiles == 1
    assert shardings == [["{devices=[4,1]0,1,2,3}"] * 2] * 6
    w = m = 1.0
    for index, found in enumerate(sums):
        m = m * 0.9 + 1 + index
        w -= 0.1 * m
        assert found == pytest.approx(64 * w, rel=1e-5)


@pytest.mark.parametrize(
    "draw", [random.random, lambda: torch.rand(()).item(), np.random.random], ids=["python", "torch", "numpy"]
)
def test_a_program_that_draws_numbers_on_the_host_is_never_replayed(draw):
    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        drawn.append(draw())
        return {"sum": (batch["ids"] * (2.0 + drawn[-1])).sum()}

    drawn: list[float] = []
    _, program = make(step, every=50)
    sums = [float(program(rows(45))["sum"].cpu()) for _ in range(6)]
    assert program.num_traced == 6
    assert sums == [pytest.approx(3 * 45 * (2.0 + number), rel=1e-5) for number in drawn]  # a sum in float32
    assert len(set(sums)) == 6


def test_a_program_that_is_always_traced_waits_for_nothing_and_records_nothing(monkeypatch):
    names = (
        "_xla_wait_device_ops",
        "_run_cached_graph",
        "_xla_warm_up_cache",
        "_get_graph_hash",
        "_xla_get_cpu_tensors",
    )
    found = {}
    for every in (1, 50):
        lab = Lab(width=46, every=every)
        lab.run(1)
        with counted_calls(monkeypatch, *names) as counts:
            for index in range(4):
                lab.program({"ids": torch.full((4, 46), 1.0 + index).to(lab.device)})
        found[every] = counts
    assert found[1] == {}
    assert set(found[50]) == set(names), "what is counted is what a recorded program calls"


def test_a_tensor_without_a_device_is_no_stray():
    """A tensor of a released graph has none, and the search for strays sees every tensor that is alive."""

    class Released:
        @property
        def device(self):
            raise RuntimeError("tensor does not have a device")

    assert not is_on_xla(Released())
    assert not is_on_xla(torch.zeros(1))
    assert is_on_xla(torch.zeros(1, device="xla"))
