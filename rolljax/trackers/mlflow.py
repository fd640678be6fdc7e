"""MLflow: a server, a database or a folder (`MLFLOW_TRACKING_URI` and its other variables are its own)."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import ClassVar

from rolljax.trackers.base import EVERY_ROW, Outcome, Row, RunInfo, TrackerConfig, flat, numbers, png_file

OUR_ID = "rolljax.id"
"""The tag by which a run is found again."""
MAX_VALUE, BATCH = 500, 100
"""Characters of a parameter, and parameters of one call, that every store takes."""


@dataclasses.dataclass(frozen=True)
class MLflow(TrackerConfig):
    """A run in an MLflow experiment.

    MLflow cannot take values back: steps that are repeated after a kill keep their first values.
    """

    experiment: str = "rolljax"
    """Name of the experiment."""
    tracking_uri: str | None = None
    """URI of the tracking server or store. None: `MLFLOW_TRACKING_URI` if set, else MLflow's own default."""

    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    def open(self, run: RunInfo) -> MLflowRun:
        """Resume the run that has this id for a tag, or start it."""
        return MLflowRun(self, run)


class MLflowRun:
    """See `base.Tracker`."""

    def __init__(self, cfg: MLflow, run: RunInfo) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=cfg.tracking_uri)
        experiment = self._client.get_experiment_by_name(cfg.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(cfg.experiment)
        found = self._client.search_runs([number], f"tags.`{OUR_ID}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(number, run_name=run.name, tags={OUR_ID: run.id}).info.run_id
            self._put_settings(run)
        self._last = max((m.step for m in self._client.get_metric_history(self._id, EVERY_ROW)), default=0)
        self._phase = ""

    def _put_settings(self, run: RunInfo) -> None:
        from mlflow.entities import Param

        params = [Param(_name(name), str(value)[:MAX_VALUE]) for name, value in flat(run.settings).items()]
        for start in range(0, len(params), BATCH):
            self._client.log_batch(self._id, params=params[start : start + BATCH])

    def last_step(self) -> int:
        return self._last

    def log(self, step: int, row: Row) -> None:
        from mlflow.entities import Metric, RunTag

        now_ms, phase = int(time.time() * 1000), row.get("phase", "")
        metrics = [Metric(_name(name), float(value), now_ms, step) for name, value in numbers(row).items()]
        tags = [RunTag("phase", str(phase))] if phase != self._phase else []
        self._client.log_batch(self._id, metrics=metrics, tags=tags, synchronous=True)
        self._phase = str(phase)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{_name(name)}/step_{step:06d}.txt")

    def figure(self, step: int, name: str, png: bytes) -> None:
        with png_file(png, f"step_{step:06d}.png") as path:
            self._client.log_artifact(self._id, path, _name(name))

    def close(self, outcome: Outcome) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self._id, status)


def _name(name: str) -> str:
    """Replace the characters that MLflow does not allow in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name)
