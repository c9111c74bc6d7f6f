"""Names and commands of points."""

from pathlib import Path

from tests.config.composing import composed
from tpu_experiments.sweeping.points import (
    Point,
    command_of,
    pack_command,
    point_name,
    shown_command,
    sweep_folder,
    without_own,
)


def test_a_point_has_a_name_that_the_checks_accept() -> None:
    assert point_name(["lora.r=8", "lora.alpha=16"]) == "lora.r=8,lora.alpha=16"
    assert point_name([]) == "base"
    for overrides in (["data=[wiki_ro,uk_law]"], ["+model.arch.x=1", "data.uk_law.path=/a b/c"], ["~local", "seed=1"]):
        point = point_name(overrides)
        assert composed(f"name='{point}'").name == point


def test_long_names_are_cut_and_stay_apart() -> None:
    long = [f"data.wiki_ro.path=/a/{'b' * 300}"]
    first, second = point_name([*long, "seed=1"]), point_name([*long, "seed=2"])
    assert len(first) <= 120
    assert first != second
    assert first == point_name([*long, "seed=1"])


def test_the_child_is_one_run_in_the_folder_of_the_sweep(tmp_path: Path) -> None:
    folder = sweep_folder(str(tmp_path), "ranks")
    config = composed("name=p", f"output_dir={folder}")
    own = tuple(without_own(["seed=1", "name=ranks", f"output_dir={tmp_path}", "lora.r=8"]))
    command = command_of(Point("lora.r=8", {"lora.r": "8"}, own, config), given=str(tmp_path))
    assert command[2:] == ["seed=1", "lora.r=8", 'name="lora.r=8"', f"output_dir={folder}", "hydra.mode=RUN"]
    assert Path(command[1]).name == "run.py"
    assert Path(command[1]).exists()
    point = Point("p", {}, own, config, options=("--config-dir=/lab/conf",))
    both = command_of(point, given=str(tmp_path)), pack_command(point, folder="f")
    assert [words[2:4] for words in both] == [["--config-dir=/lab/conf", "seed=1"]] * 2


def test_plans_of_a_sweep_share_what_is_compiled(tmp_path: Path) -> None:
    config = composed("task=plan", "hw=v5e1", "name=p", f"output_dir={tmp_path}/sweeps/s")
    command = command_of(Point("p", {}, (), config), given=str(tmp_path))
    assert command[-1] == f"task.compiled_folder={tmp_path}/plans/compiled"


def test_the_command_for_people_is_without_what_makes_it_a_sweep() -> None:
    overrides = ["sweep=optuna_lora", "sweeping.points_at_once=8", "data=[a,b]", "lora.r=8", "hydra.sweeper.n_trials=3"]
    assert shown_command(overrides, name="best") == "python run.py 'data=[a,b]' lora.r=8 name=best"
