"""Where a run comes from; git in every state it can be in."""

import datetime
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_experiments.config.identity import config_hash
from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.provenance import changes_between, git_state, provenance, versions, write_provenance
from tpu_experiments.storage.run_folder import RunFolder

UNKNOWN = {"git_commit": None, "git_dirty": None, "git_diff_sha256": None}


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_a_clean_checkout(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert git_state(checkout) == {"git_commit": commit, "git_dirty": False, "git_diff_sha256": None}


def test_changes_of_any_kind_are_dirty_and_hash_differently(checkout: Path) -> None:
    (checkout / "a.py").write_bytes(b"a = '\xff\xfe'\n")  # not UTF-8
    changed = git_state(checkout)
    (checkout / "new.py").write_text("")
    added = git_state(checkout)
    assert changed["git_dirty"] is True
    assert added["git_dirty"] is True
    assert changed["git_diff_sha256"] != added["git_diff_sha256"]


def test_before_the_first_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("")
    state = git_state(tmp_path)
    assert (state["git_commit"], state["git_dirty"]) == (None, True)


def test_no_checkout_another_one_above_and_no_git(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = checkout / "site-packages"
    inner.mkdir()
    assert git_state(inner) == UNKNOWN
    monkeypatch.setenv("PATH", "")
    assert git_state(checkout) == UNKNOWN


def test_the_facts_of_a_run(make_config: Callable[..., Config]) -> None:
    config = make_config("seed=7")
    facts = provenance(config, device="xla:0", argv=["run.py", "seed=7"])
    assert (facts["seed"], facts["device"], facts["argv"]) == (7, "xla:0", ["run.py", "seed=7"])
    assert facts["config_hash"] == config_hash(config)
    assert facts["num_cpus"] > 0
    assert facts["ram_gib"] > 0
    assert datetime.datetime.fromisoformat(facts["started"]).utcoffset() == datetime.timedelta(0)


def test_versions_of_what_is_not_installed_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_experiments.loggers.provenance.PACKAGES", ("numpy", "no-such-package"))
    found = versions()
    assert found["no-such-package"] is None
    assert found["numpy"]
    assert found["python"]


def test_a_resumed_run_adds_its_life(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "x")
    (tmp_path / "x").mkdir()
    write_provenance(folder, {"device": "cpu"})
    write_provenance(folder, {"device": "tpu"})
    stored = json.loads((tmp_path / "x" / "provenance.json").read_text())
    assert stored == {"lives": [{"device": "cpu"}, {"device": "tpu"}]}


def test_files_that_were_sent_without_a_checkout_say_what_they_stand_on(tmp_path: Path) -> None:
    (tmp_path / ".commit").write_text("0123abcd\n")
    assert git_state(tmp_path) == {"git_commit": "0123abcd", "git_dirty": None, "git_diff_sha256": None}


def facts_with(**changed: object) -> dict[str, object]:
    known = {
        "git_commit": "abc",
        "git_dirty": False,
        "git_diff_sha256": None,
        "versions": {"torch": "2.9.0", "jax": "1"},
    }
    return {**known, **changed}


@pytest.mark.parametrize(
    ("before", "found"),
    [
        (facts_with(), []),
        (facts_with(git_commit="def"), ["commit def, now abc"]),
        (facts_with(versions={"torch": "2.8.0", "jax": "1"}), ["torch 2.8.0, now 2.9.0"]),
        (facts_with(versions={"torch": "2.9.0", "jax": None}), []),
        (facts_with(git_dirty=True, git_diff_sha256="12"), ["changes that are not committed"]),
        (facts_with(git_commit=None, git_dirty=None), []),
        (facts_with(versions="none"), []),
        ({}, []),
        (["a list"], []),
    ],
)
def test_other_code_and_packages_are_found(before: object, found: list[str]) -> None:
    assert changes_between(before, facts_with()) == found


def test_changes_on_a_machine_that_has_no_checkout_are_not_known() -> None:
    """launch/tpu.py sends files without one."""
    sent = facts_with(git_dirty=None)
    assert changes_between(facts_with(git_dirty=True, git_diff_sha256="12"), sent) == []


def test_a_start_with_other_code_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dropout masks, for one, are what the code makes of a row's random words: another commit may make others."""
    folder = RunFolder(str(tmp_path), "x")
    (tmp_path / "x").mkdir()
    write_provenance(folder, facts_with())
    write_provenance(folder, facts_with())
    assert not caplog.records
    write_provenance(folder, facts_with(git_commit="def"))
    (record,) = caplog.records
    assert "last started with other code or packages: commit abc, now def. From here on" in record.message
    assert [life["git_commit"] for life in json.loads((tmp_path / "x" / "provenance.json").read_text())["lives"]] == [
        "abc",
        "abc",
        "def",
    ]
