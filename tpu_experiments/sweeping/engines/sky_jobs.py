"""Points as managed jobs of SkyPilot, whose controller rents a machine for each and another after a preemption.

SkyPilot is an outside tool, like gcloud: its command `sky` is called, and what a point has come to is read from the
files that it writes to the bucket. `sky jobs queue` is asked for what leaves no file. Jobs continue while this machine
sleeps; a job's name is made of the point's folder, so the same command finds it again instead of starting another."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import COMMAND, PACKAGE, require_checkout
from tpu_experiments.config.schema import Config
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import is_transient
from tpu_experiments.sweeping.engines.base import AsksOnSignal, Say, Started
from tpu_experiments.sweeping.placement import require_one_host
from tpu_experiments.sweeping.points import Point, command_of
from tpu_experiments.training.stop import STOPPED_EXIT_CODE

FILES = PACKAGE.parent / "launch" / "sky"
ANY_HOST = "v6e8.yaml"
"""The file whose settings hold for machines that have none of their own."""
OWN_SETTINGS = PACKAGE.parent / "conf" / "local" / "default.yaml"
SENT_TO = "~/sky_workdir/conf/local/default.yaml"
"""git ignores the file, and SkyPilot does not send what git ignores."""
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
NO_BUCKETS = ("memory://", "http://", "https://", "hf://")
NAME_CHARACTERS = 24  # of a job's name, before its hash; SkyPilot adds to it and cuts what a cloud does not allow

QUEUE_SECONDS = 30.0  # between two questions; each starts a Python process for about 2 s
RESULT_SECONDS = 5.0  # between two looks for a job's result.json
QUEUE_LIMIT_SECONDS = 180.0  # a controller that was stopped answers late
LAUNCH_LIMIT_SECONDS = 1800.0  # the first launch rents the controller
CANCEL_SECONDS = 60  # for a run to save after its SIGTERM, before its machine is given back
CANCEL_TRIES = 3
MISSING_ANSWERS = 3  # answers without a submitted job, after which it counts as gone

ENDED_WELL, ENDED_BY_USER, FAILED = "SUCCEEDED", ("CANCELLED", "CANCELLING"), "FAILED"
NO_JOBS = "No in-progress managed jobs"  # `sky jobs queue`, exit code 1, where there is no controller or a stopped one


@dataclass(frozen=True)
class Job:
    """The newest job of a name, as `sky jobs queue` has it."""

    id: int
    status: str

    @property
    def is_alive(self) -> bool:
        """Whether it may still run or be restarted."""
        return self.status not in (ENDED_WELL, *ENDED_BY_USER) and not self.status.startswith(FAILED)


def temporary_folder(owner: object) -> Path:
    """Make a folder that is removed with its owner, or at the end of this process."""
    folder = tempfile.mkdtemp(prefix="tpu_experiments_sky_")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class Question:
    """A command of SkyPilot that runs beside the sweep."""

    def __init__(self, words: Sequence[str], *, limit_seconds: float) -> None:
        self._until = time.monotonic() + limit_seconds
        folder = temporary_folder(self)
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            # A group of its own: Ctrl-C is this process's, which cancels the jobs.
            self._child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0)

    def code(self) -> int | None:
        """Return the exit code, or None while it runs; it is killed at its limit."""
        if self._child.poll() is None and time.monotonic() > self._until:
            self._child.kill()
            self._child.wait()
        return self._child.returncode

    def answer(self) -> str:
        """Return its stdout."""
        return self._out.read_text(errors="replace")

    def complaint(self) -> str:
        """Return the last line of its stderr, else of its stdout."""
        said = self._err.read_text(errors="replace").strip() or self.answer().strip()
        lines = said.splitlines()
        return lines[-1] if lines else f"exit code {self._child.returncode}"


class Queue:
    """What `sky jobs queue` last said."""

    def __init__(self, sky: str, *, say: Say) -> None:
        self._words = [sky, "jobs", "queue", "--all", "--output", "json"]
        self._say = say
        self._question: Question | None = None
        self._asked_at = float("-inf")
        self._has_complained = False
        self.jobs: dict[str, Job] = {}
        self.asked = 0
        """Questions so far."""
        self.answers: list[int] = []
        """Numbers of the questions that were answered, of which the last is what `jobs` holds."""

    def look(self, *, is_urgent: bool = False) -> str | None:
        """Take an answer that has come, and ask again when due; return a complaint."""
        if self._question is not None:
            if self._question.code() is None:
                return None
            question, self._question = self._question, None
            complaint = self._take(question)
            if complaint is not None and not self._has_complained:
                self._say(f"sky jobs queue does not answer ({complaint}); the jobs continue, and it is asked again")
            self._has_complained = complaint is not None
            return complaint
        if time.monotonic() - self._asked_at >= (RESULT_SECONDS if is_urgent else QUEUE_SECONDS):
            self.asked += 1
            self._asked_at = time.monotonic()
            self._question = Question(self._words, limit_seconds=QUEUE_LIMIT_SECONDS)
        return None

    def _take(self, question: Question) -> str | None:
        if question.code() == 0:
            try:
                self.jobs = newest_jobs(question.answer())
            except (ValueError, KeyError, TypeError) as error:
                return f"its answer cannot be read: {error}"
        elif NO_JOBS in question.complaint():
            self.jobs = {}
        else:
            return question.complaint()
        self.answers.append(self.asked)
        return None


def newest_jobs(answer: str) -> dict[str, Job]:
    """Return the newest job of every name; lines before the JSON are SkyPilot's own messages.

    Raises:
        ValueError: it is no list of jobs.
    """
    start = re.search(r"^\[(?=\s*[{\]])", answer, re.MULTILINE)
    if start is None:
        raise ValueError("no JSON list in it")
    found: dict[str, Job] = {}
    for each in json.loads(answer[start.start() :]):
        job = Job(int(each["job_id"]), str(each["status"]))
        if job.id >= found.get(each["job_name"], job).id:
            found[each["job_name"]] = job
    return found


def job_name(point: Point) -> str:
    """Return the name of a point's job: readable, and the same for the same folder alone."""
    folder = point.folder.path()
    readable = re.sub(r"[^a-z0-9]+", "-", point.name.lower())[:NAME_CHARACTERS].strip("-")
    return f"sweep-{readable}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


def job_of(point: Point, *, given: str, limit_seconds: float | None = None) -> dict[str, Any]:
    """Return the task of SkyPilot for a point: that of launch/sky with its machine and its command.

    Args:
        given: output_dir of the sweep's command line, where all points' compiled programs go.
        limit_seconds: the run is stopped then, with an exit code that restarts nothing (124, of coreutils' timeout).
    """
    hw, words = point.config.hw, command_of(point, given=given)[len(COMMAND) :]
    assert hw.rent is not None, "`SkyEngine.check` has refused it"
    own = FILES / f"{hw.name}.yaml"
    job: dict[str, Any] = yaml.safe_load((own if own.exists() else FILES / ANY_HOST).read_text(encoding="utf-8"))
    job |= {"name": job_name(point), "workdir": str(PACKAGE.parent)}
    job["resources"]["accelerators"] = f"tpu-{hw.rent.accelerator_type}"
    job["resources"]["accelerator_args"]["runtime_version"] = hw.rent.runtime_version
    job.pop("envs", None)
    set_up = ["bash", "launch/startup.sh", f"hw={hw.name}", f"output_dir={given}"]
    job["setup"] = shlex.join(set_up) + "\n"
    limit = [] if limit_seconds is None else ["timeout", f"--kill-after={CANCEL_SECONDS}", str(int(limit_seconds) + 1)]
    job["run"] = shlex.join([*limit, *set_up, "--", "python", "run.py", *words]) + "\n"
    if OWN_SETTINGS.exists():
        job["file_mounts"] = {**job.get("file_mounts", {}), SENT_TO: str(OWN_SETTINGS)}
    return job


class SkyPoint(Started):
    """A point that is a managed job, submitted here or by an earlier command."""

    def __init__(self, engine: "SkyEngine", point: Point, *, limit_seconds: float | None) -> None:
        self._engine, self._point, self.name = engine, point, job_name(point)
        before = engine.queue.jobs.get(self.name)
        is_adopted = before is not None and before.is_alive
        self._after = before.id if before is not None and not is_adopted else -1
        self._asked = engine.queue.asked - 1 if is_adopted else engine.queue.asked
        self._launch = None if is_adopted else engine.launch(point, limit_seconds=limit_seconds)
        self._launch_complaint: str | None = None
        self._cancel: Question | None = None
        self._cancels = 0
        self._cancelled_until: float | None = None
        self._is_ending = False
        self._looked_at = time.monotonic()
        if is_adopted and before is not None:
            engine.say(f"sweep point {point.name} is SkyPilot's job {before.id} ({before.status}), which is followed")

    def terminate(self) -> None:
        self._is_ending = True

    def poll(self) -> int | None:
        if self.returncode is None:
            is_ending = self._is_ending or self._engine.asked
            self._engine.queue.look(is_urgent=is_ending)
            if self._has_launched():
                self.returncode = self._ended_code() if is_ending else self._code()
        return self.returncode

    def _has_launched(self) -> bool:
        """Return whether the submission has ended, well or not."""
        if self._launch is None:
            return True
        code = self._launch.code()
        if code is None:
            return False
        self._launch_complaint = self._launch.complaint() if code else None
        self._launch, self._asked = None, self._engine.queue.asked
        return True

    def _job(self) -> Job | None:
        """Return the job as an answer has it that was asked for after the submission."""
        job = self._engine.queue.jobs.get(self.name)
        return job if job is not None and job.id > self._after and self._num_answers() else None

    def _num_answers(self) -> int:
        return sum(number > self._asked for number in self._engine.queue.answers)

    def _code(self) -> int | None:
        if self._has_result():
            return 0
        job = self._job()
        if job is None:
            if self._launch_complaint is not None and self._num_answers():
                self.why = f"sky jobs launch: {self._launch_complaint}"
                return 1
            if self._num_answers() >= MISSING_ANSWERS:
                self.why = f"sky jobs queue has no job {self.name}, and there is no result"
                return 1
            return None
        if job.status == ENDED_WELL:
            return 0
        if not job.is_alive:
            self.why = f"SkyPilot's job {job.id} is {job.status}; sky jobs logs {job.id}"
            return 1
        return None

    def _ended_code(self) -> int | None:
        """Cancel the job; return the exit code of a stopped run once SkyPilot has ended it."""
        if self._cancelled_until is not None:
            job = self._job()
            if self._has_result():
                return 0
            if (job is None and self._num_answers()) or (job is not None and not job.is_alive):
                return STOPPED_EXIT_CODE
            if time.monotonic() < self._cancelled_until:
                return None
            self._engine.say(self.not_cancelled("it has not ended yet"))
            return STOPPED_EXIT_CODE
        if self._cancel is None:
            self._cancels += 1
            self._cancel = self._engine.cancel(self.name)
        code = self._cancel.code()
        if code is None:
            return None
        question, self._cancel = self._cancel, None
        if code == 0 or NO_JOBS in question.complaint():
            self._asked = self._engine.queue.asked
            self._cancelled_until = time.monotonic() + 2 * CANCEL_SECONDS + QUEUE_SECONDS
        elif self._cancels >= CANCEL_TRIES:
            self._engine.say(self.not_cancelled(question.complaint()))
            return STOPPED_EXIT_CODE
        return None

    def not_cancelled(self, why: str) -> str:
        """Return the sentence for a job that may continue and cost."""
        return f"NOT cancelled: sweep point {self._point.name} ({why}); stop it with sky jobs cancel --name {self.name}"

    def _has_result(self) -> bool:
        """Return whether the point has written its result; an outage counts as no."""
        if time.monotonic() - self._looked_at < RESULT_SECONDS:
            return False
        self._looked_at = time.monotonic()
        try:
            return self._point.folder.finished() is not None
        except Exception as error:
            if not is_transient(error):
                raise
            return False


class SkyEngine(AsksOnSignal):
    """Runs points as managed jobs; `given` is the output_dir of the sweep's command line."""

    name = "sky"
    queue: Queue

    def __init__(self, *, given: str) -> None:
        super().__init__()
        self._given = given
        self._sky = shutil.which("sky") or ""
        self._is_open = False
        self._files = temporary_folder(self)
        self._points: list[SkyPoint] = []
        self.say: Say = print

    def check(self, config: Config) -> None:
        asked, hw = "sweeping.engine=sky; ", config.hw
        require_checkout("sky")
        if not self._sky:
            raise ConfigError(
                f"{asked}there is no command sky on the PATH; install SkyPilot in an environment of its own "
                "(pip install 'skypilot[gcp]'), and see sky check; or use sweeping.engine=local."
            )
        if config.task.name != "train":
            raise ConfigError(f"{asked}its points train; run task={config.task.name} with sweeping.engine=local.")
        require_one_host(config)
        if not paths.is_remote(config.output_dir) or config.output_dir.startswith(NO_BUCKETS):
            raise ConfigError(
                f"{asked}output_dir={self._given} is no bucket, and the machines of SkyPilot are gone after their "
                "jobs; set output_dir=gs://bucket/runs."
            )
        if hw.device != "tpu" or hw.rent is None:
            raise ConfigError(
                f"{asked}hw={hw.name} is no machine that SkyPilot rents (it has no `rent` in conf/hw); use hw=v5e8, "
                "hw=v6e8 or another TPU of conf/hw."
            )

    def open(self, points: Sequence[Point], *, folder: str, say: Say) -> None:
        if self._is_open:
            return
        options = {option for point in points for option in point.options}
        if options:
            raise ConfigError(
                f"sweeping.engine=sky; {', '.join(sorted(options))} names a folder of this machine, which the machines "
                "of SkyPilot do not have; they get this checkout, so put its files into conf/, or use "
                "sweeping.engine=local."
            )
        self.say, self.queue = say, Queue(self._sky, say=say)
        self.listen()
        complaint = None
        while not self.queue.answers and complaint is None:
            complaint = self.queue.look()
            time.sleep(0.1)
        if complaint is not None:
            raise ConfigError(
                f"sweeping.engine=sky; sky jobs queue does not answer ({complaint}), so it is unknown which points run "
                "already; see sky check, then give the same command again."
            )
        self._is_open = True
        say(
            "SkyPilot's jobs continue, and cost, while this machine sleeps or if this command is killed; the same "
            "command follows them again; Ctrl-C cancels them"
        )

    def start(self, point: Point, *, slot: int, limit_seconds: float | None) -> Started:
        self._points.append(SkyPoint(self, point, limit_seconds=limit_seconds))
        return self._points[-1]

    def launch(self, point: Point, *, limit_seconds: float | None) -> Question:
        """Submit a point's job; SkyPilot returns once its controller has it."""
        job = job_of(point, given=self._given, limit_seconds=limit_seconds)
        file = self._files / f"{job_name(point)}.yaml"
        file.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
        known = [word for name in SECRETS if os.environ.get(name) for word in ("--secret", name)]
        words = [self._sky, "jobs", "launch", "--yes", "--detach-run", *known, str(file)]
        return Question(words, limit_seconds=LAUNCH_LIMIT_SECONDS)

    def cancel(self, name: str) -> Question:
        """Cancel a job; `--graceful` has its run get SIGTERM before its machine is given back."""
        graceful = ["--graceful", "--graceful-timeout", str(CANCEL_SECONDS)]
        words = [self._sky, "jobs", "cancel", "--yes", *graceful, "--name", name]
        return Question(words, limit_seconds=QUEUE_LIMIT_SECONDS)

    def abandon(self) -> None:
        for point in self._points:
            if point.returncode is None:
                self.say(point.not_cancelled("this command was interrupted"))
