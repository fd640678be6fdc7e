"""TensorBoard: event files, written with the `tensorboard` package itself; neither TensorFlow nor torch is needed."""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from pathlib import Path
from typing import Any, ClassVar

from rolljax.trackers.base import Outcome, Row, RunInfo, TrackerConfig, flat, numbers


@dataclasses.dataclass(frozen=True)
class TensorBoard(TrackerConfig):
    """Event files for `tensorboard --logdir runs`."""

    log_dir: str | None = None
    """Folder for them; each run gets one of its name below it. None: in the run folder."""

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    def open(self, run: RunInfo) -> TensorBoardRun:
        """Open a new event file, which replaces steps of earlier ones that are run again."""
        folder = Path(self.log_dir).expanduser() / f"{run.name}-{run.id[:4]}" if self.log_dir else run.folder
        return TensorBoardRun(folder, run)


class TensorBoardRun:
    """See `base.Tracker`."""

    def __init__(self, folder: Path, run: RunInfo) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._tensors, self._shapes, self._types = tensor_pb2, tensor_shape_pb2, types_pb2
        self._held = min(_newest_step(folder), run.done)
        self._writer = EventFileWriter(str(folder))
        if self._held:
            self._add(run.done + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        else:
            lines = [f"{name} = {value}" for name, value in flat(run.settings).items()]
            self.text(0, "settings", json.dumps(run.name) + "\n\n    " + "\n    ".join(lines))
        self._writer.flush()

    def last_step(self) -> int:
        return self._held

    def log(self, step: int, row: Row) -> None:
        value = self._summaries.Summary.Value
        self._add(step, *(value(tag=name, simple_value=v) for name, v in numbers(row).items()))
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        shape = self._shapes.TensorShapeProto(dim=[self._shapes.TensorShapeProto.Dim(size=1)])
        tensor = self._tensors.TensorProto(
            dtype=self._types.DT_STRING, tensor_shape=shape, string_val=[text.encode(errors="replace")]
        )
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add(step, self._summaries.Summary.Value(tag=name, tensor=tensor, metadata=metadata))

    def figure(self, step: int, name: str, png: bytes) -> None:
        width, height = struct.unpack(">II", png[16:24])
        image = self._summaries.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._add(step, self._summaries.Summary.Value(tag=name, image=image))

    def close(self, outcome: Outcome) -> None:
        self._writer.close()

    def _add(self, step: int, *values: Any, **what: Any) -> None:
        if values:
            what["summary"] = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **what))


def _newest_step(folder: Path) -> int:
    """Return the newest step in the event files of a folder; 0 if there are none."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    newest = 0
    for path in sorted(folder.glob("*tfevents*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = event_pb2.Event.FromString(raw)
            newest = max(newest, event.step if event.HasField("summary") else 0)
    return newest
