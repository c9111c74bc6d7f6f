"""Before anything is rented: does the run fit, how long does it take, what does it cost?"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.tpu_vm.code_sync import ROOT
from launch.tpu_vm.errors import LaunchError


@dataclass(frozen=True)
class Promise:
    """What plan.json says."""

    fits: bool
    hours: float | None
    usd: float | None
    """At the price that was asked for, spot or on demand; null where a length or a price is not known."""
    method: str

    @property
    def sentence(self) -> str:
        """For the question."""
        if self.hours is None:
            return f"planned ({self.method}): it fits; how long it takes is not known (plan.md says why)"
        money = "" if self.usd is None else f", ${self.usd:.2f}"
        return f"planned ({self.method}): it fits, {self.hours:.1f} h{money}"


def plan_words(overrides: tuple[str, ...], *, results: Path) -> list[str]:
    """The run's own command as a plan written here."""
    kept = [word for word in overrides if not word.startswith(("output_dir=", "task="))]
    return [sys.executable, str(ROOT / "run.py"), "task=plan", *kept, f"output_dir={results}"]


def promise(overrides: tuple[str, ...], *, run_name: str, spot: bool, results: Path) -> Promise:
    """Plan in a child, since a plan imports what the launcher never does.

    Raises:
        LaunchError: there is no plan, or the run does not fit.
    """
    file = results / "plans" / run_name / "plan.json"
    file.unlink(missing_ok=True)
    code = subprocess.call(plan_words(overrides, results=results), cwd=ROOT)
    if code or not file.is_file():
        raise LaunchError(
            f"plan=first; the plan ended with exit code {code} and says why above; mend it, plan on Linux "
            f"(bash launch/local.sh python launch/tpu.py ...), or rent without one: plan=skip."
        )
    content = json.loads(file.read_text(encoding="utf-8"))
    usd = (content.get("usd") or {}).get("spot" if spot else "on_demand")
    found = Promise(bool(content.get("fits")), content.get("hours"), usd, str(content.get("method")))
    if not found.fits:
        raise LaunchError(
            f"plan=first; the run does not fit; {file.with_suffix('.md')} has what would; nothing was rented."
        )
    return found
