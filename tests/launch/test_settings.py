"""Settings from the command line and from a .env file."""

from pathlib import Path

import pytest

from launch.tpu_vm.cli import main
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.settings import Settings, parse, read_env_file

ENV = """
# start_tpu.sh
export PROJECT_ID='my-project'
ZONE=us-central1-a
TPU_NAME="bert1"   # the pod
ACCELERATOR_TYPE=v5litepod-8
PRE_EMPTIBLE=true
EXT_DISK_NAME=shards
EXT_DISK_SIZE=200GB
DATA_BUCKET=shards-of-me
HF_TOKEN=hf_x
BATCH_SIZE=32
"""


def parsed(*words: str, env: str = "") -> Settings:
    return parse(list(words), env_file=read_env_file(env))


def test_a_env_file_of_the_pod_scripts_is_understood() -> None:
    settings = parsed(env=ENV)
    assert (settings.project, settings.zones, settings.name) == ("my-project", ("us-central1-a",), "bert1")
    assert (settings.hw, settings.spot, settings.data_disk, settings.data_disk_gb) == ("v5e8", True, "shards", 200)
    assert settings.source == "gs://shards-of-me"


def test_the_command_line_wins() -> None:
    settings = parsed("spot=false", "zones=[a-b-c]", "max_usd=60", "data_disk=", env=ENV)
    assert (settings.spot, settings.zones, settings.max_usd, settings.data_disk) == (False, ("a-b-c",), 60.0, "")
    assert parsed("max_usd=null").max_usd is None
    assert (parsed().ports, parsed("ports=none").ports, parsed("ports=[7000]").ports) == (
        ("6006", "8888"),
        (),
        ("7000",),
    )


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("namee=x", "did you mean name=?"),
        ("max_usd=lots", "it is no number"),
        ("max_usd=0", "above 0"),
        ("spot=maybe", "true or false"),
        ("plan=never", "first, skip"),
        ("name=Ro_1", "small letters"),
        ("code=clone", "repo="),
        ("repo=github", "https://"),
        ("up", "key=value"),
        ("data_disk_gb=1.5", "no number"),
        ("ports=6006,tensorboard", "tensorboard is no port"),
        ("ports=0", "0 is no port"),
        ("ports=6006:99999", "write 6006, or 16006:6006"),
    ],
)
def test_a_wrong_setting_is_one_sentence(word: str, sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence.replace("?", r"\?")) as caught:
        parsed(word)
    assert caught.value.code == 2
    assert word.split("=")[0] in str(caught.value)


def test_a_disk_ties_the_launch_to_one_zone() -> None:
    with pytest.raises(LaunchError, match="one zone"):
        parsed("data_disk=d", "zones=a-b-c,d-e-f")


def test_unknown_commands_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out


def test_the_launchers_readme_names_every_setting() -> None:
    text = (Path(__file__).parents[2] / "launch" / "README.md").read_text()
    assert [name for name in vars(Settings()) if f"`{name}" not in text] == []
