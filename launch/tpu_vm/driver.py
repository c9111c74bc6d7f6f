"""Execute the actions chosen by rules.decide, saving the record before each irreversible one.

Meanwhile the run's log is printed as it grows, and periodically its progress and cost.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.tpu_vm import gcloud, money
from launch.tpu_vm.cloud import Cloud, CloudError
from launch.tpu_vm.errors import RemoteError, UnreachableError, advice_for
from launch.tpu_vm.gcloud import Target
from launch.tpu_vm.money import Limits
from launch.tpu_vm.rules import MAX_FETCHES, MAX_FIRST_SILENCES, MAX_SILENCES, Action, Seen, decide
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


MAX_STUMBLES = 24
"""Consecutive failures of the API, over about three hours, before the user is asked to delete by hand."""
MAX_PAUSE = 600.0
"""Longest pause between two asks of an API that does not answer, in seconds."""
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
    left: str = ""
    """Why the machine is left as it is, for the user to decide; empty where it is not."""
    has_logs: bool = False
    """Whether the workers' logs were fetched."""
    unsaved: str = ""
    """Last error in writing the record, which is printed once."""

    @property
    def target(self) -> Target:
        """Return where the present resource is, or will be."""
        return Target(self.settings, self.record.project, self.record.zone, self.record.resource)

    def save(self, line: str = "", *, is_required: bool = False, **changes: object) -> None:
        """Change the record in memory and on disk; print `line` and add it to the history.

        With a full disk the launch continues: an older record only repeats what is safe to repeat.

        Raises:
            OSError: the record could not be written and `is_required`; nothing has changed then.
        """
        record = noted(self.record, line, **changes) if line else replace(self.record, **changes)  # type: ignore[arg-type]
        try:
            self.store.save(record)
        except OSError as error:
            if is_required:
                raise
            if str(error) != self.unsaved:
                self.say(f"the launch's state could not be written, and it continues without: {error}")
            self.unsaved = str(error)
        self.record = record
        if line:
            self.say(line)

    def run(self) -> Record:
        """Act until nothing is left to do or the machine is `left`, and return the record.

        The first Ctrl-C stops, fetches and deletes; the second exits at once, with the record on disk for `down`. An
        error of this program leaves the machine as it is: it may be training.
        """
        stumbles = 0
        while not (self.record.done or self.left):
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
                self.left = f"{type(error).__name__}: {error}"
        return self.record

    def step(self) -> None:
        """Observe the resource once and execute one action."""
        began_at = self.clock.now()
        seen = self.cloud.look(self.target)
        self.account(seen, began_at=began_at)
        action = decide(self.record, seen, now=self.clock.now(), limits=self._limits())
        getattr(self, f"do_{action.kind}")(action, seen)

    def _limits(self) -> Limits:
        """Return the limits with the price of the present zone."""
        price = self.slice_.usd_per_hour(
            spot=self.record.spot, zone=self.record.zone, override=self.settings.usd_per_chip_hour
        )
        return replace(self.limits, usd_per_hour=price)

    def account(self, seen: Seen, *, began_at: float) -> None:
        """Update the record's billing times from the observed state.

        What was seen may be as old as the look itself, whose beginning is `began_at`: a laptop may have slept since.
        """
        now = self.clock.now()
        self.record = replace(self.record, absences=self.record.absences + 1 if seen.is_missing else 0)
        if seen.costs:
            self.record = replace(money.began(self.record, now=now), queued_at=None)
        elif seen.is_lost and not seen.is_missing:
            self.record = money.unseen(self.record, now=now, limits=self._limits())
        elif self.record.ready_at is None and not seen.is_missing:
            self.record = replace(self.record, idle_at=began_at)
        self.save()

    def stumble(self, error: CloudError, count: int) -> None:
        """Handle an API failure: retry later with backoff, for as long as it takes, since the run needs no launcher.

        Before anything was rented, what cannot help itself ends the launch.

        Raises:
            CloudError: too many failures in a row while deleting.
        """
        is_hopeless = error.kind in ("structural", "credentials", "zone")
        if is_hopeless and self.record.created_at is None and self.record.goal != "gone":
            self.abandon("refused", f"{error}: {advice_for(str(error))}")
        elif count >= MAX_STUMBLES and self.record.goal == "gone":
            raise error
        else:
            what = f"{error}: {advice_for(str(error))}" if is_hopeless else str(error)
            rest = "" if self.record.goal == "gone" else "; the machine is left as it is and asked for again"
            if self.progress.is_new(what):
                self.say(f"the API: {self.progress.once(what)}{rest}")
            self.clock.sleep(min(MAX_PAUSE, 15.0 * 2 ** min(count, 6)))

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
        self.save(
            line,
            is_required=True,  # a machine that no record names would have no owner
            created_at=now,
            idle_at=now,
            queued_at=queued_at,
            round_at=None,
            is_moving=False,
            is_absence_expected=False,
            absences=0,
        )
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
                self.leave_zone(f"no capacity in {self.record.zone} ({error})", is_blocked=False)
            elif error.kind == "zone":
                self.leave_zone(f"{error}: {advice_for(str(error))}", is_blocked=True)
            elif error.kind == "structural":
                self.save(is_absence_expected=True)
                self.abandon("refused", f"{error}: {advice_for(str(error))}")
            else:
                raise

    def do_delete(self, action: Action, seen: Seen) -> None:
        """Delete the resource, or settle the account if it is already gone."""
        if seen.state == "ABSENT":
            self.settle()
            return
        if seen.node == "READY" and self.record.is_started and self.record.silences == 0:
            with suppress(UnreachableError, RemoteError, OSError):
                self.stop_and_keep_logs()
        if action.why and not self.record.is_moving:
            self.save(f"deleting {self.record.resource}: {action.why}")
        self.delete()

    def stop_and_keep_logs(self) -> None:
        """Stop what still runs, so that it saves, and fetch the workers' logs, which no bucket has.

        Raises:
            UnreachableError, RemoteError, OSError: the machine does not answer, or the disk here is full.
        """
        if self.record.run_state != "exited":
            self.vm.stop(self.target)
            self.save(run_state="exited")
        if not self.has_logs:
            self.vm.fetch_logs(self.target, self.results)
            self.has_logs = True

    def delete(self) -> None:
        """Delete the resource; an accepted deletion makes its absence certain."""
        if self.cloud.delete(self.target) == "accepted":
            self.record = money.deleted(self.record, now=self.clock.now(), limits=self._limits())
            self.save(is_absence_expected=True)
        self.clock.sleep(self.settings.poll_seconds)

    def settle(self) -> None:
        """Add the cost of the deleted resource and, when moving, advance to the next zone."""
        was_silent = self.record.silences >= MAX_FIRST_SILENCES and not self.record.is_started
        ended = money.ended(self.record, now=self.clock.now(), limits=self._limits())
        if self.record.is_moving:
            ended = replace(ended.in_next_zone(now=self.clock.now()), is_moving=False)
        self.record = replace(ended, silent_machines=ended.silent_machines + was_silent)
        self.save()

    def do_next_zone(self, action: Action, seen: Seen) -> None:
        """Delete the resource to try the next zone; `settle` advances the record once it is gone."""
        self.leave_zone(action.why, is_blocked=action.is_blocked)

    def leave_zone(self, why: str, *, is_blocked: bool) -> None:
        """Delete what was requested in this zone and try the next, without this one from now on if it is blocked."""
        blocked = (*self.record.blocked, f"{self.record.zone}: {why}") if is_blocked else self.record.blocked
        self.save(f"{self.record.zone}: {why}" if is_blocked else why, is_moving=True, blocked=blocked)
        self.delete()

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
            self.answered()
            self.save(f"{self.record.resource} is set up", is_set_up=True, setup_failures=0)

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
            # A run that no record names would be paid for twice.
            self.save(
                is_required=True,
                attempts=attempts,
                is_started=False,
                run_state="none",
                exit_code=None,
                ending_since=None,
            )
        run_id = f"{self.record.launch_id}-{self.record.machines}-{self.record.attempts}"
        try:
            self.vm.start(self.target, run_id, self.record.overrides)
        except UnreachableError as error:
            self.unreachable(error)
        except RemoteError as error:
            self.abandon("failed", f"the run could not be started: {error}")
        else:
            line = "the run is started" if not self.record.was_started else "the run resumes"
            self.answered()
            self.save(line, is_started=True, was_started=True, run_state="running", log_offset=0, silent_machines=0)

    def do_look(self, action: Action, seen: Seen) -> None:
        """Print new log lines and record whether the run has ended."""
        try:
            look = self.vm.look(self.target, self.record.log_offset)
        except UnreachableError as error:
            self.unreachable(error)
            return
        self.answered()
        self.progress.show(
            look.text, bill=money.bill(self.record, now=self.clock.now(), limits=self._limits()), say=self.say
        )
        if look.is_preempted and not self.record.is_preempted:
            self.say("the machine is being taken away")
        has_ended = look.state != "running" and look.is_all and (look.is_over or self.has_waited(look))
        self.save(
            self.progress.once(look.why) if has_ended and self.progress.is_new(look.why) else "",
            log_offset=look.offset,
            run_state=look.state if has_ended else "running",
            exit_code=look.code if has_ended else None,
            is_preempted=look.is_preempted,
            is_stop_asked=look.is_stop_asked,
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
        """Stop what still runs and fetch the results, in at most four attempts.

        After those, results that are in a bucket stay there; of the only copy, the machine is left to the user, unless
        the limit of money is reached.
        """
        is_there = seen.state == "ACTIVE" and seen.node == "READY"
        try:
            if is_there:
                self.stop_and_keep_logs()
            names = self.vm.fetch(self.target, self.record, self.results)
        except (UnreachableError, RemoteError, OSError) as error:
            failures = self.record.fetch_failures + 1
            has_copy = self.record.is_remote or self.record.outcome == "budget" or self.settings.fetch == "skip"
            is_given_up = failures >= MAX_FETCHES and has_copy
            self.save(f"fetching: {error}", fetch_failures=failures, is_fetched=is_given_up)
            if is_given_up and self.record.is_remote:
                copy = " ".join(gcloud.bucket_copy(self.record.run_folder, str(self.results.parent)))
                self.say(f"the results stay in the bucket: {copy}")
            self.clock.sleep(self.settings.poll_seconds)
        else:
            what = ", ".join(names) if names else "there are none yet"
            self.save(f"results in {self.results}: {what}", is_fetched=True)
            if is_there and not self.record.is_remote and self.record.then == "keep":
                with suppress(UnreachableError, RemoteError):
                    self.vm.release(self.target)

    def do_leave(self, action: Action, seen: Seen) -> None:
        """Leave the machine with the only copy of the results to the user."""
        self.left = action.why

    def do_end(self, action: Action, seen: Seen) -> None:
        """Mark the launch as done."""
        if seen.state == "ABSENT" and self.record.created_at is not None:
            self.settle()
        if self.record.was_started and not (self.record.is_fetched or self.record.is_remote):
            reason = "the machine was gone before its results were fetched"
            self.save(f"{self.record.name}: {reason}", outcome="lost", reason=reason)
        self.save(done=True)

    def answered(self) -> None:
        """Note that the machine has answered over ssh; the next save writes it."""
        self.record = replace(self.record, silences=0, heartbeat="", still=0)

    def unreachable(self, error: UnreachableError) -> None:
        """Count that ssh failed, and look in the bucket whether the run lives or has finished, then wait."""
        silences = self.record.silences + 1
        self.save(f"no answer: {error}" if silences == 1 else "", silences=silences)
        if self.record.is_started and self.record.is_remote:
            if self.vm.is_finished(self.record):
                self.save("its result is in the bucket", run_state="exited", exit_code=0)
                return
            beat = self.vm.heartbeat(self.record)
            if beat is not None:
                is_same = beat == self.record.heartbeat
                self.save(heartbeat=beat, still=self.record.still + 1 if is_same else 0)
        if silences == MAX_SILENCES and self.record.is_started:
            self.say(
                f"{self.record.resource} has not answered {silences} times; the run may be training, and the machine "
                f"is left to it until its limit (${self.limits.most_usd:.2f} in all); `down name={self.record.name}` "
                "deletes it"
            )
        self.clock.sleep(self.settings.poll_seconds)
