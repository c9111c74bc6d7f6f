"""Control the VMs of a slice over ssh: code transfer, set-up, run, log, stop and results.

Every remote command prints its exit code on its last line, which tells a failed command from a failed ssh. The
workers' reports are combined into one state of the run: when it is over, and whose exit code counts. The results of a
run that writes to a bucket are fetched from there.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.tpu_vm import code_sync, gcloud
from launch.tpu_vm.errors import STOPPED, RemoteError, UnreachableError, in_one_line, kind_of
from launch.tpu_vm.gcloud import CHECKOUT, Target
from launch.tpu_vm.job import is_grid, is_sweep
from launch.tpu_vm.rights import ASK, ASK_SECONDS, Verdict, verdict_of
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.state import Record
from launch.tpu_vm.world import Completed, LocalFiles, Run

ENDING_SECONDS = 120.0
"""Time for the others to end after one has failed: their connection breaks at once, but compilation delays them."""
STATUS_LINE = re.compile(
    r"^tpuexp worker=(\d+) run=(\w+) code=(\S+) stop=(\w+) preempted=(\w+) bytes=(\d+) at=(\S+)\s*$", re.MULTILINE
)
"""Status line printed by `launch/worker.sh look`."""


@dataclass(frozen=True)
class Worker:
    """Status of one VM."""

    number: int
    run: str
    """none, running, exited, or lost: the VM was restarted."""
    code: int | None
    is_stop_asked: bool
    is_preempted: bool
    num_bytes: int
    """Size of its log."""
    ended_at: float
    """Seconds since 1970 on its own clock; 0 while it runs."""


@dataclass(frozen=True)
class RunState:
    """State of the run over all workers."""

    state: Literal["running", "exited", "lost"]
    """`exited` or `lost` as soon as one worker has failed or was restarted: the others cannot continue alone."""
    code: int | None
    is_over: bool
    """No worker is running any more."""
    why: str
    """Which of several workers decided the state."""


def workers_of(lines: Iterable["re.Match[str]"]) -> list[Worker]:
    """Parse workers from matches of STATUS_LINE."""
    return [
        Worker(
            number=int(line[1]),
            run=line[2],
            code=None if line[3] == "-" else int(line[3]),
            is_stop_asked=line[4] == "asked",
            is_preempted=line[5] == "TRUE",
            num_bytes=int(line[6]),
            ended_at=0.0 if line[7] == "-" else float(line[7]),
        )
        for line in lines
    ]


def together(workers: Sequence[Worker]) -> RunState:
    """Combine the workers' states; the first worker to exit with a non-zero code sets the exit code.

    The others ended because they lost it. After a request to stop, the first that did not save counts, if there is one.
    A restarted worker takes precedence over all: the run continues from its checkpoint.
    """
    is_over = not any(worker.run == "running" for worker in workers)
    lost = [worker.number for worker in workers if worker.run in ("lost", "none")]
    if lost:
        return RunState("lost", None, is_over, _of(workers, lost[0], "was restarted"))
    failed = [worker for worker in workers if worker.code]
    if any(worker.is_stop_asked for worker in workers):
        failed = [worker for worker in failed if worker.code != STOPPED] or failed
    if failed:
        first = min(failed, key=lambda worker: (worker.ended_at, worker.number))
        return RunState("exited", first.code, is_over, _of(workers, first.number, f"ended first, with {first.code}"))
    return RunState("exited" if is_over else "running", 0 if is_over else None, is_over, "")


def _of(workers: Sequence[Worker], number: int, what: str) -> str:
    return f"worker {number} of {len(workers)} {what} (logs/worker-{number}.log)" if len(workers) > 1 else ""


COPY_SECONDS = 900.0
MODEL_SECONDS = 7200.0
"""Time to copy a whole model (lora=none): 15 GB of a 7B take an hour at 4 MB/s."""
RESULTS = ("result.json", "test_results.json", "README.md", "config.yaml", "run.log", "adapter", "model")
"""Files and folders of a run to fetch, the same that launch/worker.sh packs; a run has an adapter or a model."""
SWEEP_FILES = r"[^/]+/(result\.json|test_results\.json|README\.md|config\.yaml|run\.log|(adapter|model)/.*)"
SWEEP_FILES += r"|sweep\.json|leaderboard\..*"
SWEEP_FILES += r"|(tensorboard|logs)/.*"
"""Files of a sweep to fetch, the same that launch/worker.sh packs; each point has a folder of its own."""
LEASE = ".lease.json"
"""File that a run renews in its folder (tpu_experiments/storage/lease.py)."""


class Bucket:
    """Read-only view of the bucket that the run on the VM writes to."""

    def __init__(self, run: Run, files: LocalFiles) -> None:
        self._run = run
        self._files = files

    def fetch(self, record: Record, into: Path) -> list[str]:
        """Copy the results into an existing local folder; return the names of what was copied.

        Raises:
            UnreachableError: a copy failed for another reason than a missing object.
        """
        if not is_sweep(record.overrides):
            return [name for name in RESULTS if self._copied(f"{record.run_folder}/{name}", into)]
        there = self._run(gcloud.bucket_look(f"{record.run_folder}/sweep.json"))
        if there.code and kind_of(there.err) == "absent":
            return []
        words = gcloud.bucket_part(record.run_folder, str(into), kept=SWEEP_FILES)
        done = self._run(words, timeout=MODEL_SECONDS)
        if done.code:
            raise UnreachableError(in_one_line(done.err))
        return self._files.names(into)

    def is_finished(self, record: Record) -> bool:
        """Return whether the run's result, its last file, exists; for a sweep, that of every point.

        Only a grid lists all of its points in sweep.json when it starts. A failed point does not count, so that it is
        retried.
        """
        if not is_sweep(record.overrides):
            return self._run(gcloud.bucket_look(f"{record.run_folder}/result.json")).code == 0
        if not is_grid(record.overrides):
            return False
        done = self._run(gcloud.bucket_read(f"{record.run_folder}/sweep.json"))
        rows = json.loads(done.out or "{}").get("points", []) if done.code == 0 else []
        return bool(rows) and all(row.get("status") in ("finished", "pruned") for row in rows)

    def heartbeat(self, record: Record) -> str | None:
        """Return the run's lease, which changes every 20 s while the run lives; None where the bucket shows none."""
        if is_sweep(record.overrides):  # each of its points has a lease of its own
            return None
        done = self._run(gcloud.bucket_read(f"{record.run_folder}/{LEASE}"))
        return done.out if done.code == 0 and done.out else None

    def _copied(self, address: str, into: Path) -> bool:
        done = self._run(gcloud.bucket_copy(address, str(into)), timeout=MODEL_SECONDS)
        if done.code and kind_of(done.err) != "absent":
            raise UnreachableError(in_one_line(done.err))
        return done.code == 0


WORKER = f"cd ~/{CHECKOUT} && bash launch/worker.sh"
SETUP_SECONDS, STOP_SECONDS = 2400.0, 240.0
MAX_LOG_BYTES = 262144
"""Log bytes per call, the same as in launch/worker.sh."""
MARK = re.compile(r"^tpuexp-code=(\d+)\s*$", re.MULTILINE)
# Renew the watchdog's lease during a long set-up, which must not count as an idle machine.
ALIVE = (
    "mkdir -p ~/.tpu_experiments; "
    "(while touch ~/.tpu_experiments/lease; do sleep 60; done) </dev/null >/dev/null 2>&1 & "
    "alive=$!; trap 'kill $alive' EXIT; "
)


@dataclass(frozen=True)
class Look:
    """State of the run over all workers."""

    state: str
    """running, exited (on all, or with a failure on one), or lost: a machine was restarted."""
    code: int | None
    is_over: bool
    """No worker is running any more."""
    why: str
    """Of several workers, the one whose failure ends the run."""
    is_stop_asked: bool
    is_preempted: bool
    offset: int
    """Bytes of worker 0's log up to the end of `text`."""
    is_all: bool
    """Whether `text` reaches the present end of the log."""
    text: str
    """New lines of worker 0's log."""


class Vm:
    """One slice; `target` is an argument of each call, since a launch may move to another zone."""

    def __init__(
        self,
        run: Run,
        *,
        settings: Settings,
        num_workers: int,
        say: Callable[[str], None],
        scratch: Path,
        files: LocalFiles,
    ) -> None:
        self._run = run
        self._settings = settings
        self._num_workers = num_workers
        self._say = say
        self._scratch = scratch
        self._files = files
        self._bucket = Bucket(run, files)

    def ask_watchdog(self, target: Target) -> Verdict:
        """Ask every VM whether it could delete the slice; needs only the start-up script there.

        Raises:
            UnreachableError: not every worker answered.
            RemoteError: the check failed or printed no verdict.
        """
        try:
            return verdict_of(self.remote(target, ASK, timeout=ASK_SECONDS))
        except ValueError as error:
            raise RemoteError(f"the watchdog's check: {error}") from None

    def sync(self, target: Target) -> None:
        """Transfer the code, as an archive or by a clone on the VM.

        Raises:
            UnreachableError: not every worker was reached.
            RemoteError: a command failed on a worker.
        """
        if self._settings.code == "clone":
            if code_sync.is_private(self._settings):
                key, _ = self._files.deploy_key(code_sync.key_folder(self._scratch, self._settings))
                self._each_worker(target, code_sync.keep_key_command(), stdin=key)
            self.remote(target, code_sync.clone_command(self._settings), timeout=COPY_SECONDS)
            return
        file = self._scratch / f"{self._settings.name}.tar.gz"
        self._say(f"sending {self._files.archive(file)}")
        self._copied(self._run(gcloud.copy_to(target, str(file), file.name), timeout=COPY_SECONDS))
        self.remote(target, code_sync.unpack_command(file.name), timeout=COPY_SECONDS)

    def set_up(self, target: Target, secrets: dict[str, str], where: tuple[str, ...]) -> None:
        """Transfer secrets, mount the data disk and run launch/startup.sh; safe to repeat.

        Args:
            where: arguments of startup.sh, `hw=` and `output_dir=`.

        Raises:
            UnreachableError: not every worker was reached.
            RemoteError: a command failed on a worker.
        """
        lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in secrets.items())
        self._each_worker(target, f"{WORKER} keep-secrets", stdin=lines)
        if self._settings.data_disk:
            self._mount(target)
        self.remote(
            target,
            f"{ALIVE}cd ~/{CHECKOUT} && bash launch/startup.sh {shlex.join(where)} </dev/null",
            timeout=SETUP_SECONDS,
        )

    def start(self, target: Target, run_id: str, words: tuple[str, ...]) -> None:
        """Start run.py on every worker.

        A run with this id that exists already is left alone; one with another id is stopped first.
        """
        if self._settings.data_disk:
            self._mount(target)  # a restarted VM has lost the mount
        self.remote(target, f"{WORKER} start {shlex.quote(run_id)} {shlex.join(words)}")

    def look(self, target: Target, offset: int) -> Look:
        """Return the state of the run on all workers, and worker 0's log after `offset` bytes.

        Raises:
            UnreachableError: not every worker answered.
        """
        first = self._run(gcloud.ssh(target, f"{WORKER} look {offset}", worker="0"), timeout=180.0)
        match = STATUS_LINE.search(first.out)
        if match is None:
            raise UnreachableError(in_one_line(first.err or first.out) or f"exit code {first.code}")
        lines = [match]
        if self._num_workers > 1:
            every = self._run(gcloud.ssh(target, f"{WORKER} look none"), timeout=240.0)
            lines = list(STATUS_LINE.finditer(every.out))
            if len(lines) < self._num_workers:
                raise UnreachableError(f"{len(lines)} of {self._num_workers} workers answered")
        workers = workers_of(lines)
        combined = together(workers)
        return Look(
            state=combined.state,
            code=combined.code,
            is_over=combined.is_over,
            why=combined.why,
            is_stop_asked=any(worker.is_stop_asked for worker in workers),
            is_preempted=any(worker.is_preempted for worker in workers),
            offset=min(int(match[6]), offset + MAX_LOG_BYTES),
            is_all=int(match[6]) <= offset + MAX_LOG_BYTES,
            text=first.out[match.end() :].removeprefix("\n"),
        )

    def stop(self, target: Target) -> None:
        """Send SIGTERM to the run on every worker; return when it has saved and ended.

        gcloud reaches all workers at once, except through a tunnel, where the ninth waits for the first eight; there,
        all are asked to stop before any is waited for.
        """
        if self._num_workers > gcloud.TUNNELS and self._settings.network == "internal":
            self.remote(target, f"{WORKER} ask-stop")
        self.remote(target, f"{WORKER} stop", timeout=STOP_SECONDS)

    def fetch(self, target: Target, record: Record, into: Path) -> list[str]:
        """Copy the results to a local folder; return the names of what was copied.

        Raises:
            UnreachableError, RemoteError: nothing was fetched.
        """
        self._files.make_dirs(into)
        if record.is_remote:
            return self._bucket.fetch(record, into)
        packed, folder = f"tpuexp-{target.resource}.tar.gz", shlex.quote(record.run_folder)
        folder = folder if record.run_folder.startswith("/") else f"~/{CHECKOUT}/{folder}"
        self.remote(target, f"{WORKER} pack {folder} >~/{packed}", worker="0", timeout=MODEL_SECONDS)
        local = self._scratch / packed
        self._copied(self._run(gcloud.copy_from(target, packed, str(local)), timeout=MODEL_SECONDS))
        return self._files.unpack(local, into)

    def is_finished(self, record: Record) -> bool:
        """Return whether the bucket has all the results of the run."""
        return record.is_remote and self._bucket.is_finished(record)

    def heartbeat(self, record: Record) -> str | None:
        """Return the lease that the run renews in the bucket, or None where none is seen."""
        return self._bucket.heartbeat(record) if record.is_remote else None

    def release(self, target: Target) -> None:
        """Tell the VM that its results are fetched, so that its watchdog no longer keeps it for them."""
        self.remote(target, f"{WORKER} fetched")

    def fetch_logs(self, target: Target, into: Path) -> None:
        """Save the output of each worker's run as `logs/worker-N.log`."""
        for worker in range(self._num_workers):
            done = self._run(gcloud.ssh(target, "cat ~/.tpu_experiments/log", worker=str(worker)), timeout=COPY_SECONDS)
            if done.code == 0:
                self._files.write(into / "logs" / f"worker-{worker}.log", done.out)

    def remote(
        self, target: Target, command: str, *, worker: str = "all", stdin: str = "", timeout: float = 180.0
    ) -> str:
        """Run a command on one worker or on all, and return their output.

        Raises:
            UnreachableError: fewer workers than requested ran it.
            RemoteError: it failed on a worker; the message has its last 12 lines.
        """
        marked = f"( {command} ); code=$?; echo; echo tpuexp-code=$code"
        done = self._run(gcloud.ssh(target, marked, worker=worker), stdin=stdin, timeout=timeout)
        codes = [int(code) for code in MARK.findall(done.out)]
        if any(codes):
            said = (MARK.sub("", done.out) + done.err).strip().splitlines()[-12:]
            raise RemoteError(in_one_line("\n".join(said), limit=1500) or f"exit code {max(codes)}")
        if len(codes) < (self._num_workers if worker == "all" else 1):
            raise UnreachableError(in_one_line(done.err) or f"exit code {done.code}")
        return MARK.sub("", done.out)

    def _mount(self, target: Target) -> None:
        words = f"mount {shlex.quote(self._settings.data_disk)} {shlex.quote(self._settings.data_mount)}"
        self.remote(target, f"{WORKER} {words}")

    def _each_worker(self, target: Target, command: str, *, stdin: str) -> None:
        """Run a command on one worker after the other, since gcloud passes stdin to a single ssh only."""
        for worker in range(self._num_workers):
            self.remote(target, command, worker=str(worker), stdin=stdin)

    def _copied(self, done: Completed) -> None:
        if done.code:
            raise UnreachableError(in_one_line(done.err) or f"exit code {done.code}")
