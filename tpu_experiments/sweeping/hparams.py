"""Write a sweep's finished points as sessions of TensorBoard's HPARAMS tab.

The tab shows them as a table, parallel coordinates and scatter plots. The events are built from TensorBoard's own
messages: `torch.utils.tensorboard` would load torch into a process that only waits for others, and
`tensorboard.plugins.hparams.summary` loads TensorFlow.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from tpu_experiments.storage import paths
from tpu_experiments.sweeping.leaderboard import FINISHED, PRUNED, Row

FOLDER = "tensorboard"
METRICS = ("eval_loss", "tokens_per_second", "num_trainable", "seconds")
PLUGIN = "hparams"


def write_session(row: Row, *, folder: str) -> None:
    """Write `<sweep>/tensorboard/<point>` once; nothing for a point that is not finished or pruned."""
    place = paths.join(folder, FOLDER, row.name)
    if row.status not in (FINISHED, PRUNED) or paths.list_names(place):
        return
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    with tempfile.TemporaryDirectory() as temporary:
        writer = EventFileWriter(temporary)
        for summary in summaries(row):
            writer.add_event(Event(wall_time=time.time(), step=0, summary=summary))
        writer.close()
        paths.make_dirs(place)
        for file in Path(temporary).iterdir():
            paths.copy_file(str(file), paths.join(place, file.name))


def summaries(row: Row) -> list[Any]:
    """Return the tab's records: experiment, session start with its values, session end, metrics."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    values: dict[str, float | str] = {key: _number(value) for key, value in row.changed.items()}
    metrics = {name: value for name in METRICS if (value := getattr(row, name)) is not None}
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=name, type=_kind(value, api_pb2)) for name, value in values.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=name)) for name in METRICS],
    )
    start = plugin_data_pb2.SessionStartInfo(group_name=row.name)
    for name, value in values.items():
        if isinstance(value, str):
            start.hparams[name].string_value = value
        else:
            start.hparams[name].number_value = value
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value("STATUS_SUCCESS"))
    parts = {"experiment": experiment, "session_start_info": start, "session_end_info": end}
    made = []
    for name, part in parts.items():
        content = plugin_data_pb2.HParamsPluginData(version=0, **{name: part}).SerializeToString()
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN, content=content))
        made.append(Summary(value=[Summary.Value(tag=f"_hparams_/{name}", metadata=about)]))
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    return [*made, Summary(value=scalars)]


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _kind(value: float | str, api: Any) -> Any:
    return api.DATA_TYPE_STRING if isinstance(value, str) else api.DATA_TYPE_FLOAT64
