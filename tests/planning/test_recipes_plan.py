"""Every shipped recipe plans: by formulas alone it fits the hardware that it names, with a step of some length."""

import pytest

from tests.config.composing import composed, names
from tpu_experiments.tasks.plan import check_hw
from tpu_experiments.tasks.plan.formulas import formula_plan
from tpu_experiments.tasks.plan.rollouts import num_scores


@pytest.mark.parametrize("recipe", names("experiment"))
def test_a_recipe_fits_its_hardware(recipe: str) -> None:
    machine = ["hw=rtx4090"] if recipe.endswith("_qlora") else []  # hw=gpu is any, so it has no datasheet
    machine = ["hw=v6e1", "hw.runtime=xla"] if recipe in ("reader_rl", "smollm2_orders") else machine  # on this one
    config = composed(f"experiment={recipe}", "task=plan", "task.method=analytic", *machine)
    check_hw(config)
    plan = formula_plan(config)
    assert plan.fits, plan.shortage
    assert 0 < plan.memory.total < plan.memory.limit
    assert plan.time is not None
    assert plan.time.total_s > 0
    is_silent = recipe.startswith(("diffusion_", "smollm2_")) or recipe.endswith(("_mlm", "_rtd", "_classify"))
    writes = [] if is_silent else ["sample"]
    compares = ["reference"] if config.objective.reads_reference() else []
    compares += ["score"] if num_scores(config) else []
    asks = ["ask"] if config.questions else []
    answers = ["merge", "read", "write"] if config.objective.samples_rollouts else []
    assert [program.name for program in plan.programs] == ["train", "eval", *compares, *writes, *asks, *answers]
