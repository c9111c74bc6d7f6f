"""`--help` names what exists, and every command it shows composes."""

import re
import shlex

import pytest

from tests.config.composing import CONF, composed_as_typed, names
from tpu_experiments.config.messages import GROUPS, help_text
from tpu_experiments.training.stop import STOPPED_EXIT_CODE

EXAMPLES = [
    line.split("#")[0].strip() for line in help_text().splitlines() if re.match(r" +python run.py\b(?! \[)", line)
]


def test_every_group_is_explained_and_every_choice_listed() -> None:
    assert set(GROUPS) == {path.name for path in CONF.iterdir() if path.is_dir()}
    words = set(re.findall(r"[\w.-]+", help_text()))
    assert {choice for group in GROUPS for choice in names(group)} <= words


def test_no_schema_shows_as_a_choice() -> None:
    assert not re.search(r"\bbase(_\w+)?\b", help_text())


def test_it_shows_five_commands() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("command", EXAMPLES)
def test_a_shown_command_composes(command: str) -> None:
    overrides = [word for word in shlex.split(command)[2:] if word != "-m"]
    first_point = [o if "[" in o else re.sub(r"=([^,]+),.*", r"=\1", o) for o in overrides]
    assert composed_as_typed(*first_point)


def test_the_exit_codes_are_the_ones_in_use() -> None:
    codes = [int(code) for code in re.findall(r"^ +(\d+)  \w", help_text(), re.MULTILINE)]
    assert codes == [0, 1, 2, STOPPED_EXIT_CODE]
