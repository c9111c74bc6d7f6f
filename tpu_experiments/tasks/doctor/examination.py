"""Run the checks of task=doctor, all at once in threads: each gathers facts, then judges them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import DoctorTaskConfig
from tpu_experiments.runtime.processes.chips import inspect_lock_file
from tpu_experiments.runtime.processes.variables import exported_variables
from tpu_experiments.tasks.doctor import cloud, devices, places, software, sources
from tpu_experiments.tasks.doctor.finding import Finding, Verdict, failed, not_checked

SLACK_SECONDS = 5.0
"""Added to a check's own time-outs, for the work around them."""


@dataclass(frozen=True)
class Check:
    """One check: `inspect` gathers facts of this machine, `judge` is a pure function of them and the config."""

    name: str
    inspect: Callable[[Config, DoctorTaskConfig], Any]
    judge: Callable[[Any, Config], Finding]
    if_timed_out: Verdict = "not checked"
    """Verdict when `inspect` does not return in time."""


def _on_config(inspect: Callable[[Config], Any]) -> Callable[[Config, DoctorTaskConfig], Any]:
    return lambda config, task: inspect(config)


def _on_machine(inspect: Callable[[], Any]) -> Callable[[Config, DoctorTaskConfig], Any]:
    return lambda config, task: inspect()


CHECKS = (
    Check("settings", _on_config(places.inspect_settings), places.judge_settings),
    Check("versions", _on_config(software.inspect_software), software.judge_versions),
    Check("variables", _on_machine(exported_variables), software.judge_variables),
    Check("flags", _on_config(software.inspect_flags), software.judge_flags),
    Check("runtime_version", _on_machine(cloud.inspect_machine), cloud.judge_runtime_version),
    Check("lock_file", _on_machine(inspect_lock_file), devices.judge_lock_file),
    Check("memlock", _on_machine(devices.inspect_memlock), devices.judge_memlock),
    Check("hugepages", _on_machine(devices.inspect_hugepages), devices.judge_hugepages),
    Check("devices", devices.inspect_devices, devices.judge_devices, if_timed_out="failed"),
    Check("chip_memory", _on_config(sources.inspect_chip_memory), sources.judge_chip_memory),
    Check("host_memory", _on_config(sources.inspect_host_memory), sources.judge_host_memory),
    Check("disk", _on_config(places.inspect_disk), places.judge_disk),
    Check("compile_cache", _on_config(places.inspect_compile_cache), places.judge_compile_cache),
    Check("output_dir", _on_config(places.inspect_output_dir), places.judge_output_dir, if_timed_out="failed"),
    Check("run", _on_config(places.inspect_run), places.judge_run),
    Check("model", sources.inspect_model, sources.judge_model),
    Check("data", sources.inspect_data, sources.judge_data),
    Check("cloud", cloud.inspect_gcloud, cloud.judge_cloud),
)


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    finding: Finding
    seconds: float


class _RunningCheck:
    """One check running in a daemon thread, which does not keep the process from ending."""

    def __init__(self, check: Check, config: Config, task: DoctorTaskConfig) -> None:
        self._check, self._config, self._task = check, config, task
        self._started, self._seconds = time.monotonic(), 0.0
        self._finding: Finding | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._finding = self._check.judge(self._check.inspect(self._config, self._task), self._config)
        except Exception as error:  # a broken check must not hide the others' findings
            self._finding = not_checked(f"{type(error).__name__}: {error}")
        self._seconds = time.monotonic() - self._started

    def result(self) -> Result:
        limit = self._task.device_timeout_seconds if self._check.name == "devices" else self._task.timeout_seconds
        left = self._started + limit + SLACK_SECONDS - time.monotonic()
        self._thread.join(max(left, 0.0))
        if self._finding is not None:
            return Result(self._check.name, self._finding, self._seconds)
        return Result(self._check.name, timed_out(self._check, seconds=limit), limit)


def timed_out(check: Check, *, seconds: float) -> Finding:
    """Return the finding for a check that did not return in time."""
    seen = f"no answer within {seconds:.0f} s"
    if check.if_timed_out == "failed":
        return failed(seen, "check the network and the credentials, or give it longer with task.timeout_seconds=")
    return not_checked(seen, "give it longer with task.timeout_seconds=")


def examine(config: Config, task: DoctorTaskConfig) -> list[Result]:
    """Run the selected checks, and return their results in the order of `CHECKS`."""
    wanted = [check for check in CHECKS if not task.checks or check.name in task.checks]
    running = [_RunningCheck(check, config, task) for check in wanted]
    return [check.result() for check in running]


def would_start(results: Sequence[Result]) -> bool:
    """Return whether no check has failed."""
    return all(result.finding.verdict != "failed" for result in results)
