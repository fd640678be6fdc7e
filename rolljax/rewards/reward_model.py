"""Rewards by a trained reward model, which reads whole episodes on the devices and computes one number for each.

InstructGPT (arXiv 2203.02155): the number is shifted and scaled so that answers like those it was trained with have
mean 0 and standard deviation 1, and the policy's reward stays near that range (`clip`). The environment's own reward is
not trained on; it is recorded next to the model's and shows where the two diverge.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from rolljax.envs.base import EnvSpec
from rolljax.errors import ConfigError, EnvError, InfraError, Range, boundary, check_fields
from rolljax.model import hf
from rolljax.model.decoder import Dtype, Model
from rolljax.model.folder import folder_remedy
from rolljax.model.tokenizer import Chat, load_tokenizer
from rolljax.model.value import ValueModel
from rolljax.rewards.base import Reward, RewardConfig, RewardContext
from rolljax.rewards.row_scores import RowScores, TrainedValue
from rolljax.trainer.mesh import MeshSpec, param_shardings
from rolljax.types import EVAL_STREAM, Message, Task, Trajectory

PROXY, REFERENCE = "reward_model", "environment"
"""Parts of the reward: the model's output before shift, scale and clip; the environment's reward."""


@dataclasses.dataclass(frozen=True)
class RewardModelScore(RewardConfig):
    """The output of a trained reward model for an episode. It replaces the environment's reward in training,
    which is recorded as the part `environment`."""

    phase: str = ""
    """The phase of this run that trains the reward model (`RewardModel`, `PairRewardModel`). Episodes of that phase and
    of earlier phases keep the environment's reward."""
    path: str = ""
    """Instead of `phase`, the folder of a finished run with such a phase, or a Hugging Face folder of a sequence
    classifier with one label, whose score is read after the last token of the conversation."""
    mean: float | None = None
    """Value subtracted from the reward model's score. None: the mean of its scores for the answers that its training
    ended with, or 0 for a Hugging Face folder, which does not record it."""
    std: Annotated[float | None, Range(above=0)] = None
    """Divisor of the reward model's score after `mean` is subtracted. None: the standard deviation of its scores for
    the answers that its training ended with, or 1 for a Hugging Face folder, which does not record it."""
    clip: Annotated[float | None, Range(above=0)] = None
    """Largest absolute value of the normalised score (None: no limit)."""
    heldout: Literal["environment", "model"] = "environment"
    """Source of the reward that held-out evaluations report."""
    dtype: Dtype | None = None
    """Data type of the computation for a Hugging Face folder; None: float32 on CPU, else bfloat16."""
    mesh: MeshSpec = MeshSpec()
    """Devices that compute the scores."""
    batch_tok: Annotated[int | None, Range(low=1)] = None
    """Tokens of a batch. Rows are padded to a power of two, and each padded length has one compiled program of about
    `batch_tok` tokens; None: 2048 on CPU, else 16384."""

    def __post_init__(self) -> None:
        check_fields(self)
        if bool(self.phase) == bool(self.path):
            raise ConfigError(
                "needs one of phase and path",
                setting="RewardModelScore.phase",
                value=self.phase,
                remedy="name the phase of this run that trains the reward model, or a folder with one",
            )
        if self.phase and self.heldout == "model":
            raise ConfigError(
                "is not possible: before its phase there is no reward model to report",
                setting="RewardModelScore.heldout",
                value=self.heldout,
                remedy="leave it out",
            )

    @property
    def name(self) -> str:
        return PROXY

    def open(self, around: RewardContext) -> ModelScorer:
        if jax.process_count() > 1:
            raise ConfigError(
                f"is not possible in a run of {jax.process_count()} processes: one scores, with its devices alone",
                setting="RewardModelScore",
                remedy="start one process, or put the model behind a server",
            )
        mesh = self.mesh.build()
        self.check(around)
        if self.path and hf.is_classifier(self.path):
            reads = _template_reader(self.path, around)
            return ModelScorer(self, mesh, reads, lambda: self._of_folder(mesh), -1)
        trained = around.trained
        since = trained.check(self.phase, self.path) if trained else -1

        def load() -> TrainedValue:
            assert trained is not None
            return trained.load(mesh, self.phase, self.path)

        return ModelScorer(self, mesh, _before_closing, load, since)

    def check(self, around: RewardContext) -> None:
        if self.path and hf.is_classifier(self.path):
            hf.read_value_config(self.path)
        elif self.path and not (Path(self.path) / "config.gin").is_file():
            is_folder = (Path(self.path) / "config.json").is_file()
            raise ConfigError(
                "is a Hugging Face folder of no sequence classifier" if is_folder else "is neither kind of folder",
                setting="RewardModelScore.path",
                value=self.path,
                remedy="name a run folder, or a folder whose config.json has an architecture like "
                "Qwen3ForSequenceClassification; " + folder_remedy(self.path),
            )
        elif around.trained is not None:
            around.trained.check(self.phase, self.path)

    def _of_folder(self, mesh: Mesh) -> TrainedValue:
        dtype = self.dtype or ("float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16")
        model = ValueModel(Model(hf.read_value_config(self.path), dtype))
        shardings = param_shardings(mesh, model.axes(), model.abstract(), owner="RewardModelScore.mesh")
        return TrainedValue(model, hf.load_value(self.path, model, shardings))


class ModelScorer:
    """An open reward model; its weights are loaded when the first episode is scored.

    Args:
      reads: returns the row of tokens that it reads of an episode; may block. load: loads the model. since: index of
      the phase after which the model exists.
    """

    def __init__(
        self,
        cfg: RewardModelScore,
        mesh: Mesh,
        reads: Callable[[Task, Trajectory], np.ndarray],
        load: Callable[[], TrainedValue],
        since: int,
    ) -> None:
        self._cfg, self._mesh, self._reads, self._load, self._since = cfg, mesh, reads, load, since
        self._loading: asyncio.Task[None] | None = None
        self._rows: RowScores | None = None
        self._shift, self._scale = 0.0, 1.0
        self._counts: collections.Counter[str] = collections.Counter()

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode; see `rewards.base.Scorer`."""
        stream, reference = trajectory.key.stream, {REFERENCE: trajectory.reward}
        if stream == EVAL_STREAM and self._cfg.heldout == "environment" or stream <= self._since:
            by_turn = tuple(turn.reward for turn in trajectory.turns)
            return Reward(trajectory.reward, reference, by_turn=by_turn)
        if not trajectory.turns:
            raise EnvError("an episode without an answer", stage="reward")
        self._counts["calls"] += 1
        rows = await self._opened()
        raw = await rows.score(await asyncio.to_thread(self._reads, task, trajectory))
        value = (raw - self._shift) / self._scale
        if self._cfg.clip is not None:
            value = min(max(value, -self._cfg.clip), self._cfg.clip)
        return Reward(value, {PROXY: raw, **reference})

    async def _opened(self) -> RowScores:
        """Load the rows of the model once."""
        if self._rows is None:
            if self._loading is None:
                self._loading = asyncio.ensure_future(asyncio.to_thread(self._open))
            await asyncio.shield(self._loading)
        assert self._rows is not None
        return self._rows

    def _open(self) -> None:
        with boundary(InfraError, "loading the reward model"):
            value = self._load()
        cfg = self._cfg
        self._shift = value.mean if cfg.mean is None else cfg.mean
        self._scale = value.std if cfg.std is None else cfg.std
        self._rows = RowScores(value, self._mesh, cfg.batch_tok)

    def counts(self) -> Mapping[str, int]:
        """Return the number of episodes that the model scored, and of the batches this took."""
        return {**self._counts, "batches": self._rows.batches if self._rows else 0}

    async def close(self) -> None:
        """Release weights and thread."""
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._rows is not None:
            self._rows.close()


# ---- what the model reads -------------------------------------------------------------------------------------------


def _sequence(trajectory: Trajectory) -> np.ndarray:
    """Return the tokens of an episode `[T]`; where its stream was restarted, only the tokens since then."""
    return trajectory.stream()[0][trajectory.starts[-1] :]


def _before_closing(task: Task, trajectory: Trajectory) -> np.ndarray:
    """Return the input that our own reward models are trained on: all tokens but the last."""
    return _sequence(trajectory)[:-1]


def _template_reader(folder: str, around: RewardContext) -> Callable[[Task, Trajectory], np.ndarray]:
    """Return the input of a sequence classifier: the conversation, closed by its chat template.

    If it has all tokens of the policy under the same ids, they are read as they were sampled; else the texts are put
    through its own template, which only episodes of one turn allow.
    """
    theirs, ours = load_tokenizer(folder), around.chat
    if ours is not None and ours.tokenizer.get_vocab().items() <= theirs.get_vocab().items():
        closing = np.array(ours.closing_ids, np.int32)

        def as_sampled(task: Task, trajectory: Trajectory) -> np.ndarray:
            tokens = _sequence(trajectory)
            return np.concatenate([tokens, closing[int(tokens[-1] in ours.stop_ids) :]])

        return as_sampled
    if around.env.max_turns > 1:
        raise ConfigError(
            "has another vocabulary than the policy, and the episodes have several turns",
            setting="RewardModelScore.path",
            value=folder,
            remedy="choose a reward model that shares the policy's tokenizer",
        )
    chat = Chat(theirs)

    def as_texts(task: Task, trajectory: Trajectory) -> np.ndarray:
        return chat.complete_ids((*_opening(around.env, task), Message("assistant", trajectory.turns[0].text)))

    return as_texts


def _opening(env: EnvSpec, task: Task) -> tuple[Message, ...]:
    """Return the first prompt of the policy: the same for every episode of a task."""
    with boundary(EnvError, f"{env.name}, task {task.index}"):
        episode = env.make()
        try:
            return episode.reset(task)
        finally:
            episode.close()
