"""Whatever a cloud does, and wherever the launcher is killed: in the end nothing costs money."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.launch.fake_cloud import QUOTA, STOCKOUT, FakeCloud, Fate, SimulatedClock
from tests.launch.launcher import Launcher

FATES = st.builds(
    Fate,
    queued=st.sampled_from([0.0, 60.0, 4000.0]),
    provisioning=st.sampled_from([0.0, 300.0, 8000.0]),
    failure=st.sampled_from(["", "", "", "", STOCKOUT, STOCKOUT, QUOTA]),
    lives=st.sampled_from([None, None, 100.0, 700.0, 2500.0]),
    silent=st.sampled_from([False, False, False, False, True]),
)
TROUBLE = st.dictionaries(
    st.integers(1, 150),
    st.sampled_from(["refuse", "refuse", "refuse_after", "kill", "kill_after", "interrupt"]),
    max_size=12,
)
WATCHDOGS = ["granted", "granted", "granted", "granted", "refused", "unanswered"]
PHASES = (Phase.explicit, Phase.generate)  # a failing example is short enough as it is, and shrinking takes minutes
PRICE, MAX_USD = 12.0, 60.0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, phases=PHASES)
@given(
    fates=st.lists(FATES, max_size=6),
    trouble=TROUBLE,
    code=st.sampled_from([0, 0, 0, 1, 2]),
    watchdog=st.sampled_from(WATCHDOGS),
)
def test_nothing_is_left_and_the_limit_is_kept(
    fates: list[Fate], trouble: dict[int, str], code: int, watchdog: str
) -> None:
    cloud = FakeCloud(SimulatedClock(), fates=list(fates), code=code)
    cloud.watchdog = f"{watchdog} account=vm@p code=404 said"
    cloud.trouble = trouble
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(cloud, Path(folder))
        ended = launcher.train_whatever_happens(
            "poll_seconds=90", f"max_usd={MAX_USD}", f"usd_per_chip_hour={PRICE / 8}"
        )
        if not launcher.record().done:  # Ctrl-C twice: the launcher has said so, and `down` is asked for
            assert any("NOT finished" in line for line in launcher.said)
            cloud.trouble = {}
            assert launcher("down", "name=ro1") == 0
        assert not cloud.machines
        assert cloud.billed_seconds / 3600 * PRICE <= MAX_USD
        record = launcher.record()
        # The launcher never believes that less was paid than was.
        assert record.usd_before >= cloud.billed_seconds / 3600 * PRICE - 0.01
        if ended == 0:
            assert (record.outcome, watchdog) == ("finished", "granted")
            assert (Path(folder) / "ro1" / "result.json").is_file()
        troubles = set(trouble.values())
        if code == 0 and watchdog == "granted" and not troubles and not any(fate.failure == QUOTA for fate in fates):
            assert ended == 0


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
