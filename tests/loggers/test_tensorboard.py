"""Event files read back record for record with TensorBoard's own reader."""

import errno
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ShownEvents
from tensorboard.plugins.hparams.metadata import parse_experiment_plugin_data, parse_session_start_info_plugin_data

from tpu_experiments.loggers import tensorboard
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.tensorboard import TensorBoardLogger
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import config_yaml
from tpu_experiments.training.pictures import loss_figure, png_of

MakeContext = Callable[..., LoggerContext]


def read(folder: str) -> EventAccumulator:
    return EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0}).Reload()


def curve(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def start(context: LoggerContext, *, steps: list[int], slope: float = 1.0) -> TensorBoardLogger:
    logger = TensorBoardLogger(context)
    for step in steps:
        logger.scalars(step, {"train/loss": slope * step, "train/lr": 0.5})
    return logger


def text(accumulator: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    found = accumulator.Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def test_scalars_text_and_config_read_back_while_running(make_context: MakeContext) -> None:
    context = make_context()
    logger = start(context, steps=[1, 2, 3])
    logger.text(3, tag="sample", text="Dunărea")
    found = read(context.run_folder.path("tensorboard"))
    logger.finish()
    assert curve(found, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert curve(found, "train/lr") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert text(found, "sample") == [(3, "Dunărea")]
    assert text(found, "config") == [(0, f"```yaml\n{config_yaml(context.config)}```")]


def test_a_picture_reads_back_with_its_size(make_context: MakeContext) -> None:
    context = make_context()
    logger = start(context, steps=[1])
    png = png_of(loss_figure([{"step": 1, "train/loss": 1.0}], stages={"only": 1}, title="run"))
    logger.image(7, tag="loss", png=png)
    logger.finish()
    (image,) = read(context.run_folder.path("tensorboard")).Images("loss")
    assert (image.step, image.width, image.height, image.encoded_image_string) == (7, 900, 400, png)


def test_a_resumed_run_has_one_curve(make_context: MakeContext) -> None:
    start(make_context(), steps=[0, 1, 2, 3, 4]).finish()
    context = make_context(resume_step=2)
    start(context, steps=[3, 4, 5], slope=10.0).finish()
    found = read(context.run_folder.path("tensorboard"))
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert curve(found, "train/loss") == expected
    assert len(text(found, "config")) == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, -40 * 86_400.0, -1e9])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_clock_that_went_back_hides_nothing(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, place: str
) -> None:
    """Each start is a number of seconds after the one before, by a clock that goes backwards."""
    output_dir, now = None if place == "local" else f"memory://{uuid.uuid4().hex}", time.time()
    for number, resume_step in enumerate([0, 2, 4, 4]):
        monkeypatch.setattr(time, "time", lambda number=number: now + number * seconds)
        context = make_context(output_dir=output_dir, resume_step=resume_step)
        start(context, steps=[resume_step + 1, resume_step + 2, resume_step + 3], slope=10.0**number).finish()
    folder = context.run_folder.path("tensorboard")
    for name in paths.list_names(folder):
        (tmp_path / "read").mkdir(exist_ok=True)
        (tmp_path / "read" / name).write_bytes(paths.read_bytes(paths.join(folder, name)))
    expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 5000.0), (6, 6000.0), (7, 7000.0)]
    assert curve(read(str(tmp_path / "read")), "train/loss") == expected
    shown = ShownEvents(str(tmp_path / "read"), size_guidance={"tensors": 0}).Reload().Tensors("train/loss")
    assert [event.step for event in shown] == [step for step, _ in expected]


def test_a_rollback_in_the_same_second_is_behind_what_it_drops(make_context: MakeContext) -> None:
    for number in range(12):
        context = make_context(resume_step=number)
        start(context, steps=[number + 1, number + 2], slope=10.0).finish()
    found = curve(read(context.run_folder.path("tensorboard")), "train/loss")
    assert found == [(step, 10.0 * step) for step in range(1, 14)]


def test_what_was_written_after_the_last_checkpoint_is_shown_once(make_context: MakeContext) -> None:
    """A kill between the last log records and result.json: the same command writes them again."""
    png = png_of(loss_figure([{"step": 1, "train/loss": 1.0}], stages={"only": 1}, title="run"))

    def end(logger: TensorBoardLogger, *, is_torn: bool = False) -> None:
        logger.scalars(4, {"skill/sums": 0.5})
        logger.text(4, tag="sample", text="after training")
        logger.image(4, tag="loss", png=png)
        logger.hparams({"lr": 0.5}, {"hparam/eval_loss": 1.5, "hparam/perplexity": 4.5})
        logger.finish()
        if is_torn:
            (*_, newest) = sorted(Path(context.run_folder.path("tensorboard")).iterdir())
            newest.write_bytes(newest.read_bytes()[:-9])

    context = make_context()
    logger = start(context, steps=[1, 2, 3, 4])
    logger.text(4, tag="sample", text="during training")
    end(logger, is_torn=True)
    for _ in range(3):
        end(start(make_context(resume_step=4), steps=[]))
    folder = context.run_folder.path("tensorboard")
    found = read(folder)
    once = {"hparam/eval_loss": 1.5, "hparam/perplexity": 4.5, "skill/sums": 0.5}
    assert {tag: curve(found, tag) for tag in once} == {tag: [(4, value)] for tag, value in once.items()}
    assert text(found, "sample") == [(4, "during training"), (4, "after training")]
    assert [image.step for image in found.Images("loss")] == [4]
    assert [step for step, _ in curve(found, "train/loss")] == [1, 2, 3, 4]
    shown = ShownEvents(folder, size_guidance={"tensors": 0}).Reload()
    assert len(shown.Tensors("hparam/perplexity")) == len(shown.Tensors("skill/sums")) == 1


def test_what_a_resume_purges_is_written_again(make_context: MakeContext) -> None:
    """The last checkpoint was damaged: the run resumes before it, and ends at the same step."""
    for resume_step in (0, 2, 4):
        logger = start(make_context(resume_step=resume_step), steps=list(range(resume_step + 1, 5)))
        logger.hparams({"lr": 0.5}, {"hparam/eval_loss": 1.5})
        logger.finish()
    context = make_context(resume_step=4)
    assert curve(read(context.run_folder.path("tensorboard")), "hparam/eval_loss") == [(4, 1.5)]


def test_a_run_killed_before_its_first_checkpoint_starts_over(make_context: MakeContext) -> None:
    start(make_context(), steps=[0, 1, 2, 3]).finish()
    context = make_context()
    start(context, steps=[0, 1], slope=10.0).finish()
    found = read(context.run_folder.path("tensorboard"))
    assert curve(found, "train/loss") == [(0, 0.0), (1, 10.0)]
    shown = ShownEvents(context.run_folder.path("tensorboard")).Reload()  # the other one purges no text
    assert [event.step for event in shown.Tensors("config/text_summary")] == [0]


def test_hparams_are_a_row_of_this_run_and_make_no_sub_run(make_context: MakeContext) -> None:
    context = make_context()
    logger = start(context, steps=[1, 2])
    logger.hparams({"lr": 0.5, "model": "tiny", "targets": ["q", "v"], "none": None}, {"hparam/eval_loss": 1.5})
    logger.finish()
    folder = Path(context.run_folder.path("tensorboard"))
    assert [path.is_file() for path in folder.iterdir()] == [True]
    found = read(str(folder))
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = parse_session_start_info_plugin_data(content).hparams
    assert values["lr"].number_value == 0.5
    assert values["model"].string_value == "tiny"
    assert values["targets"].string_value == "['q', 'v']"
    experiment = parse_experiment_plugin_data(found.SummaryMetadata("_hparams_/experiment").plugin_data.content)
    assert [metric.name.tag for metric in experiment.metric_infos] == ["hparam/eval_loss"]
    assert curve(found, "hparam/eval_loss") == [(2, 1.5)]


def test_a_remote_run_folder_gets_every_record(make_context: MakeContext, tmp_path: Path) -> None:
    output_dir = f"memory://{uuid.uuid4().hex}"
    start(make_context(output_dir=output_dir), steps=list(range(200))).finish()
    context = make_context(output_dir=output_dir, resume_step=150)
    start(context, steps=[151, 152]).finish()
    folder = context.run_folder.path("tensorboard")
    assert len(paths.list_names(folder)) == 2
    for name in paths.list_names(folder):
        (tmp_path / name).write_bytes(paths.read_bytes(paths.join(folder, name)))
    assert [step for step, _ in curve(read(str(tmp_path)), "train/loss")] == [*range(151), 151, 152]


def test_a_full_disk_costs_records_and_no_run(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self: RecordWriter, data: bytes) -> None:
        self._writer.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensorboard, "FULL_SECONDS", 0.0)
    context = make_context()
    logger = start(context, steps=[1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", full)
        for step in (3, 4):
            logger.scalars(step, {"train/loss": 0.0})
    logger.scalars(5, {"train/loss": 5.0})
    logger.finish()
    assert curve(read(context.run_folder.path("tensorboard")), "train/loss") == [(1, 1.0), (2, 2.0), (5, 5.0)]
    assert len(paths.list_names(context.run_folder.path("tensorboard"))) == 2
    assert caplog.text.count("until the disk has space") == 1
    assert "lacks 2 records" in caplog.text


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("torch.utils.tensorboard", ("torch_xla", "tensorflow")),
        (
            "tpu_experiments.loggers.base, tpu_experiments.loggers.console, tpu_experiments.loggers.jsonl, "
            "tpu_experiments.loggers.tensorboard, tpu_experiments.loggers.wandb, tpu_experiments.loggers.runlog",
            ("torch", "torch_xla", "wandb", "gcsfs"),
        ),
    ],
)
def test_what_an_import_brings_along(imports: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {imports}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
