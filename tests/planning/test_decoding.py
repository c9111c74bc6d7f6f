"""Answers that a plan counts are refused in a sentence where nothing compiles them."""

import re

import pytest

from tests.config.composing import composed
from tests.planning.commands import run_plan
from tpu_experiments.config.errors import ConfigError


@pytest.mark.parametrize("with_it", ["task.programs=train", "task.method=analytic", "task.pack=2"])
def test_answers_are_compiled_beside_all_programs_of_one_run(with_it: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"task.decode.rows=64 with {with_it}; ")):
        composed("task=plan", "hw=v5e8", "task.decode.rows=64", with_it)


def test_a_gpu_has_no_compiler_of_answers() -> None:
    with pytest.raises(ConfigError, match=r"^task\.decode\.rows=64; .*nothing is compiled here; "):
        run_plan("hw=l4", "task.decode.rows=64")
