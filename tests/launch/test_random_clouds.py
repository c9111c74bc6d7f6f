"""Whatever cloud, network, laptop and user do: nothing is billed unnamed, lost, or ended unasked.

A simulation of both ends on one clock. More seeds: `python -m tests.launch.test_random_clouds COUNT [FIRST]`.
"""

import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launch.fake_cloud import NEVER, QUOTA, STOCKOUT, FakeCloud, Fate, Killed, SimulatedClock
from tests.launch.launcher import Launcher
from tests.tiers import only

SEEDS = 200
PRICE, MAX_USD = 12.0, 150.0
LOCAL = ["--", "experiment=mistral7b_ro", "output_dir=outputs"]
WINDOWS = ("offline", "logged_out", "no_ssh", "full_disk")
TROUBLES = ("refuse", "refuse", "refuse_after", "kill", "kill_after", "absent", "sleep", "interrupt", "twice")


@dataclass
class Story:
    """What a seed draws, and what came of it."""

    seed: int
    fates: list[Fate]
    windows: list[tuple[str, float, float]]
    trouble: dict[int, str]
    is_local: bool
    code: int
    work: float
    watchdog: str
    pauses: list[float]
    """Seconds until the user looks at the terminal again."""
    outcomes: list[int | str] = field(default_factory=list)
    is_unwritten: bool = False
    """Whether the launcher has said that it could not write its state."""


def drawn(seed: int) -> Story:
    """Draw a story; about a third of the machines and of the hours are troubled."""
    rng = random.Random(seed)
    is_local = rng.random() < 0.35

    def fate() -> Fate:
        reclaim = None if is_local else rng.choice([None, None, None, 700.0, 4000.0, 20_000.0])
        return Fate(
            queued=rng.choice([0.0, 60.0, 4000.0]),
            provisioning=rng.choice([0.0, 300.0, 8000.0]),
            failure=rng.choice(["", "", "", "", "", STOCKOUT, STOCKOUT, QUOTA]),
            lives=reclaim,
            silent=rng.random() < 0.08,
            dies=rng.choice([NEVER, NEVER, NEVER, NEVER, NEVER, 5000.0]) if not is_local else NEVER,
        )

    start = SimulatedClock().now()
    windows = []
    for _ in range(rng.randrange(4)):
        begin = start + rng.uniform(0.0, 30_000.0)
        windows.append((rng.choice(WINDOWS), begin, begin + rng.choice([300.0, 3600.0, 30_000.0])))
    return Story(
        seed=seed,
        fates=[fate() for _ in range(rng.randrange(5))],
        windows=windows,
        trouble={rng.randrange(1, 300): rng.choice(TROUBLES) for _ in range(rng.randrange(8))},
        is_local=is_local,
        code=rng.choice([0, 0, 0, 0, 1]),
        work=rng.choice([600.0, 5000.0, 20_000.0]),
        watchdog=rng.choice(["granted"] * 6 + ["refused", "unanswered"]),
        pauses=[rng.choice([60.0, 1800.0, 40_000.0]) for _ in range(60)],
    )


def played(story: Story, folder: Path) -> tuple[FakeCloud, Launcher]:
    """Give the command again until the launch is done, as a user does who reads its last line."""
    clock = SimulatedClock()
    cloud = FakeCloud(clock, fates=list(story.fates), work=story.work, code=story.code)
    cloud.watchdog = f"{story.watchdog} account=vm@p code=404 said"
    cloud.windows = story.windows
    launcher = Launcher(cloud, folder)
    cloud.trouble = {call: what for call, what in story.trouble.items() if what != "twice"}
    inner, doubles = cloud.run, {call for call, what in story.trouble.items() if what == "twice"}
    words = ["poll_seconds=90", f"max_usd={MAX_USD}", f"usd_per_chip_hour={PRICE / 8}"]
    if story.is_local:
        words.append("spot=false")

    def doubled(call: list[str], *, stdin: str = "", timeout: float = 120.0) -> object:
        done = inner(call, stdin=stdin, timeout=timeout)
        if len(cloud.calls) in doubles:
            doubles.discard(len(cloud.calls))
            assert Launcher(cloud, folder).train(*words, run=LOCAL if story.is_local else None) == 2, "one at a time"
        return done

    cloud.run = doubled  # type: ignore[assignment, method-assign]
    for pause in story.pauses:
        launcher.said.clear()
        try:
            story.outcomes.append(launcher.train(*words, run=LOCAL if story.is_local else None))
        except Killed:
            story.outcomes.append("killed")
        else:
            check_names(cloud, launcher)
        story.is_unwritten |= any("could not be written" in line for line in launcher.said)
        if story.outcomes[-1] == 2 or launcher.known() is None or launcher.record().done:
            break
        clock.sleep(pause)
    cloud.end_by_themselves()
    return cloud, launcher


def check_names(cloud: FakeCloud, launcher: Launcher) -> None:
    """Nothing is billed that no sentence names: of what is left, the last lines have the name and the command."""
    cloud.end_by_themselves()
    now = cloud.clock.now()
    for machine in cloud.machines.values():
        if machine.state(now) == "ACTIVE" or not machine.fate.failure:
            last = launcher.said[-1]
            assert machine.name in last, last
            assert "down name=ro1" in last, last


def check(story: Story, folder: Path) -> None:
    """Assert what holds in every story."""
    cloud, launcher = played(story, folder)
    record = launcher.known()
    if record is None:  # the disk was full before anything was rented
        assert not cloud.all_machines
        return
    assert record.done, f"it never ended: {story.outcomes}"
    was_asked = {"interrupt"} & set(story.trouble.values()) or record.outcome in ("interrupted", "budget")
    assert not cloud.machines
    assert was_asked or cloud.deleted_running == [], "a run that was alive was ended unasked"
    assert cloud.deleted_copies == [], "the only copy of a result was deleted"
    paid = cloud.billed_seconds / 3600 * PRICE
    # Out of reach of the launcher, only a machine that lives and may delete itself keeps the limit.
    is_bounded = story.watchdog == "granted" and all(one.fate.dies == NEVER for one in cloud.all_machines)
    assert paid <= MAX_USD or not is_bounded, f"${paid:.2f} were paid"
    is_counted = story.watchdog == "granted" and not story.is_unwritten
    assert not is_counted or record.usd_before >= paid - 0.01, "the launcher believes that less was paid than was"
    if story.outcomes[-1] == 0:
        assert record.outcome == "finished"
        assert story.watchdog == "granted"
        assert (folder / "ro1" / "result.json").is_file() or launcher.names_the_bucket()
    is_quiet = not story.windows and not story.trouble and story.watchdog == "granted" and story.code == 0
    if is_quiet and not any(fate.failure == QUOTA or fate.silent for fate in story.fates):
        assert story.outcomes == [0]


@pytest.mark.parametrize("block", only(["0"], range(4)))
def test_whatever_happens_nothing_is_unnamed_lost_or_ended_unasked(block: int) -> None:
    for seed in range(block * SEEDS // 4, (block + 1) * SEEDS // 4):
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(drawn(seed), Path(folder))
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("how", ["kill", "kill_after", "refuse_after"])
def test_killed_at_any_call_the_same_command_goes_on_to_the_end(tmp_path: Path, how: str) -> None:
    for call in range(1, 48):
        cloud = FakeCloud(SimulatedClock(), fates=[Fate(lives=400.0)], work=600.0)
        cloud.trouble = {call: how}
        launcher = Launcher(cloud, tmp_path / f"{call}")
        launcher.folder.mkdir()
        assert launcher.train_whatever_happens("poll_seconds=60") == 0, call
        assert not cloud.machines
        assert (launcher.folder / "ro1" / "result.json").is_file()


@pytest.mark.parametrize("how", ["sleep", "sleep_after"])
@pytest.mark.parametrize(("queued", "lives"), [(60.0, 400.0), (4000.0, 700.0)], ids=["soon", "late"])
def test_a_laptop_that_sleeps_at_any_call_counts_what_was_paid_meanwhile(
    tmp_path: Path, how: str, queued: float, lives: float
) -> None:
    for call in range(1, 40):
        fates = [Fate(queued=queued, lives=lives) for _ in range(4)]
        cloud = FakeCloud(SimulatedClock(), fates=fates, work=600.0)
        cloud.trouble = {call: how}
        launcher = Launcher(cloud, tmp_path / f"{call}")
        launcher.folder.mkdir()
        launcher.train("poll_seconds=90", f"max_usd={MAX_USD}", f"usd_per_chip_hour={PRICE / 8}")
        cloud.end_by_themselves()
        paid = cloud.billed_seconds / 3600 * PRICE
        assert launcher.record().usd_before >= paid - 0.01, f"call {call}: ${paid:.2f} were paid"


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as place:
            try:
                check(drawn(number), Path(place))
            except AssertionError as error:
                print(f"seed {number}: {error}", flush=True)
