"""Every command line that the launcher builds, parsed by the real gcloud, which says no before it looks for an account.

Exit code 2 is a command gcloud does not know; without an account a good one ends with 1 and the words "active account".
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.tpu_vm import commands, loading
from launch.tpu_vm.commands import Target
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.slices import load_slice, rentable

WATCHDOG = str(Path(__file__).parents[2] / "launch" / "watchdog.sh")
PLAIN = Settings(name="ro1", hw="v6e8")
FULL = Settings(
    name="ro1",
    spot=True,
    network="internal",
    service_account="sa@p.iam.gserviceaccount.com",
    account="me@example.org",
    data_disk="shards",
    source="gs://bucket/prepared",
)


def target(settings: Settings) -> Target:
    return Target(settings, "p", "europe-west4-a", "ro1-0a1b2c")


def creation(hw: str, settings: Settings) -> list[str]:
    return commands.create(
        target(settings), load_slice(hw), watchdog=WATCHDOG, watchdog_seconds=86_400.0, valid_seconds=21_600.0
    )


def every_command() -> dict[str, list[str]]:
    """Each builder once, with the settings that add flags; each slice, spot or on demand."""
    plain, full = target(PLAIN), target(FULL)
    lines = {f"create {hw}": creation(hw, FULL if index % 2 else PLAIN) for index, hw in enumerate(rentable())}
    lines |= {f"create spot {hw}": creation(hw, Settings(name="r", spot=True)) for hw in ("v5e8", "v6e16")}
    lines |= {"describe": commands.describe(plain), "node": commands.describe_node(plain)}
    lines |= {"delete": commands.delete(full), "delete node": commands.delete_node(full)}
    lines |= {kind: commands.listing(full, kind) for kind in ("queued-resources", "tpu-vm")}
    lines |= {
        "ssh all": commands.ssh(plain, "echo a b"),
        "ssh iap": commands.ssh(full, "true", worker="3"),
        "ssh all iap": commands.ssh(full, "true"),
    }
    lines |= {"shell": commands.shell(plain, worker="0"), "shell iap": commands.shell(full, worker="0")}
    lines |= {"to": commands.copy_to(plain, WATCHDOG, "x.gz"), "to iap": commands.copy_to(full, WATCHDOG, "x.gz")}
    lines |= {"from": commands.copy_from(plain, "x", "/tmp/x"), "from iap": commands.copy_from(full, "x", "/tmp/x")}
    lines |= {"disk": loading.create_disk(full, "hyperdisk-ml"), "loader": loading.create_vm(full, "shards-loader")}
    lines |= {"fill": loading.fill(full, "shards-loader"), "loader gone": loading.delete_vm(full, "shards-loader")}
    lines |= {"share": loading.share_disk(full), "VMs": loading.list_vms(full), "disks": loading.list_disks(full)}
    lines |= {"number": commands.project_number("p", PLAIN), "policy": commands.policy("p", FULL)}
    lines |= {"grant": commands.grant("p", "sa@p.iam.gserviceaccount.com")}
    lines |= {"part": commands.bucket_part("gs://bkt/r", "/tmp", kept="a|b"), "cat": commands.bucket_read("gs://bkt/r")}
    lines |= {"bucket cp": commands.bucket_copy("gs://bkt/r/adapter", "/tmp"), "ls": commands.bucket_look("gs://bkt/r")}
    return lines | {"bucket fill": commands.bucket_fill("/tmp", "gs://bkt/prepared")}


@pytest.fixture(scope="module")
def gcloud(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a gcloud without an account."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    folder = tmp_path_factory.mktemp("gcloud")
    ours = {"CLOUDSDK_CONFIG": str(folder), "CLOUDSDK_CORE_PROJECT": "p", "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    return os.environ | ours | {"HOME": str(folder)}


def said_by_gcloud(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    return done.returncode, done.stderr


def test_gcloud_knows_every_command_and_flag(gcloud: dict[str, str]) -> None:
    lines = every_command()
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = dict(zip(lines, pool.map(lambda words: said_by_gcloud(words, gcloud), lines.values()), strict=True))
    bad = {name: text for name, (code, text) in answers.items() if code != 1 or not _is_about_the_account(text)}
    assert bad == {}


def _is_about_the_account(text: str) -> bool:
    return "active account" in text or "Your current active account [me@example.org] does not have" in text


def test_gcloud_refuses_a_flag_it_does_not_know(gcloud: dict[str, str]) -> None:
    """What the test above goes by."""
    code, text = said_by_gcloud([*creation("v6e8", PLAIN), "--autocheckpoint-enabled"], gcloud)
    assert code == 2
    assert "unrecognized arguments" in text


@pytest.mark.parametrize("hw", rentable())
def test_a_slice_is_asked_for_as_the_api_names_it(hw: str) -> None:
    slice_ = load_slice(hw)
    family, cores = hw.split("-") if "-" in hw else ("v5litepod" if hw.startswith("v5e") else "v6e", hw[3:])
    assert f"--accelerator-type={family}-{cores}" in creation(hw, PLAIN)
    assert slice_.chips == int(cores) // (2 if "-" in hw else 1), "v4 and v5p are named by their two cores a chip"
    assert slice_.num_workers == (1 if slice_.chips <= 8 else slice_.chips // 4)


def test_no_command_holds_a_boolean_of_the_wrong_track() -> None:
    for name, words in every_command().items():
        is_alpha = "alpha" in words
        assert is_alpha == ("--tunnel-through-iap" in words), name
        assert not any(word.startswith("--type=") for word in words if "disks" not in words), name
