"""Every command line that the launcher builds, parsed by the real gcloud, which says no before it looks for an account.

Exit code 2 is a command gcloud does not know; without an account a good one ends with 1 and the words "active account".
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from launch.tpu_vm import gcloud
from launch.tpu_vm.gcloud import Target
from launch.tpu_vm.settings import Settings, parse
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
    return gcloud.create(
        target(settings), load_slice(hw), watchdog=WATCHDOG, watchdog_seconds=86_400.0, valid_seconds=21_600.0
    )


def every_command() -> dict[str, list[str]]:
    """Each builder once, with the settings that add flags; each slice, spot or on demand."""
    plain, full = target(PLAIN), target(FULL)
    lines = {f"create {hw}": creation(hw, FULL if index % 2 else PLAIN) for index, hw in enumerate(rentable())}
    lines |= {f"create spot {hw}": creation(hw, Settings(name="r", spot=True)) for hw in ("v5e8", "v6e16")}
    lines |= {"describe": gcloud.describe(plain), "node": gcloud.describe_node(plain)}
    lines |= {"delete": gcloud.delete(full), "delete node": gcloud.delete_node(full)}
    lines |= {kind: gcloud.listing(full, kind) for kind in ("queued-resources", "tpu-vm")}
    everywhere = replace(full, zone="-")
    lines |= {f"{kind} of all zones": gcloud.listing(everywhere, kind) for kind in ("queued-resources", "tpu-vm")}
    lines |= {"VMs of all zones": gcloud.list_loaders(everywhere), "disks of all zones": gcloud.list_disks(everywhere)}
    lines |= {
        "ssh all": gcloud.ssh(plain, "echo a b"),
        "ssh iap": gcloud.ssh(full, "true", worker="3"),
        "ssh all iap": gcloud.ssh(full, "true"),
    }
    lines |= {"shell": gcloud.shell(plain, worker="0"), "shell iap": gcloud.shell(full, worker="0")}
    lines |= {"shell without ports": gcloud.shell(target(replace(PLAIN, ports=())), worker="0")}
    lines |= {"to": gcloud.copy_to(plain, WATCHDOG, "x.gz"), "to iap": gcloud.copy_to(full, WATCHDOG, "x.gz")}
    lines |= {"from": gcloud.copy_from(plain, "x", "/tmp/x"), "from iap": gcloud.copy_from(full, "x", "/tmp/x")}
    lines |= {
        "disk": gcloud.create_disk(full, "hyperdisk-ml"),
        "loader": gcloud.create_loader(full, "shards-loader"),
    }
    lines |= {
        "fill": gcloud.fill_disk(full, "shards-loader"),
        "loader gone": gcloud.delete_loader(full, "shards-loader"),
    }
    lines |= {
        "share": gcloud.share_disk(full),
        "VMs": gcloud.list_loaders(full),
        "disks": gcloud.list_disks(full),
    }
    lines |= {"number": gcloud.project_number("p", PLAIN), "policy": gcloud.policy("p", FULL)}
    lines |= {"grant": gcloud.grant("p", "sa@p.iam.gserviceaccount.com"), "new role": gcloud.create_role("p")}
    lines |= {
        "role": gcloud.role("projects/p/roles/x", FULL),
        "role above": gcloud.role("organizations/1/roles/x", PLAIN),
    }
    lines |= {"part": gcloud.bucket_part("gs://bkt/r", "/tmp", kept="a|b"), "cat": gcloud.bucket_read("gs://bkt/r")}
    lines |= {"bucket cp": gcloud.bucket_copy("gs://bkt/r/adapter", "/tmp"), "ls": gcloud.bucket_look("gs://bkt/r")}
    return lines | {"bucket fill": gcloud.bucket_fill("/tmp", "gs://bkt/prepared")}


@pytest.fixture(scope="module")
def accountless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a gcloud without an account."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    folder = tmp_path_factory.mktemp("gcloud")
    ours = {"CLOUDSDK_CONFIG": str(folder), "CLOUDSDK_CORE_PROJECT": "p", "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    return os.environ | ours | {"HOME": str(folder)}


def said_by_gcloud(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_gcloud_knows_every_command_and_flag(accountless: dict[str, str]) -> None:
    lines = every_command()
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = dict(
            zip(lines, pool.map(lambda words: said_by_gcloud(words, accountless), lines.values()), strict=True)
        )
    bad = {name: text for name, (code, text) in answers.items() if code != 1 or not _is_about_the_account(text)}
    assert bad == {}


def _is_about_the_account(text: str) -> bool:
    return "active account" in text or "Your current active account [me@example.org] does not have" in text


def test_gcloud_refuses_a_flag_it_does_not_know(accountless: dict[str, str]) -> None:
    """What the test above goes by."""
    code, text = said_by_gcloud([*creation("v6e8", PLAIN), "--autocheckpoint-enabled"], accountless)
    assert code == 2
    assert "unrecognized arguments" in text


@pytest.mark.parametrize("hw", rentable())
def test_a_slice_is_asked_for_as_the_api_names_it(hw: str) -> None:
    slice_ = load_slice(hw)
    family, cores = hw.split("-") if "-" in hw else ("v5litepod" if hw.startswith("v5e") else "v6e", hw[3:])
    assert f"--accelerator-type={family}-{cores}" in creation(hw, PLAIN)
    assert slice_.chips == int(cores) // (2 if "-" in hw else 1), "v4 and v5p are named by their two cores a chip"
    assert slice_.num_workers == (1 if slice_.chips <= 8 else slice_.chips // 4)


def test_a_login_shows_the_ports_of_tensorboard_and_jupyter_here() -> None:
    words = gcloud.shell(target(PLAIN), worker="0")
    assert words[words.index("--") :] == [
        "--",
        "-L",
        "localhost:6006:localhost:6006",
        "-L",
        "localhost:8888:localhost:8888",
    ]
    other = gcloud.shell(target(parse(["ports=16006:6006"], env_file={})), worker="0")
    assert other[-2:] == ["-L", "localhost:16006:localhost:6006"]
    assert "--" not in gcloud.shell(target(parse(["ports=none"], env_file={})), worker="0")


def test_ssh_gets_the_ports() -> None:
    """Words behind -- are ssh's own; gcloud's parser takes any, ssh's does not."""
    words = gcloud.shell(target(PLAIN), worker="0")
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed")
    done = subprocess.run(["ssh", "-G", *words[words.index("--") + 1 :], "host"], capture_output=True, text=True)
    assert done.stdout.count("\nlocalforward ") == 2


def test_no_command_holds_a_boolean_of_the_wrong_track() -> None:
    for name, words in every_command().items():
        is_alpha = "alpha" in words
        assert is_alpha == ("--tunnel-through-iap" in words), name
        assert not any(word.startswith("--type=") for word in words if "disks" not in words), name
