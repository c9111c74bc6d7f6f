"""Every shipped recipe plans: by formulas alone it fits the hardware that it names, with a step of some length."""

import pytest

from tests.config.composing import composed, names
from tpu_experiments.tasks.plan import check_hw
from tpu_experiments.tasks.plan.formulas import formula_plan

ON_A_CPU = ("first_minute",)


def test_the_recipes_without_a_chip_are_known() -> None:
    chips = {recipe: composed(f"experiment={recipe}").hw.chip for recipe in names("experiment")}
    assert tuple(recipe for recipe, chip in chips.items() if chip is None) == ON_A_CPU


@pytest.mark.parametrize("recipe", [name for name in names("experiment") if name not in ON_A_CPU])
def test_a_recipe_fits_its_hardware(recipe: str) -> None:
    config = composed(f"experiment={recipe}", "task=plan", "task.method=analytic")
    check_hw(config)
    plan = formula_plan(config)
    assert plan.fits, plan.shortage
    assert 0 < plan.memory.total < plan.memory.limit
    assert plan.time is not None
    assert plan.time.total_s > 0
    assert [program.name for program in plan.programs] == ["train", "eval", "sample"]
