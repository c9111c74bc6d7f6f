"""The tables of families are what the kept pages say."""

import pytest

from tests.benchmarks import families
from tests.benchmarks.families import FAMILIES, MACHINES, MANUAL, MARKED, PAGE, kept_of, short_table, stored, table
from tpu_experiments.tasks.certify.page import digest_of


@pytest.mark.parametrize(("file", "rows"), [(PAGE, table), (MANUAL, short_table)], ids=["benchmarks", "manual"])
def test_a_table_is_what_the_pages_say(file, rows):
    """`python -m tests.benchmarks.families FOLDER --write` writes both anew."""
    (written,) = MARKED.findall(file.read_text(encoding="utf-8"))
    assert written.splitlines() == list(rows(stored()))


def test_every_family_has_a_page_for_every_machine():
    assert [each["name"] for each in stored()] == sorted(FAMILIES)
    assert {tuple(families.steps_of(each)) for each in stored()} == {MACHINES}


def certificate(**changed):
    check = {"name": "logits", "verdict": "right", "said": "they agree", "seconds": 1.0, "figures": {"logits": 1e-7}}
    steps = [
        check | {"name": f"step {name}", "verdict": verdict, "said": said, "figures": figures}
        for name, verdict, said, figures in (
            ("v5e1", "refused", "need 20.00 of 15.75 GiB a chip", {}),
            ("v5e4", "right", "fits", {"method": "analytic", "gib": 8.06, "tokens_per_second_per_chip": 1234}),
            ("v5e8", "right", "fits", {"method": "compiled", "gib": 8.0, "tokens_per_second_per_chip": 999}),
            ("v4-8", "right", "fits", {"method": "analytic", "gib": 8.0, "tokens_per_second_per_chip": 999}),
        )
    ]
    adapter = check | {"name": "adapter", "verdict": "failed", "figures": {"targets": ["q", "v"]}}
    found = {"name": "llama", "checks": [check, adapter, *steps], "versions": {"transformers": "5.23.0"}}
    found |= {"command": "run.py task=certify model.attention=flash prepare.packing=pad", "made": "", "git_commit": ""}
    return found | {"sha256": digest_of(found)} | changed


def test_a_line_has_verdict_settings_and_machines():
    (line,) = list(short_table([kept_of(certificate())]))[2:]
    assert line == "| `llama` | adapter failed | `flash`, one document a row | q, v | v5e4+, v4-8 |"
    (line,) = list(table([kept_of(certificate())]))[2:]
    assert line == "| `llama` | adapter failed | too large | ~1.2, 8.1 | 1.0, 8.0 | ~1.0, 8.0 |"


def test_a_page_that_was_changed_is_refused():
    with pytest.raises(SystemExit, match="llama: the page was changed after it was made"):
        kept_of(certificate(name="llama", made="later"))
