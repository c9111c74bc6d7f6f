"""Results on their way here: the real gcloud from an emulated bucket, and tar from a machine's disk; a sweep's too."""

import os
import shutil
import subprocess
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import gcsfs
import pytest

from launch.tpu_vm.errors import LaunchError, RemoteError
from launch.tpu_vm.job import check_outlives, is_grid, is_sweep, job_of
from launch.tpu_vm.settings import Settings
from launch.tpu_vm.state import Record
from launch.tpu_vm.vm import Bucket
from launch.tpu_vm.world import Completed, LocalFiles
from tests.tiers import only

pytest_plugins = ("tests.gcs",)
WORKER = Path(__file__).parents[2] / "launch" / "worker.sh"
SETTINGS = Settings(name="ranks", hw="v6e8")
GRID = ("-m", "lora.r=8,16")
POINTS = ("lora.r=16,optim.lr=0.001", "lora.r=8,optim.lr=0.001")
OF_A_RUN = (
    "README.md",
    "adapter/adapter_config.json",
    "config.yaml",
    "model/model.safetensors",
    "result.json",
    "run.log",
)
OF_A_RUN += ("test_results.json",)
OF_A_SWEEP = ("leaderboard.csv", "leaderboard.md", "logs/lora.r=8,optim.lr=0.001.log", "sweep.json", "tensorboard/p/ev")
STAYS = ("checkpoints/step_1/adapter/x", "identity.json", "metrics.jsonl", "tensorboard/ev")
FETCHED = sorted([*OF_A_SWEEP, *(f"{point}/{name}" for point in POINTS for name in OF_A_RUN)])
SWEEP = '{"points": [{"status": "finished"}, {"status": "%s"}]}'


def contents(*, last: str = "pruned") -> dict[str, str]:
    """Files of a sweep of two points, as run.py leaves them."""
    names = [*OF_A_SWEEP, *(f"{point}/{name}" for point in POINTS for name in (*OF_A_RUN, *STAYS))]
    return {name: name for name in names} | {"sweep.json": SWEEP % last}


def record(name: str, *overrides: str) -> Record:
    folder = f"gs://bkt/runs/sweeps/{name}"
    new = Record(name="r", launch_id="a", hw="v6e8", spot=True, project="p", zones=("z",), run_folder=folder)
    return replace(new, overrides=overrides or GRID)


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def bucket(gcs_bucket: str, gcs_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run folders in gs://bkt/runs, and a gcloud without an account that asks the emulator."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    host, port = gcs_server._api._httpd.server_address
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", f"http://{host}:{port}/storage/v1/")
    monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
    monkeypatch.setenv("CLOUDSDK_CORE_DISABLE_PROMPTS", "1")
    for name in ("CLOUDSDK_CONFIG", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "gcloud"))
    there = gcsfs.GCSFileSystem()
    for name, text in contents().items():
        there.pipe(f"bkt/runs/sweeps/ranks/{name}", text.encode())
    return tmp_path


def real_bucket() -> Bucket:
    def run(words: list[str], *, stdin: str = "", timeout: float = 120.0) -> Completed:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout)
        return Completed(done.returncode, done.stdout, done.stderr)

    return Bucket(run, LocalFiles())


def test_every_point_of_a_sweep_comes_from_the_bucket(bucket: Path) -> None:
    results, into = real_bucket(), bucket / "here"
    into.mkdir()
    names = results.fetch(record("ranks"), into)
    assert files_below(into) == FETCHED
    assert {"leaderboard.md", "sweep.json", *POINTS} <= set(names)
    assert (into / POINTS[0] / "result.json").read_text() == f"{POINTS[0]}/result.json"
    assert results.is_finished(record("ranks"))
    assert not results.is_finished(record("ranks", "sweep=optuna_lora"))
    assert results.fetch(record("none"), into) == []
    assert not results.is_finished(record("none"))


@pytest.mark.slow
@pytest.mark.parametrize("trained", only(["adapter"], ["adapter", "model"]))
def test_an_adapter_or_a_model_comes_from_the_bucket(bucket: Path, trained: str) -> None:
    names = ["README.md", f"{trained}/a.safetensors", f"{trained}/config.json", "result.json"]
    for name in [*names, "checkpoints/step_1/x"]:
        gcsfs.GCSFileSystem().pipe(f"bkt/runs/one/{name}", name.encode())
    into = bucket / "here"
    into.mkdir()
    done = replace(record("ranks", "lora=none"), run_folder="gs://bkt/runs/one")
    assert sorted(real_bucket().fetch(done, into)) == sorted(["README.md", "result.json", trained])
    assert files_below(into) == names


def test_a_sweep_with_a_point_that_failed_is_not_finished(bucket: Path) -> None:
    gcsfs.GCSFileSystem().pipe("bkt/runs/sweeps/ranks/sweep.json", (SWEEP % "failed").encode())
    assert not real_bucket().is_finished(record("ranks"))


def test_every_point_of_a_sweep_comes_from_a_disk(tmp_path: Path) -> None:
    for name, text in contents().items():
        file = tmp_path / "ranks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    env = os.environ | {"TPUEXP_STATE": str(tmp_path / "state")}
    command = ["bash", str(WORKER), "pack", "ranks"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True, timeout=60)
    (tmp_path / "came.tar.gz").write_bytes(done.stdout)
    LocalFiles().unpack(tmp_path / "came.tar.gz", tmp_path / "here")
    assert files_below(tmp_path / "here") == FETCHED
    assert not (tmp_path / "came.tar.gz").exists()


def packed(file: Path, **members: tarfile.TarInfo) -> Path:
    with tarfile.open(file, "w:gz") as tar:
        for member in members.values():
            tar.addfile(member, BytesIO(b"x" * member.size))
    return file


@pytest.mark.parametrize("name", ["../out", "/tmp/tpuexp_out", "a/../../out"])
def test_results_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    member = tarfile.TarInfo(name)
    member.size = 1
    with pytest.raises(RemoteError, match=r"the results came damaged: .* is no file of a run"):
        LocalFiles().unpack(packed(tmp_path / "came.tar.gz", one=member), tmp_path / "here")
    assert files_below(tmp_path / "here") == []
    assert not (tmp_path / "out").exists()


def test_results_hold_no_links_and_are_whole(tmp_path: Path) -> None:
    link, whole = tarfile.TarInfo("link"), tarfile.TarInfo("a/whole")
    link.type, link.linkname, whole.size = tarfile.SYMTYPE, "/etc/passwd", 100_000
    with pytest.raises(RemoteError, match="link is no file of a run"):
        LocalFiles().unpack(packed(tmp_path / "came.tar.gz", link=link), tmp_path / "here")
    file = packed(tmp_path / "came.tar.gz", whole=whole)
    cut = file.read_bytes()[:-20]
    file.write_bytes(cut)
    with pytest.raises(RemoteError, match="the results came damaged"):
        LocalFiles().unpack(file, tmp_path / "here")
    assert LocalFiles().unpack(packed(file, whole=whole), tmp_path / "here") == ["a"]
    assert (tmp_path / "here" / "a" / "whole").stat().st_size == 100_000


@pytest.mark.parametrize(
    ("words", "sweep", "grid"),
    [
        (["lora.r=8"], False, True),
        (["-m", "lora.r=8,16"], True, True),
        (["--multirun", "lora.r=8,16"], True, True),
        (["sweep=lora_rank_alpha"], True, False),
        (["sweep=null"], False, False),
        (["sweep=lora_rank_alpha", "hydra.mode=RUN"], False, False),
        (["-m", "hydra/sweeper=optuna"], True, False),
    ],
)
def test_a_sweep_is_recognised_by_the_words_of_its_command(words: list[str], sweep: bool, grid: bool) -> None:
    assert (is_sweep(words), is_grid(words)) == (sweep, grid)
    job = job_of([*words, "output_dir=gs://bkt/runs"], SETTINGS, local_file=Path("none"))
    assert job.folder == ("gs://bkt/runs/sweeps/ranks" if sweep else "gs://bkt/runs/ranks")


def test_a_sweep_is_refused_on_several_hosts() -> None:
    job = job_of([*GRID, "output_dir=gs://bkt/runs"], SETTINGS, local_file=Path("none"))
    check_outlives(job, SETTINGS, num_workers=1, is_new=True)
    with pytest.raises(LaunchError, match="each of its 4 VMs would run all of it"):
        check_outlives(job, SETTINGS, num_workers=4, is_new=True)


def test_points_side_by_side_name_the_chip_that_each_has() -> None:
    words = ["-m", "hw=v6e1", "lora.r=8,16", "sweeping.points_at_once=8", "output_dir=gs://bkt/runs"]
    assert job_of(words, SETTINGS, local_file=Path("none")).overrides == (*words, "name=ranks")
