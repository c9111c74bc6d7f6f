"""The table of conf/PAIRS.md is what the commands compose to."""

from tests.config.pairs import MANUAL, TABLE, table


def test_the_manual_has_the_table_that_the_commands_compose_to():
    """`python -m tests.config.pairs` writes it anew."""
    (written,) = TABLE.findall(MANUAL.read_text(encoding="utf-8"))
    assert written.splitlines() == table().splitlines()
