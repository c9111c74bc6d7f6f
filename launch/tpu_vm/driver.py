"""Execute the actions chosen by rules.decide, saving the record before each irreversible one.

Meanwhile the run's log is printed as it grows, and periodically its progress and cost.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.tpu_vm import money
from launch.tpu_vm.cloud import Cloud, CloudError
from launch.tpu_vm.errors import RemoteError, UnreachableError, advice_for
from launch.tpu_vm.gcloud import Target
from launch.tpu_vm.money import Limits
from launch.tpu_vm.rules import Action, Seen, decide
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.slices import Slice
from launch.tpu_vm.state import Record, Store, noted
from launch.tpu_vm.vm import ENDING_SECONDS, Look, Vm
from launch.tpu_vm.world import Clock

STEP = re.compile(r"step +(\d+)/(\d+).*?(?:left (\S+))?\s*$", re.MULTILINE)


class Progress:
    """Printer of new log lines and of status lines without repetition."""

    def __init__(self, every: int = 15) -> None:
        self._every = every
        self._looks = 0
        self._last = ""

    def show(self, text: str, *, bill: str, say: Callable[[str], None]) -> None:
        """Print the new log lines, and at every 15th call the bill with the newest step."""
        for line in text.replace("\r", "\n").splitlines():
            if line.strip():
                say(f"  {line}")
        if self._looks % self._every == 0:
            say(f"[{bill}{step_of(text)}]")
        self._looks += 1

    def is_new(self, line: str) -> bool:
        """Return whether `line` differs from the last one passed to `once`."""
        return line != self._last

    def once(self, line: str) -> str:
        """Remember `line` and return it."""
        self._last = line
        return line

    def reset(self) -> None:
        """Forget the last line, so that any next line is printed."""
        self._last = ""


def step_of(text: str) -> str:
    """Return `, step 20/120, left 0:00:42` from the newest step line, or an empty string."""
    found = list(STEP.finditer(text))
    if not found:
        return ""
    step, steps, left = found[-1].groups()
    return f", step {step}/{steps}" + (f", left {left}" if left else "")


MAX_FETCHES = 4
MAX_STUMBLES = 8
"""Consecutive failures of the API or of this program during cleanup before the user is asked to intervene."""
ALWAYS_GONE = ("budget", "capacity", "refused", "interrupted", "down")


@dataclass
class Driver:
    """State and collaborators of one launch on its way to its goal."""

    record: Record
    store: Store
    cloud: Cloud
    vm: Vm
    settings: Settings
    slice_: Slice
    limits: Limits
    clock: Clock
    say: Callable[[str], None]
    secrets: dict[str, str]
    results: Path
    watchdog: Path
    progress: Progress = field(default_factory=Progress)

    @property
    def target(self) -> Target:
        """Return where the present resource is, or will be."""
        return Target(self.settings, self.record.project, self.record.zone, self.record.resource)

    def save(self, line: str = "", **changes: object) -> None:
        """Change the record in memory and on disk; print `line` and add it to the history."""
        self.record = noted(self.record, line, **changes) if line else replace(self.record, **changes)  # type: ignore[arg-type]
        self.store.save(self.record)
        if line:
            self.say(line)

    def run(self) -> Record:
        """Act until nothing is left to do, and return the record.

        The first Ctrl-C stops, fetches and deletes; the second exits at once, with the record on disk for `down`.
        """
        stumbles = 0
        while not self.record.done:
            try:
                self.step()
                stumbles = 0
            except KeyboardInterrupt:
                if self.record.goal == "gone" or (self.record.then == "keep" and self.record.is_started):
                    raise
                self.abandon("interrupted", "Ctrl-C")
            except CloudError as error:
                stumbles += 1
                self.stumble(error, stumbles)
            except Exception as error:
                if self.record.goal == "gone":
                    raise
                self.abandon("failed", f"{type(error).__name__}: {error}")
        return self.record

    def step(self) -> None:
        """Observe the resource once and execute one action."""
        seen = self.cloud.look(self.target)
        self.account(seen)
        action = decide(self.record, seen, now=self.clock.now(), limits=self._limits())
        getattr(self, f"do_{action.kind}")(action, seen)

    def _limits(self) -> Limits:
        """Return the limits with the price of the present zone."""
        price = self.slice_.usd_per_hour(
            spot=self.record.spot, zone=self.record.zone, override=self.settings.usd_per_chip_hour
        )
        return replace(self.limits, usd_per_hour=price)

    def account(self, seen: Seen) -> None:
        """Update the record's billing times from the observed state."""
        now = self.clock.now()
        if seen.costs:
            self.record = replace(money.began(self.record, now=now), queued_at=None)
        elif self.record.ready_at is None:
            self.record = replace(self.record, idle_at=now)
        self.store.save(self.record)

    def stumble(self, error: CloudError, count: int) -> None:
        """Handle an API failure: retry later with backoff, or give the launch up if retrying cannot help.

        A launch that gives up still deletes its machine, so nothing that costs is left without a message.

        Raises:
            CloudError: eight failures in a row while deleting.
        """
        if self.record.goal != "gone" and error.kind == "structural":
            self.abandon("refused", f"{error}: {advice_for(str(error))}")
        elif count >= MAX_STUMBLES and self.record.goal == "gone":
            raise error
        elif count == MAX_STUMBLES:
            self.abandon("failed", f"the API did not answer: {error}")
        else:
            self.say(f"the API: {error}")
            self.clock.sleep(min(600.0, 15.0 * 2**count))

    def abandon(self, outcome: str, reason: str) -> None:
        """Give the launch up: record its outcome and set the goal to deleting everything."""
        self.save(f"{self.record.name}: {outcome}: {reason}", outcome=outcome, reason=reason, goal="gone")

    def do_create(self, action: Action, seen: Seen) -> None:
        """Request a machine, unless the run's result has meanwhile appeared in the bucket."""
        if self.record.was_started and self.vm.is_finished(self.record):
            self.do_close(replace(action, outcome="finished", why="its result was in the bucket"), seen)
            return
        now, limits = self.clock.now(), self._limits()
        queued_at = self.record.queued_at if self.record.queued_at is not None else now
        line = f"asking for {self.slice_.accelerator_type}{' spot' if self.record.spot else ''} in {self.record.zone}"
        self.save(line, created_at=now, idle_at=now, queued_at=queued_at, is_moving=False)
        try:
            self.cloud.create(
                self.target,
                self.slice_,
                watchdog=str(self.watchdog),
                watchdog_seconds=money.seconds_left(self.record, now=now, limits=limits) + money.CLOSING_SECONDS,
                valid_seconds=limits.queue_seconds,
            )
        except CloudError as error:
            if error.kind == "capacity":
                self.do_next_zone(replace(action, why=f"no capacity in {self.record.zone} ({error})"), seen)
            elif error.kind in ("transient", "unknown"):
                raise
            else:
                self.abandon("refused", f"{error}: {advice_for(str(error))}")

    def do_delete(self, action: Action, seen: Seen) -> None:
        """Delete the resource, or settle the account if it is already gone."""
        if seen.state == "ABSENT":
            self.settle()
            return
        if action.why and not self.record.is_moving:
            self.save(f"deleting {self.record.resource}: {action.why}")
        self.cloud.delete(self.target)
        self.clock.sleep(self.settings.poll_seconds)

    def settle(self) -> None:
        """Add the cost of the deleted resource and, when moving, advance to the next zone."""
        ended = money.ended(self.record, now=self.clock.now(), limits=self._limits())
        if self.record.is_moving:
            index = self.record.zone_index + 1
            ended = replace(ended, is_moving=False, zone_index=index)
            if index % len(self.record.zones) == 0:
                ended = replace(ended, rounds=ended.rounds + 1, round_at=self.clock.now())
        self.record = ended
        self.store.save(ended)

    def do_next_zone(self, action: Action, seen: Seen) -> None:
        """Delete the resource to try the next zone; `settle` advances the record once it is gone."""
        self.save(action.why, is_moving=True)
        self.cloud.delete(self.target)
        self.clock.sleep(self.settings.poll_seconds)

    def do_wait(self, action: Action, seen: Seen) -> None:
        """Wait, printing the reason the first time."""
        if self.progress.is_new(action.why):
            self.say(self.progress.once(action.why))
        self.clock.sleep(action.seconds or self.settings.poll_seconds)

    def do_set_up(self, action: Action, seen: Seen) -> None:
        """Check that the VM can delete itself, then transfer code and secrets and set up the environment.

        A VM whose sshd is not up yet is retried.
        """
        self.progress.reset()
        try:
            if not self.ends_itself():
                return
            self.vm.sync(self.target)
            told = [word for word in self.record.overrides if word.startswith("output_dir=")]
            self.vm.set_up(self.target, self.secrets, (f"hw={self.record.hw}", *told))
        except UnreachableError as error:
            self.unreachable(error)
        except RemoteError as error:
            self.save(f"the set-up failed: {error}", setup_failures=self.record.setup_failures + 1)
        else:
            self.save(f"{self.record.resource} is set up", is_set_up=True, setup_failures=0, unreachable_since=None)

    def ends_itself(self) -> bool:
        """Return whether the VM's watchdog can delete it; always True with `watchdog=warn`.

        A refusal abandons the launch, which gives the machine back.

        Raises:
            RemoteError: the watchdog got no answer, which counts as a failed set-up.
        """
        verdict = self.vm.ask_watchdog(self.target)
        sentence = verdict.sentence(self.record.project)
        if verdict.kind == "granted":
            return True
        if self.settings.watchdog == "warn":
            self.say(f"warning: {sentence}")
            return True
        if verdict.kind == "unanswered":
            raise RemoteError(sentence)
        self.abandon("refused", sentence)
        return False

    def do_start(self, action: Action, seen: Seen) -> None:
        """Start the run under an id of launch, machine and attempt, so that a repeated start has no effect."""
        self.progress.reset()
        if self.record.is_started or self.record.attempts == 0:
            attempts = self.record.attempts + 1
            self.save(attempts=attempts, is_started=False, run_state="none", exit_code=None, ending_since=None)
        run_id = f"{self.record.launch_id}-{self.record.machines}-{self.record.attempts}"
        try:
            self.vm.start(self.target, run_id, self.record.overrides)
        except UnreachableError as error:
            self.unreachable(error)
        except RemoteError as error:
            self.abandon("failed", f"the run could not be started: {error}")
        else:
            line = "the run is started" if not self.record.was_started else "the run resumes"
            self.save(
                line, is_started=True, was_started=True, run_state="running", log_offset=0, unreachable_since=None
            )

    def do_look(self, action: Action, seen: Seen) -> None:
        """Print new log lines and record whether the run has ended."""
        try:
            look = self.vm.look(self.target, self.record.log_offset)
        except UnreachableError as error:
            self.unreachable(error)
            return
        self.progress.show(
            look.text, bill=money.bill(self.record, now=self.clock.now(), limits=self._limits()), say=self.say
        )
        has_ended = look.state != "running" and look.is_all and (look.is_over or self.has_waited(look))
        self.save(
            self.progress.once(look.why) if has_ended and self.progress.is_new(look.why) else "",
            log_offset=look.offset,
            run_state=look.state if has_ended else "running",
            exit_code=look.code if has_ended else None,
            is_preempted=look.is_preempted,
            is_stop_asked=look.is_stop_asked,
            unreachable_since=self.clock.now() if look.is_preempted else None,
        )
        if look.is_all and not has_ended:
            self.clock.sleep(self.settings.poll_seconds)

    def has_waited(self, look: Look) -> bool:
        """Return whether to stop waiting for the other workers after one has failed, and stop them then.

        The others notice a failed worker within seconds and end; one that has not after `ENDING_SECONDS` is stopped.
        """
        now, since = self.clock.now(), self.record.ending_since
        if since is None:
            self.save(self.progress.once(look.why), ending_since=now)
        if since is None or now - since < ENDING_SECONDS:
            return False
        self.say(f"the other workers have not ended within {ENDING_SECONDS:.0f} s and are stopped")
        with suppress(UnreachableError, RemoteError):
            self.vm.stop(self.target)
        return True

    def do_close(self, action: Action, seen: Seen) -> None:
        """Record the launch's outcome; fetching follows, and deletion unless the machine is kept."""
        is_gone = self.record.then == "gone" or action.outcome in ALWAYS_GONE
        goal = "gone" if is_gone else self.record.goal
        self.save(
            f"{self.record.name}: {action.outcome}: {action.why}", outcome=action.outcome, reason=action.why, goal=goal
        )

    def do_fetch(self, action: Action, seen: Seen) -> None:
        """Stop what still runs and fetch the results, in at most four tries, since the machine costs."""
        is_there = seen.state == "ACTIVE" and seen.node == "READY"
        try:
            if is_there and self.record.run_state != "exited":
                self.vm.stop(self.target)
                self.save(run_state="exited")
            if is_there:
                self.vm.fetch_logs(self.target, self.results)
            names = self.vm.fetch(self.target, self.record, self.results)
        except (UnreachableError, RemoteError) as error:
            failures = self.record.fetch_failures + 1
            self.save(f"fetching: {error}", fetch_failures=failures, is_fetched=failures >= MAX_FETCHES)
            self.clock.sleep(self.settings.poll_seconds)
        else:
            what = ", ".join(names) if names else "there are none yet"
            self.save(f"results in {self.results}: {what}", is_fetched=True)

    def do_end(self, action: Action, seen: Seen) -> None:
        """Mark the launch as done."""
        if seen.state == "ABSENT" and self.record.created_at is not None:
            self.settle()
        self.save(done=True)

    def unreachable(self, error: UnreachableError) -> None:
        """Note that ssh failed and wait; the next API call shows whether the machine is gone."""
        since = self.record.unreachable_since if self.record.unreachable_since is not None else self.clock.now()
        self.save(f"no answer: {error}" if self.record.unreachable_since is None else "", unreachable_since=since)
        self.clock.sleep(self.settings.poll_seconds)
