"""Write TensorBoard event files to `<run>/tensorboard`, one per start of the run.

TensorBoard reads the files of a folder in the order of their names, which begin with a time; so the time of a new file
is above those of all that are there, whatever the clock says. A resumed run opens with a purge event, so that
TensorBoard shows one curve, and what the step that it resumes from has already (written after its checkpoint) is not
written again. For a remote run folder the files are written locally and uploaded.
"""

import contextlib
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import kind_of, shown
from tpu_experiments.storage.run_folder import config_yaml
from tpu_experiments.storage.spool import Mirror

FULL_SECONDS = 60.0  # period between retries on a full disk
EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.")
Shown = tuple[int, str, tuple[bytes, ...]]
"""Step and tag of a value, and its text where it is one: several texts of a tag may belong to one step."""

log = logging.getLogger(__name__)


class EventFile:
    """New event file that sorts behind those with the given names; every event is flushed.

    TensorBoard's own writer takes its name from the clock, and fsspec's gs:// would overwrite it with every record.
    """

    def __init__(self, folder: Path, *, after: Iterable[str], purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        times = [int(found[1]) for name in after if (found := EVENT_FILE.match(name))]
        begun = max([int(time.time()), *(1 + when for when in times)])
        self.path = folder / f"events.out.tfevents.{begun:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = self.path.open("xb")
        self._records = RecordWriter(self._file)
        self._event = Event
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if purge_step is not None:
                purge = SessionLog(status=SessionLog.START)
                self._write(Event(wall_time=time.time(), step=purge_step, session_log=purge))
        except OSError:
            self.path.unlink(missing_ok=True)  # else a full disk would get one such file a minute
            raise

    def add(self, summary: Any, step: int) -> None:
        """Append a summary.

        Raises:
            OSError: the disk is full; the file is closed then.
        """
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError:
            with contextlib.suppress(OSError):  # closing writes what is left once more, and fails once more
                self._file.close()
            raise


class TensorBoardLogger:
    """Log scalars, text, pictures, the config, and one row of the HPARAMS tab."""

    def __init__(self, context: LoggerContext) -> None:
        folder, resume_step = context.run_folder.path("tensorboard"), context.resume_step
        self._mirror = Mirror.of_folder(folder)
        self._names = [name for name in paths.list_names(folder) if EVENT_FILE.match(name)]
        self._shown = shown_at(folder, self._names, steps={0, resume_step}) if resume_step > 0 else set[Shown]()
        # A purge drops steps >= its own; from 0 it clears a run killed before its first checkpoint.
        self._file: EventFile | None = self._opened(purge_step=resume_step + 1 if resume_step > 0 else 0)
        self._full_since: float | None = None
        self._num_dropped = 0
        self._last_step = resume_step
        if resume_step == 0:
            self.text(0, tag="config", text=f"```yaml\n{config_yaml(context.config)}```")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add one scalar per value."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._last_step = step
        self._add(step, [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()])

    def text(self, step: int, *, tag: str, text: str) -> None:
        """Add a Markdown text for the TEXT tab."""
        from torch.utils.tensorboard import summary  # takes seconds to import

        self._add(step, summary.text(tag, text).value)

    def image(self, step: int, *, tag: str, png: bytes) -> None:
        """Add a picture for the IMAGES tab."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = struct.unpack(">II", png[16:24])  # of the first chunk, IHDR (PNG, 11.2.2)
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=4)
        self._add(step, [Summary.Value(tag=tag, image=image)])

    def hparams(self, values: dict[str, Any], metrics: dict[str, float]) -> None:
        """Add this run's row of the HPARAMS tab (`add_hparams` would create a sub-run)."""
        from torch.utils.tensorboard.summary import hparams

        shown_values = {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}
        for summary in hparams(shown_values, metrics):
            self._add(0, summary.value)
        self.scalars(self._last_step, metrics)

    def finish(self) -> None:
        """Close the event file and upload it where the run folder is remote."""
        if self._file is not None:
            self._file.close()
        if self._num_dropped:
            log.warning("%s lacks %d records: the disk was full", self._mirror.local, self._num_dropped)
        self._mirror.close()

    def _opened(self, *, purge_step: int | None) -> EventFile:
        local = self._mirror.local  # for a remote folder a new one, with the files of this process
        return EventFile(local, after=[*self._names, *os.listdir(local)], purge_step=purge_step)

    def _add(self, step: int, values: Iterable[Any]) -> None:
        """Add an event with the values that this step does not have yet; on a full disk, drop it.

        metrics.jsonl keeps dropped records. A file may end in a torn one, behind which nothing is read, so a new file
        is opened once there is room.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        new = [value for value in values if shown_as(step, value) not in self._shown]
        if not new:
            return
        if self._full_since is not None and time.monotonic() - self._full_since < FULL_SECONDS:
            self._num_dropped += 1
            return
        try:
            self._file = self._file or self._opened(purge_step=None)
            self._file.add(Summary(value=new), step)
        except OSError as error:
            if kind_of(error) != "full":
                raise
            if self._full_since is None:
                log.warning("%s; %s: records are dropped until the disk has space", self._mirror.local, shown(error))
            self._full_since, self._file = time.monotonic(), None
            self._num_dropped += 1
            return
        self._full_since = None
        self._mirror.upload_if_due()


def shown_as(step: int, value: Any) -> Shown:
    """Return what identifies a value among those that TensorBoard shows."""
    return step, value.tag, tuple(value.tensor.string_val)


def shown_at(folder: str, names: Iterable[str], *, steps: set[int]) -> set[Shown]:
    """Return the values of these steps that TensorBoard shows of the event files `names` of a folder."""
    found = set[Shown]()
    files = (paths.read_bytes(paths.join(folder, name)) for name in sorted(names))
    for event in (event for content in files for event in _events(content)):
        if event.HasField("session_log"):  # a start, with the step of its purge
            found = {each for each in found if each[0] < event.step}
        elif event.step in steps:
            found |= {shown_as(event.step, value) for value in event.summary.value}
    return found


def _events(content: bytes) -> Iterator[Any]:
    """Yield the events of a file up to one that is torn.

    A record is the length of its data, 8 bytes, a checksum of it, 4, the data, and a checksum of that, 4 (TFRecord).
    TensorBoard's own reader computes both in Python, at a few megabytes a second.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    begin = 12
    while begin <= len(content):
        end = begin + struct.unpack_from("<Q", content, begin - 12)[0]
        if end + 4 > len(content):
            return
        try:
            yield Event.FromString(content[begin:end])
        except DecodeError:
            return
        begin = end + 16
