"""Which points share a program, and what is said of the others."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.composing import composed, refusal
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import with_lengths
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.packs import why_alone
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.planning.stored_plans import programs_key, sizes_of
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.sweeping.engines.base import Started
from tpu_experiments.sweeping.packs import chosen_size, pack_plans, packs_of, packs_text, settled, shortage_text
from tpu_experiments.sweeping.points import Point
from tpu_experiments.sweeping.sweep import Running
from tpu_experiments.sweeping.totals import pack_lines
from tpu_experiments.tasks.plan import run


def points(*lines: str, common: tuple[str, ...] = ()) -> list[Point]:
    return [Point(line, {}, tuple(line.split()), composed(*common, *line.split())) for line in lines]


def names(packs: list[list[Point]]) -> list[list[str]]:
    return [[point.name for point in pack] for pack in packs]


def test_points_that_differ_in_adapter_and_optimizer_alone_share_a_program() -> None:
    found = points(
        "lora.r=8",
        "lora.r=4 lora.alpha=1",
        "lora.dropout=0.1",
        "optim.lr=1e-3",
        "optim=adafactor",
        "schedule.floor=0.1",
    )
    assert len(packs_of(found, largest=8)) == 1
    assert [len(pack) for pack in packs_of(found, largest=4)] == [4, 2]
    assert [len(pack) for pack in packs_of(found, largest=1)] == [1] * 6


def test_what_separates_points_is_named() -> None:
    found = points("lora.r=8", "lora.r=16", "lora.targets=[q_proj]", "lora.r=4 lora.targets=[q_proj]", "lora.dora=true")
    packs = packs_of(found, largest=8)
    assert names(packs) == [
        ["lora.r=8", "lora.r=16"],
        ["lora.targets=[q_proj]", "lora.r=4 lora.targets=[q_proj]"],
        ["lora.dora=true"],
    ]
    counts, alone, differ = packs_text(packs)
    assert counts == "sweeping.pack: in one program each: 2 packs of 2 points, 1 alone"
    assert "lora.dora=true needs" in alone
    assert differ == "sweeping.pack: points of different packs differ in lora.targets"


def test_points_differ_in_the_numbers_of_their_loss_and_not_in_its_kind() -> None:
    """A weight of 0 leaves a part of the loss out; betas are numbers that rows carry into the program."""
    pairs = ("objective=dpo", "data=stories_pairs_ro", "curriculum=single")
    words = ("", "objective.beta=0.5", "objective.label_smoothing=0.1 optim.lr=1e-4", "objective.loss=ipo")
    more = ("objective.sft_weight=1", "objective.sft_weight=2 objective.beta=0.2")
    packs = packs_of(points(*words, *more, common=pairs), largest=8)
    assert names(packs) == [list(words[:3]), [words[3]], list(more)]
    assert list(packs_text(packs))[-1] == (
        "sweeping.pack: points of different packs differ in objective.loss, objective.sft_weight, "
        "objective.label_smoothing"
    )


def test_points_of_kto_share_a_program_where_its_numbers_are_equal() -> None:
    words = ("optim.lr=1e-4", "lora.r=4", "objective.beta=0.5")
    packs = packs_of(points(*words, common=("objective=kto", "data=stories_pairs_ro", "curriculum=single")), largest=8)
    assert names(packs) == [list(words[:2]), [words[2]]]
    assert list(packs_text(packs))[-1] == "sweeping.pack: points of different packs differ in objective.beta"


def test_a_seed_that_draws_the_base_separates() -> None:
    """With random weights another seed is another base."""
    assert len(packs_of(points("seed=1", "seed=2", common=("model=qwen05b", "model.size=tiny")), largest=8)) == 2
    assert len(packs_of(points("seed=1", "seed=2"), largest=8)) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("lora=none", "lora.r=0 trains all weights"),
        ("lora.modules_to_save=[norm]", "lora.modules_to_save=[norm] trains more than adapters"),
        ("lora.target_parameters=[x.y]", "lora.target_parameters=[x.y] gives each expert an adapter of its own"),
        (
            "+lora.rank_pattern.q_proj=2",
            "lora.rank_pattern gives each module a scale of its own, and a pack has one for each adapter",
        ),
        ("lora.init=pissa", "lora.init=pissa depends on the base's weights"),
        (
            "hw.parallel=spawn hw.num_devices=2 hw.runtime=eager",
            "hw.parallel=spawn on 1 hosts trains in several processes",
        ),
        ("lora.r=4", None),
    ],
)
def test_why_a_point_trains_alone(line: str, why: str | None) -> None:
    (point,) = points(line)
    assert why_alone(point.config) == why


def test_auto_takes_what_fits_the_chip_and_spreads_over_the_slots() -> None:
    auto = ("sweeping.pack=auto", "data=sample_text", "trainer.global_batch_rows=8", "trainer.seq_len=1024")
    whole = ("model=mistral7b", "trainer.micro_batch_rows=1", "sharding=fsdp")
    assert chosen_size(ranks(*auto)) == (8, "at most 8")
    small, why = chosen_size(ranks(*auto, *whole, "hw=v5e8"))
    assert 1 <= small < 8
    assert "GiB per chip" in why
    assert chosen_size(ranks(*auto, *whole, "hw=v6e8"))[0] > small
    assert chosen_size(ranks(*auto, "hw=v6e1", "sweeping.points_at_once=5"))[0] == 2


def test_auto_believes_a_compiled_plan_of_the_pack(tmp_path: Path) -> None:
    words = ("sweeping.pack=auto", "data=sample_text", "trainer.global_batch_rows=8", "trainer.seq_len=1024")
    found = ranks(*words, "hw=v6e1", f"output_dir={tmp_path}")
    widest = found[-1].config
    arch = sizes_of(widest.model)
    for size, gib in ((7, 30.0), (8, 33.0)):
        key = programs_key(replace(widest, task=PlanTaskConfig("plan", pack=size)), arch, resolve_stages(widest))
        file = tmp_path / "plans" / f"pack_{size}" / "plan.json"
        file.parent.mkdir(parents=True)
        fields = {"method": "compiled", "programs_key": key, "hbm_gib_per_chip": {"total": gib}}
        file.write_text(json.dumps({**fields, "fits": gib < 31.25}))
    assert chosen_size(found) == (7, "compiled at 30.00 of 31.25 GiB per chip; at most 8")


@pytest.mark.parametrize(
    ("pack_step", "at_once", "size", "why"),
    [
        (3.6, 1, 8, "by compiled plans 10 points end in 720 s with 8 in one, 1,700 s with 1, 1,200 s with 2"),
        (20.0, 1, 1, "by compiled plans 10 points end in 1,700 s with 1 in one, 3,933 s with 2, 2,907 s with 8"),
        (3.6, 10, 1, "by compiled plans 10 points end in 170 s with 1 in one, 240 s with 2, 480 s with 8"),
    ],
)
def test_auto_takes_what_ends_first_by_compiled_plans(
    pack_step: float, at_once: int, size: int, why: str, tmp_path: Path
) -> None:
    """A point alone: 20 s to start, 50 to compile, 100 steps of 1 s. Eight: 20, 100, 100 steps; two: as many steps."""
    length = ("curriculum=single", "curriculum.stages.main.steps=100")
    shape = ("data=sample_text", "trainer.global_batch_rows=8", "trainer.seq_len=1024")
    words = ("sweeping.pack=auto", f"sweeping.points_at_once={at_once}", *shape, *length)
    found = ranks(*words, "hw=v6e1", f"output_dir={tmp_path}")
    arch = sizes_of(found[0].config.model)
    for adapters, step, compiling in ((1, 1.0, 50.0), (2, pack_step / 3, 100.0), (8, pack_step, 100.0)):
        planned = replace(found[-1].config, task=PlanTaskConfig("plan", pack=adapters))
        program = {"name": "train", "stages": ["main"], "estimated_seconds": step, "compile_seconds": compiling}
        fields = {
            "method": "compiled",
            "programs_key": programs_key(planned, arch, resolve_stages(planned)),
            "hbm_gib_per_chip": {"total": 3.0},
            "fits": True,
            "programs": [program, {"name": "eval", "compile_seconds": 1000.0}],
        }
        file = tmp_path / "plans" / f"pack_{adapters}" / "plan.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(fields))
    assert chosen_size(found) == (size, why)


def ranks(*overrides: str) -> list[Point]:
    """Ten points that differ in rank."""
    config = composed(*overrides)
    each = [replace(config, lora=replace(config.lora, r=r)) for r in range(4, 44, 4)]
    return [Point(str(own.lora.r), {}, (), own) for own in each]


def test_plans_of_packs_stand_beside_those_of_their_points(tmp_path: Path) -> None:
    common = ("task=plan", "hw=v5e1", f"output_dir={tmp_path}")
    found = points("lora.r=8", "lora.r=16", "lora.dora=true", common=common)
    (plan,) = pack_plans(packs_of(found, largest=8))
    assert plan.overrides == ("lora.r=16", "task.pack=2")
    assert plan.members == ("lora.r=8", "lora.r=16")
    for point, hours in zip([*found, plan], (1.0, 2.0, 0.5, 1.2), strict=True):
        file = tmp_path / "plans" / point.name / "plan.json"
        file.parent.mkdir(parents=True)
        file.write_text(
            f'{{"hours": {hours}, "estimated_step_seconds": {hours / 10}, "usd": {{"on_demand": {hours * 2}}}, '
            f'"hbm_gib_per_chip": {{"total": {hours * 3}}}}}'
        )
    table = [line.split("  ") for line in pack_lines(found, [plan], points_at_once=1)]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in table]
    assert rows[1:] == [
        ["one after the other", "6.00", "0.350", "3.50", "7.00"],
        ["in one program each: 2", "3.60", "0.170", "1.70", "3.40"],
    ]
    rows = pack_lines(found, [plan], points_at_once=2)
    assert rows[2].split()[-2:] == ["2.00", "7.00"]
    assert rows[3].split()[-2:] == ["1.20", "3.40"]


class Ended(Started):
    """A pack whose process has ended."""

    def __init__(self, codes: dict[str, int]) -> None:
        self._codes = codes

    def poll(self) -> int | None:
        return 1

    def terminate(self) -> None: ...

    def codes(self) -> dict[str, int]:
        return self._codes


def test_a_program_of_which_no_point_finished_is_advised_to_be_smaller() -> None:
    config = composed()
    many = [Point(str(number), {}, (), config) for number in range(8)]
    text = Running(many, Ended({"0": 1})).failed_text(1)
    assert text == "no point of a program with 8 of them finished; sweeping.pack=4 takes less memory"
    assert Running(many, Ended({"0": 0, "1": 1})).failed_text(1) is None
    assert Running(many, Ended({})).failed_text(75) is None
    assert Running(many[:1], Ended({})).failed_text(1) is None


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("lora=none",), "task.pack=4; lora.r=0 trains all weights, and such runs share no program; use task.pack=1."),
        (("task.compare=[v6e1]",), "a pack is planned by itself"),
    ],
)
def test_a_plan_of_a_pack_that_cannot_be_is_refused(words: tuple[str, ...], part: str) -> None:
    assert part in refusal("task=plan", "hw=v5e1", "task.pack=4", *words)


def test_formulas_do_not_plan_a_pack() -> None:
    config = composed("task=plan", "hw=v5e1", "task.pack=4", "task.method=analytic")
    with pytest.raises(ConfigError, match=r"task\.pack=4; formulas know one adapter"):
        run(config)


TABLE_LINE = ("sweeping.pack=auto", "model=mistral7b", "data=ultrachat_ro", "hw=v6e8")
"""conf/tuned.yaml has its settings up to rank 16: `save_dots` at 26.75 of 31.25 GiB, of which no two fit."""


def test_a_pack_is_judged_by_the_settings_that_its_points_train_with(tmp_path: Path) -> None:
    """As configured, `layer_inputs`, five would fit; the points take the table's line, with which one fits."""
    found = points("lora.r=8", "lora.r=16", common=(*TABLE_LINE, f"output_dir={tmp_path}"))
    assert chosen_size(found)[0] > 1
    known = settled(found)
    assert [point.config.model.remat for point in known] == ["save_dots"] * 2
    assert [point.overrides for point in known] == [point.overrides for point in found]
    assert chosen_size(known) == (1, "no two fit")


def test_points_whose_settings_differ_share_no_program(tmp_path: Path) -> None:
    found = points("lora.r=16", "lora.r=32", "lora.r=64", common=(*TABLE_LINE, f"output_dir={tmp_path}"))
    packs = packs_of(settled(found), largest=8)
    assert names(packs) == [["lora.r=16"], ["lora.r=32", "lora.r=64"]]
    assert "points of different packs differ in " in list(packs_text(packs))[-1]
    assert "tuned" not in list(packs_text(packs))[-1]


def test_rows_are_what_is_known_of_the_data(tmp_path: Path) -> None:
    common = ("sweeping.pack=4", "model=qwen05b", "data=uk_law", "hw=v5e1", f"output_dir={tmp_path}")
    (point,) = settled(points("lora.r=8", common=common))
    assert (point.config.trainer.seq_len, point.config.trainer.global_batch_rows) == (896, 16)


def test_a_point_that_has_begun_is_judged_by_its_own_settings(tmp_path: Path) -> None:
    (new,) = points("lora.r=8", common=(*TABLE_LINE, "tuned=off", "name=begun", f"output_dir={tmp_path}"))
    RunFolder(str(tmp_path), "begun").create(with_lengths(new.config, None))
    (again,) = points("lora.r=8", common=(*TABLE_LINE, "name=begun", f"output_dir={tmp_path}"))
    assert settled([again])[0].config.model.remat == "layer_inputs"


def test_without_a_chip_points_stay_as_they_are() -> None:
    found = points("lora.r=8", "lora.r=16")
    assert settled(found) == found


def test_a_named_number_of_points_that_does_not_fit_is_said(tmp_path: Path) -> None:
    common = ("sweeping.pack=8", "model=qwen05b", "data=uk_law", "hw=v5e8", f"output_dir={tmp_path}")
    known = settled(points(*(f"lora.r={r}" for r in (2, 4, 6, 8, 10, 12, 14, 16)), common=common))
    sentence = shortage_text(known)
    assert sentence is not None
    assert re.fullmatch(
        r"sweeping\.pack=8; 8 points in one program are estimated at [\d.]+ of 15\.75 GiB per chip; "
        r"use sweeping\.pack=[2-7]",
        sentence,
    )
    assert shortage_text(known[: int(sentence[-1])]) is None
    assert shortage_text(known[: int(sentence[-1]) + 1]) is not None
    assert shortage_text(known[:1]) is None


def test_where_no_two_fit_points_are_to_train_alone(tmp_path: Path) -> None:
    found = settled(points("lora.r=8", "lora.r=16", common=(*TABLE_LINE, f"output_dir={tmp_path}")))
    assert str(shortage_text(found)).endswith("use sweeping.pack=off")
