"""The order in which a search tries its combinations, and what it does not try."""

from collections.abc import Sequence

import pytest

from tests.config.composing import composed
from tpu_experiments.planning.plan import Tried
from tpu_experiments.planning.search import Candidate, combinations, in_waves
from tpu_experiments.tasks.plan import search
from tpu_experiments.tasks.plan.search import Case, axes_of, worth_trying

GIVEN = ("hw=v5e8", "task=plan", "trainer.global_batch_rows=64")
AXES = {"trainer.micro_batch_rows": [8, 2, 4, 1], "model.remat": ["layer_inputs", "none"]}


def candidates(*given: str) -> list[Candidate]:
    return [Candidate(point, composed(*GIVEN, *given, *point)) for point in combinations(AXES)]


def key_of(candidate: Candidate) -> tuple[int, str]:
    return candidate.rows, candidate.config.model.remat


class Compiler:
    """Answers by a limit of rows for every `model.remat`, and remembers what it was asked in which wave."""

    def __init__(self, **limits: int) -> None:
        self.limits = limits
        self.waves: list[list[tuple[int, str]]] = []

    def attempt(self, wave: Sequence[Candidate]) -> list[Tried]:
        self.waves.append([key_of(candidate) for candidate in wave])
        return [self.answer(candidate) for candidate in wave]

    def answer(self, candidate: Candidate) -> Tried:
        rows, remat = key_of(candidate)
        fits = rows <= self.limits[remat]
        return Tried(candidate.overrides, "fits" if fits else "too large", float(rows), 1.0 / rows if fits else None)


def outcomes(tried: list[Tried]) -> dict[str, str]:
    return {" ".join(each.overrides): each.outcome for each in tried}


def test_a_wave_has_the_smallest_micro_batch_of_every_other_setting() -> None:
    compiler = Compiler(layer_inputs=2, none=99)
    given = candidates("model.remat=layer_inputs", "trainer.micro_batch_rows=1")
    tried = in_waves(given, compiler.attempt)
    assert compiler.waves == [
        [(1, "layer_inputs"), (1, "layer_inputs"), (1, "none")],
        [(2, "layer_inputs"), (2, "none")],
        [(4, "layer_inputs"), (4, "none")],
        [(8, "none")],
    ]
    assert len(tried) == len(given) == 9
    [cut] = [each for each in tried if each.outcome == "pruned"]
    assert cut == Tried(
        ("trainer.micro_batch_rows=8", "model.remat=layer_inputs"), "pruned", reason="4 rows were too large"
    )


def test_the_config_as_it_is_is_tried_at_first_and_prunes_what_is_larger() -> None:
    compiler = Compiler(layer_inputs=0, none=0)
    tried = in_waves(candidates("model.remat=none", "trainer.micro_batch_rows=4"), compiler.attempt)
    assert compiler.waves == [[(4, "none"), (1, "layer_inputs"), (1, "none")]]
    found = outcomes(tried)
    assert found.pop("") == "too large"
    assert {name for name, outcome in found.items() if outcome == "too large"} == {
        "trainer.micro_batch_rows=1 model.remat=layer_inputs",
        "trainer.micro_batch_rows=1 model.remat=none",
    }
    assert {each.reason for each in tried if each.outcome == "pruned"} == {"1 rows were too large"}


def test_the_same_rows_as_configured_are_judged_and_not_pruned() -> None:
    compiler = Compiler(layer_inputs=99, none=2)
    found = outcomes(in_waves(candidates("model.remat=none", "trainer.micro_batch_rows=4"), compiler.attempt))
    assert found[""] == found["trainer.micro_batch_rows=4 model.remat=none"] == "too large"
    assert found["trainer.micro_batch_rows=8 model.remat=none"] == "pruned"
    assert found["trainer.micro_batch_rows=2 model.remat=none"] == "fits"


def test_a_refusal_prunes_nothing() -> None:
    """A kernel too large for VMEM at 1 row says nothing of the memory that 2 rows take."""
    compiler = Compiler(layer_inputs=99, none=99)

    def attempt(wave: Sequence[Candidate]) -> list[Tried]:
        return [
            Tried(each.overrides, "refused", reason="vmem") if each.rows == 1 else answer
            for each, answer in zip(wave, compiler.attempt(wave), strict=True)
        ]

    tried = in_waves(candidates("model.remat=none"), attempt)
    assert {each.outcome for each in tried} == {"refused", "fits"}


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        ((), set()),
        (("hw=v5e1",), {"sharding"}),
        (("task.search.axes={sharding:[],model.remat:[]}",), {"sharding", "model.remat"}),
    ],
)
def test_axes_that_change_nothing_are_left_out(overrides: tuple[str, ...], idle: set[str]) -> None:
    config = composed(*GIVEN, *overrides)
    assert (
        set(axes_of(config, config.task))
        == {
            "trainer.micro_batch_rows",
            "sharding",
            "model.remat",
            "model.stack",
        }
        - idle
    )


def test_unrolled_layers_are_tried_once_whatever_folded_ones_would_save(monkeypatch) -> None:
    monkeypatch.setattr(search, "variant", composed)  # run.py has the words from Hydra
    axes = "task.search.axes={trainer.micro_batch_rows:[2,4],sharding:[],model.remat:[save_dots,none]}"
    config = composed("model=mistral7b", "data=ultrachat_ro", *GIVEN, axes, "task.search.prune_above=99")
    case = Case(config, ("model=mistral7b", "data=ultrachat_ro", *GIVEN, axes))
    found, _ = worth_trying(case, config.task)
    tried = [each.overrides for each in found if "model.stack=unrolled" in each.overrides]
    assert sorted(map(sorted, tried)) == [
        sorted((f"trainer.micro_batch_rows={rows}", "model.remat=save_dots", "model.stack=unrolled")) for rows in (2, 4)
    ]
