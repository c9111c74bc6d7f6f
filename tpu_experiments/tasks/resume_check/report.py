"""Format the verdict and the cost of a resume as a table and as JSON."""

from dataclasses import asdict
from itertools import pairwise
from typing import Any

from tpu_experiments.tasks.resume_check.children import Life
from tpu_experiments.tasks.resume_check.compare import Verdict

MIB = 2**20


def costs(lives: list[Life]) -> list[dict[str, Any]]:
    """Return the cost of each resume of the killed run; seconds are wall time of this machine."""
    killed = lives[1:]
    found = []
    for before, life in pairwise(killed):
        assert before.kill is not None, "all lives but the last end in a kill"
        found.append(
            {
                "killed_after_step": max(before.read),
                "where": before.kill.where,
                "checkpoint_was_in_background": before.was_in_background,
                "resumed_from_step": life.resume_step,
                "steps_repeated": max(before.rows) - life.resume_step,
                "seconds_to_first_step": life.first_step - life.started,
                "bytes_read": life.checkpoint_bytes,
            }
        )
    return found


def as_json(verdict: Verdict, lives: list[Life]) -> dict[str, Any]:
    """Return the content of resume_check.json."""
    whole = lives[0]
    return {
        "equal": verdict.is_equal,
        "steps": max(whole.rows),
        "checks": [asdict(check) | {"equal": not check.difference} for check in verdict.checks],
        "resumes": costs(lives),
        "uninterrupted_seconds_to_first_step": whole.first_step - whole.started,
    }


def as_text(verdict: Verdict, lives: list[Life], *, place: str) -> str:
    """Return the checks, the costs and a conclusion as text."""
    whole = lives[0]
    lines = [f"{max(whole.rows)} steps, killed {len(lives) - 2} times, compared with an uninterrupted run"]
    lines += [
        f"  {check.name:<36}{'DIFFERS: ' + check.difference if check.difference else 'equal'}   {check.compared}"
        for check in verdict.checks
    ]
    lines.append("cost of a resume")
    for cost in costs(lives):
        how = ", saved in the background" if cost["checkpoint_was_in_background"] else ""
        lines.append(
            f"  killed after step {cost['killed_after_step']}, {cost['where']}: resumed from step "
            f"{cost['resumed_from_step']}{how}, {cost['steps_repeated']} steps repeated, "
            f"{cost['seconds_to_first_step']:.1f} s to the first step "
            f"(a fresh start: {whole.first_step - whole.started:.1f} s), {cost['bytes_read'] / MIB:.2f} MiB read"
        )
    word = "this run can be killed: it resumes exactly" if verdict.is_equal else "this run does not resume exactly"
    return "\n".join([*lines, f"{word}; {place}"])
