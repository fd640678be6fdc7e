"""Trackers of a run's numbers in addition to its own folder: TensorBoard, Weights & Biases, MLflow, Aim, trackio, or a
custom one.

`Recipe.trackers = [@trackers.TensorBoard()]` names them; `base.Tracker` is their interface.
"""

from rolljax.trackers.aim import Aim
from rolljax.trackers.base import Outcome, RunInfo, Tracker, TrackerConfig
from rolljax.trackers.mlflow import MLflow
from rolljax.trackers.tensorboard import TensorBoard
from rolljax.trackers.trackio import Trackio
from rolljax.trackers.wandb import WandB

__all__ = ["Aim", "MLflow", "Outcome", "RunInfo", "TensorBoard", "Tracker", "TrackerConfig", "Trackio", "WandB"]
