"""The launcher's commands against the fake cloud, in a folder of their own."""

from dataclasses import dataclass, field
from pathlib import Path

from launch.tpu_vm.cli import main
from launch.tpu_vm.state import Record, Store
from launch.tpu_vm.world import LocalFiles, World
from tests.launch.fake_cloud import FakeCloud, Killed

RUN = ["--", "experiment=mistral7b_ro", "output_dir=gs://bucket/runs"]
SECRETS = {"HF_TOKEN": "hf_secretsecret'quoted", "WANDB_API_KEY": "wandbkeywandbkey"}


class FakeArchive(LocalFiles):
    def archive(self, file: Path) -> str:
        self.make_dirs(file.parent)
        file.write_bytes(b"")
        return "a tree"


class FastStore(Store):
    """Not in one step, which takes the disk a millisecond; what is killed here is killed between two writes."""

    def write(self, text: str) -> None:
        self.file.write_text(text, encoding="utf-8")


@dataclass
class Launcher:
    cloud: FakeCloud
    folder: Path
    answers: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def world(self) -> World:
        return World(
            run=self.cloud.run,
            clock=self.cloud.clock,
            say=self.said.append,
            ask=lambda question: self.said.append(question) or (self.answers.pop(0) if self.answers else "n"),
            environ=SECRETS,
            files=FakeArchive(),
            store=FastStore,
        )

    def __call__(self, command: str, *words: str, run: list[str] | None = None) -> int:
        common = [f"results={self.folder}", "project=p", "yes=true", f"env_file={self.env_file()}"]
        return main([command, *common, *words, *(run or [])], self.world())

    def env_file(self) -> Path:
        file = self.folder / "empty.env"
        if not file.exists():
            file.write_text("")
        return file

    def train(self, *words: str, run: list[str] | None = None) -> int:
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

    def record(self) -> Record:
        record = Store(self.folder / "launch", "ro1").load()
        assert record is not None
        return record
