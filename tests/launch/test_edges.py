"""The launcher's edges for real: processes, the state file, the archive, a clone, the deploy key."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from launch.tpu_vm import code_sync
from launch.tpu_vm.errors import LaunchError, kind_of
from launch.tpu_vm.money import Limits, began, ended, hours_used, seconds_left, usd_used
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.state import Record, Store
from launch.tpu_vm.world import TIMED_OUT, run
from tests.launch.fake_cloud import (
    LOGGED_OUT,
    NOT_FOUND,
    OFFLINE,
    PROVISIONING,
    QUOTA,
    SSH_LOST,
    STOCKOUT,
    TYPE_DENIED,
    UNAVAILABLE,
)

RECORD = Record(name="ro1", launch_id="abc123", hw="v6e8", spot=True, project="p", zones=("z-a", "z-b"))


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ("run.py", "conf/a.yaml", "launch/b.sh", "docs/large.md", ".env", "ignored.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")
    (root / ".gitignore").write_text("ignored.txt\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "x")
    (root / "run.py").write_text("changed\n")
    (root / "new.py").write_text("new\n")
    return root


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        (STOCKOUT, None, "capacity"),
        (QUOTA, 8, "zone"),
        (NOT_FOUND.format(what="x", name="y"), None, "absent"),
        (UNAVAILABLE, None, "transient"),
        (PROVISIONING, None, "undeletable"),
        (SSH_LOST, None, "transient"),
        ("RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Write requests' per minute", None, "transient"),
        ("code: 8 GCE_STOCKOUT: the zone does not have enough resources available", None, "capacity"),
        ("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on 'x' (or it may not exist)", None, "structural"),
        ("You do not currently have an active account selected.", None, "credentials"),
        (LOGGED_OUT, None, "credentials"),
        (OFFLINE, None, "transient"),
        (TYPE_DENIED, None, "zone"),
        ('INVALID_ARGUMENT: Accelerator type "v6e-8" is not available in zone us-x', None, "zone"),
        ("", 8, "capacity"),
        ("something new", None, "unknown"),
    ],
)
def test_failures_are_distinguished(text: str, code: int | None, kind: str) -> None:
    assert kind_of(text, code=code) == kind


def test_a_command_has_stdin_a_code_and_a_limit_of_time(tmp_path: Path) -> None:
    echo = run([sys.executable, "-c", "import sys; print(input()); sys.exit(3)"], stdin="a secret\n")
    assert (echo.code, echo.out) == (3, "a secret\n")
    begun = time.monotonic()
    slow = run(["bash", "-c", "sleep 60 & sleep 60"], timeout=0.5)
    assert slow.code == TIMED_OUT
    assert time.monotonic() - begun < 30
    with pytest.raises(LaunchError, match="not installed"):
        run([str(tmp_path / "gcloud")])


def test_the_state_is_replaced_in_one_step_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path, "ro1")
    assert store.load() is None
    store.save(RECORD)
    assert store.load() == RECORD
    assert os.listdir(tmp_path) == ["ro1.json"]
    content = json.loads(store.file.read_text())
    store.file.write_text(json.dumps(content | {"version": 0}))
    with pytest.raises(LaunchError, match="another version"):
        store.load()
    store.file.write_text(store.file.read_text()[:40])
    with pytest.raises(LaunchError, match="no JSON"):
        store.load()


def test_money_counts_from_the_last_moment_that_was_free() -> None:
    limits = Limits(usd_per_hour=12.0, max_usd=60.0, max_hours=24.0, queue_seconds=1e4, zone_seconds=1e3)
    record = began(Record(**vars(RECORD) | {"created_at": 0.0, "idle_at": 600.0}), now=4200.0)
    assert hours_used(record, now=4200.0) == 1.0
    assert usd_used(record, now=4200.0, limits=limits) == 12.0
    assert seconds_left(record, now=4200.0, limits=limits) == 4 * 3600 - 420
    closed = ended(record, now=7800.0, limits=limits)
    assert (closed.usd_before, closed.hours_before, closed.ready_at) == (24.0, 2.0, None)
    assert usd_used(closed, now=1e6, limits=limits) == 24.0


def test_the_archive_is_the_working_tree_without_what_is_ignored_or_private(tree: Path, tmp_path: Path) -> None:
    code_sync.archive(tmp_path / "a.tar.gz", tree)
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        names = set(tar.getnames())
        content = tar.extractfile("run.py")
        assert content is not None
        assert content.read() == b"changed\n"
    assert names == {".commit", ".gitignore", "run.py", "new.py", "conf/a.yaml", "launch/b.sh", "docs/large.md"}


def test_new_code_replaces_the_old_and_leaves_environment_and_outputs(tree: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in (".venv/bin/python", "outputs/ro1/result.json", "gone.py"):
        (home / "tpu_experiments" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "tpu_experiments" / name).write_text("")
    code_sync.archive(home / "ro1.tar.gz", tree)
    command = ["bash", "-c", code_sync.unpack_command("ro1.tar.gz")]
    subprocess.run(command, env=os.environ | {"HOME": str(home)}, check=True)
    left = {path.name for path in (home / "tpu_experiments").iterdir()}
    assert left == {".commit", ".gitignore", ".venv", "outputs", "run.py", "new.py", "conf", "launch", "docs"}


def test_a_clone_has_the_asked_folders_and_is_brought_up_to_date(tree: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    settings = Settings(name="ro1", code="clone", repo="https://x/y.git", folders=("conf", "launch"))
    command = code_sync.clone_command(settings).replace("https://x/y.git", tree.as_uri())
    git(tree, "config", "uploadpack.allowFilter", "true")
    for expected in ("run.py\n", "changed\n"):
        subprocess.run(["bash", "-c", command], env=os.environ | {"HOME": str(home)}, check=True, capture_output=True)
        assert (home / "tpu_experiments" / "run.py").read_text() == expected
        git(tree, "commit", "--allow-empty", "-qam", "y")
    assert sorted(path.name for path in (home / "tpu_experiments").iterdir() if path.is_dir()) == [
        ".git",
        "conf",
        "launch",
    ]


def test_a_deploy_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    file, public = code_sync.deploy_key(tmp_path / "keys")
    assert public.startswith("ssh-ed25519 ")
    assert oct(file.stat().st_mode)[-3:] == "600"
    assert code_sync.deploy_key(tmp_path / "keys") == (file, public)
    private = Settings(name="r", code="clone", repo="git@github.com:me/x.git")
    assert "IdentitiesOnly" in code_sync.clone_command(private)


def test_the_launcher_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import launch.tpu_vm.cli; "
        "print([m for m in ('torch', 'torch_xla', 'hydra', 'omegaconf', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=code_sync.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
