"""Plan the run before anything is rented: whether it fits, its duration and its cost."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.tpu_vm.code_sync import ROOT
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.job import is_sweep, points_at_once


@dataclass(frozen=True)
class Promise:
    """Estimate read from plan.json."""

    fits: bool
    hours: float | None
    usd: float | None
    """Cost at the requested price, spot or on demand; None where a length or a price is unknown."""
    method: str

    @property
    def sentence(self) -> str:
        """Return the estimate as a sentence to show before the confirmation."""
        if self.hours is None:
            return f"planned ({self.method}): it fits; how long it takes is not known (plan.md says why)"
        money = "" if self.usd is None else f", ${self.usd:.2f}"
        return f"planned ({self.method}): it fits, {self.hours:.1f} h{money}"


def plan_words(overrides: tuple[str, ...], *, results: Path) -> list[str]:
    """Return the command that plans the run locally; a sweep's plans are kept apart from its results."""
    kept = [word for word in overrides if not word.startswith(("output_dir=", "task="))]
    folder = results / "plans" if is_sweep(overrides) else results
    return [sys.executable, str(ROOT / "run.py"), "task=plan", *kept, f"output_dir={folder}"]


def promise(overrides: tuple[str, ...], *, run_name: str, spot: bool, results: Path) -> Promise:
    """Plan in a child process, since a plan imports torch, which the launcher must not.

    Raises:
        LaunchError: planning failed, or the run does not fit.
    """
    folder = results / "plans" / run_name
    if is_sweep(overrides):
        folder = results / "plans" / "sweeps" / run_name
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "plan.json").unlink(missing_ok=True)
    code = subprocess.call(plan_words(overrides, results=results), cwd=ROOT)
    files = sorted(folder.glob("plans/*/plan.json") if is_sweep(overrides) else folder.glob("plan.json"))
    if code or not files:
        raise LaunchError(
            f"plan=first; the plan ended with exit code {code} and says why above; mend it, plan on Linux "
            f"(bash launch/local.sh python launch/tpu.py ...), or rent without one: plan=skip."
        )
    found = [_read(file, spot=spot) for file in files]
    return found[0] if not is_sweep(overrides) else _together(found, at_once=points_at_once(overrides))


def _read(file: Path, *, spot: bool) -> Promise:
    content = json.loads(file.read_text(encoding="utf-8"))
    usd = (content.get("usd") or {}).get("spot" if spot else "on_demand")
    found = Promise(bool(content.get("fits")), content.get("hours"), usd, str(content.get("method")))
    if not found.fits:
        raise LaunchError(
            f"plan=first; the run does not fit; {file.with_suffix('.md')} has what would; nothing was rented."
        )
    return found


def _together(points: list[Promise], *, at_once: int) -> Promise:
    """Sum the plans of a sweep's points; no price, since the points may share the machine."""
    hours = [point.hours for point in points if point.hours is not None]
    whole = sum(hours) / at_once if len(hours) == len(points) else None
    return Promise(True, whole, None, f"{points[0].method}, {len(points)} points")
