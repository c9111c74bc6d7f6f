"""The launcher's commands against the fake cloud, in a folder of their own."""

import errno
from dataclasses import dataclass, field
from pathlib import Path

from launch.tpu_vm.cli import main
from launch.tpu_vm.job import Estimate
from launch.tpu_vm.state import Record, Store
from launch.tpu_vm.world import LocalFiles, World
from tests.launch.fake_cloud import FakeCloud, Killed

RUN = ["--", "experiment=mistral7b_ro", "output_dir=gs://bucket/runs"]
SECRETS = {"HF_TOKEN": "hf_secretsecret'quoted", "WANDB_API_KEY": "wandbkeywandbkey"}


class FakeArchive(LocalFiles):
    def __init__(self, cloud: FakeCloud) -> None:
        self._cloud = cloud

    def check_archive(self) -> None:
        pass

    def unpack(self, file: Path, into: Path) -> list[str]:
        if self._cloud.is_in("full_disk"):
            raise OSError(errno.ENOSPC, "No space left on device", str(into))
        return super().unpack(file, into)

    def archive(self, file: Path) -> str:
        self.make_dirs(file.parent)
        file.write_bytes(b"")
        return "a tree"


def fast_store(cloud: FakeCloud) -> type[Store]:
    """Not in one step, which takes the disk a millisecond; what is killed here is killed between two writes."""

    class FastStore(Store):
        def write(self, text: str) -> None:
            if cloud.is_in("full_disk"):
                raise OSError(errno.ENOSPC, "No space left on device", str(self.file))
            self.file.write_text(text, encoding="utf-8")

    return FastStore


@dataclass
class Launcher:
    cloud: FakeCloud
    folder: Path
    answers: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    planned: float | None = None
    """Hours of a plan."""

    def world(self) -> World:
        return World(
            run=self.cloud.run,
            clock=self.cloud.clock,
            say=self.said.append,
            ask=lambda question: self.said.append(question) or (self.answers.pop(0) if self.answers else "n"),
            environ=SECRETS,
            files=FakeArchive(self.cloud),
            store=fast_store(self.cloud),
            **(
                {}
                if self.planned is None
                else {"plan": lambda *_, **__: Estimate(True, self.planned, None, "compiled")}
            ),
        )

    def __call__(self, command: str, *words: str, run: list[str] | None = None) -> int:
        common = [f"results={self.folder}", "project=p", "yes=true", f"env_file={self.env_file()}"]
        return main([command, *common, *words, *(run or [])], self.world())

    def env_file(self) -> Path:
        file = self.folder / "empty.env"
        if not file.exists():
            file.write_text("")
        return file

    def train(self, *words: str, run: list[str] | None = None, planned: float | None = None) -> int:
        self.planned = planned
        settings = ["hw=v6e8", "spot=true", "name=ro1", "plan=skip", "zones=z-a,z-b,z-c", *words]
        return self("train", *settings, run=RUN if run is None else run)

    def train_whatever_happens(self, *words: str, limit: int = 200) -> int:
        """The same command again each time the launcher is killed."""
        for _ in range(limit):
            try:
                return self.train(*words)
            except Killed:
                continue
        raise AssertionError("it never ended")

    def known(self) -> Record | None:
        return Store(self.folder / "launch", "ro1").load()

    def names_the_bucket(self) -> bool:
        """Whether a line says how the results are copied that could not be fetched."""
        return any("gcloud storage cp --recursive gs://bucket/runs/ro1" in line for line in self.said)

    def record(self) -> Record:
        record = Store(self.folder / "launch", "ro1").load()
        assert record is not None
        return record
