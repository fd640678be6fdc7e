"""The types that rooms pass to each other, in the order of the data flow. NumPy only: no jax, no gin.

    Task -> Env -> Sampler -> Turn* -> Trajectory -> Group -> TokenBatch -> loss -> TrainState
         ^                                                                              |
         +------------------------------ weights (version) -----------------------------+

`TokenBatch` and `TrainState` live on devices; they are in `rolljax.trainer.batch` and `rolljax.trainer.state`.
Everything here is a frozen dataclass. `to_json` gives its form on disk, under `SCHEMA_VERSION`. Log-probs are natural
logs in float32; their names tell whether the sampler or the trainer computed them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

SCHEMA_VERSION = 1

Status = Literal["ok", "truncated", "failed"]
FaultKind = Literal["infra", "env", "agent", "limit"]
FinishReason = Literal["stop", "length", "context", "abort"]
TokenColumn = float | list[float | None] | None
"""A number for each sampled token of a trajectory; a single number if all are equal. None: not used in training."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as chat templates know it."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One start state. Tasks with equal `content` are the same task; its hash is the identity and decides the split.

    `index` addresses the task in its environment: `env.task(index)` makes it again, anywhere.
    """

    env: str
    index: int
    content: str

    @property
    def id(self) -> str:
        """16 hex digits of the SHA-256 of environment name and content."""
        return hashlib.sha256(f"{self.env}\0{self.content}".encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """The reason why an episode is not "ok"."""

    kind: FaultKind
    """Infra (machine, worker, sandbox, server, sampler), env (the environment itself), agent (the policy's actions),
    limit (tokens, turns, wall clock). After the first two the episode is "failed" and takes no part in credit. So is an
    episode that ran out of time, because its policy and its environment share the time. After any other fault it is
    "truncated" and does take part."""
    stage: str
    """Reset, step, sample, ..."""
    detail: str
    """Description of the fault for a human reader."""
    retryable: bool = False
    """The same episode may be tried again from its start."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.stage}): {self.detail}" if self.stage else f"{self.kind}: {self.detail}"


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The address of a trajectory. With the run's seed it is also the address of its randomness."""

    stream: int
    """0: training rollouts of the first phase, 1: of the second, ...; evaluations use `EVAL_STREAM`."""
    prompt_index: int
    """Position of the trajectory's task in the task stream, independent of the step that trains it."""
    sibling: int


EXPERT = -1
"""Policy version of tokens that no policy sampled."""
EVAL_STREAM = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Temperature 0 is greedy (its log-probs are those of temperature 1).

    The sampling distribution: logits over temperature, then only the `top_k` largest (0: all), then the smallest set of
    them that holds `top_p` of the probability, then those with at least `min_p` times the largest probability;
    renormalised.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer (they are part of it)."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, at the token that completes such a text."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_logprobs: int = 0
    """Report this many most likely tokens for every sampled token."""

    @property
    def truncates(self) -> bool:
        """Return whether tokens are left out of the sampling distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """Tokens as they were sampled; arrays `[T]`, one entry per token, stop token included."""

    tokens: np.ndarray
    sampler_logp: np.ndarray
    """Log-prob under the sampling distribution."""
    model_logp: np.ndarray
    """Log-prob under the model's own distribution (temperature 1, no tokens left out)."""
    versions: np.ndarray
    """Policy version that sampled the token. The `top_` arrays `[T, n]` hold the most likely tokens of every position,
    largest first, and their log-probs under either (-inf: left out of sampling). experts `[T, L, k]`: experts that the
    token before was routed to when this one was sampled, in every layer (-1: it came from a prefill; `[T, 0, 0]`: not
    recorded, see `SamplerConfig.record_experts`)."""
    top_ids: np.ndarray
    top_sampler_logp: np.ndarray
    top_model_logp: np.ndarray
    experts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Sampled:
        return Sampled(*(array[part] for array in _ARRAYS(self)))

    @staticmethod
    def concatenate(parts: Sequence[Sampled]) -> Sampled:
        """Join the pieces of one answer, in their order."""
        if len(parts) == 1:
            return parts[0]
        return Sampled(*(np.concatenate(arrays) for arrays in zip(*map(_ARRAYS, parts), strict=True)))

    @staticmethod
    def of(tokens: np.ndarray, logp: np.ndarray, versions: np.ndarray) -> Sampled:
        """Make a record of tokens whose two distributions are equal, without alternatives."""
        none = np.zeros((len(tokens), 0))
        return Sampled(tokens, logp, logp, versions, none.astype(np.int32), none, none, none[..., None][:, :, :0])


_ARRAYS = operator.attrgetter(*(field.name for field in dataclasses.fields(Sampled)))
"""Returns all arrays of a `Sampled`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """The most likely tokens at every position of an answer, most likely first; they may include the sampled token."""

    ids: np.ndarray
    """Ids of the most likely tokens at every position, `[T, n]`."""
    logp: np.ndarray
    """`[T, n]` under the sampling distribution, nats; tokens that were left out of sampling have the lowest finite
    number."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The sampler's result for one request."""

    sampled: Sampled
    finish_reason: FinishReason
    queue_s: float = 0.0
    """Seconds until the first token was sampled."""
    sample_s: float = 0.0
    cached_tok: int = 0
    """Prompt tokens whose keys and values were in the cache."""
    sampler: str = ""
    """Name of the sampler in another process that sampled all of it; empty: the sampler of this process, or several."""

    @property
    def tokens(self) -> np.ndarray:
        """Sampled tokens `[T]`, stop token included."""
        return self.sampled.tokens

    @property
    def sampler_logp(self) -> np.ndarray:
        """Log-prob of each token under the sampling distribution, `[T]`, nats."""
        return self.sampled.sampler_logp

    @property
    def versions(self) -> np.ndarray:
        """Policy version that sampled each token, `[T]`."""
        return self.sampled.versions

    @property
    def is_sampled(self) -> bool:
        """Return whether a policy sampled every token (none was replayed)."""
        return bool((self.versions >= 0).all())

    @property
    def experts(self) -> np.ndarray | None:
        """Experts that each token itself was routed to, `[T, L, k]`; -1: not known (the last token was never computed).
        None: not recorded."""
        before = self.sampled.experts
        if not before.size:
            return None
        return np.concatenate([before[1:], np.full_like(before[:1], -1)])

    @property
    def alternatives(self) -> Alternatives | None:
        """The most likely tokens at every position. None: not recorded, see `SamplerConfig.record_alternatives`."""
        ids, logp = self.sampled.top_ids, self.sampled.top_sampler_logp
        return Alternatives(ids, np.maximum(logp, np.finfo(np.float32).min)) if ids.size else None


@dataclasses.dataclass(frozen=True, slots=True)
class SamplerGap:
    """Distance of a sampler's log-probs from the trainer's."""

    mean_nat: float
    """Mean of |trainer_logp - sampler_logp| over its tokens, before that update."""
    tokens: int
    """Number of its tokens in the first update of a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainedSampler:
    """A sampler that gets no more requests, because its log-probs are too far from the trainer's."""

    sampler: str
    gap_nat: float
    others_gap_nat: float
    """The median of the other samplers."""
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answer of the policy, and the prompt tokens that are new since its previous answer.

    `prompt_ids [P]` are only the tokens since the previous turn's last sampled token, so that the token stream of a
    trajectory is the plain concatenation of its turns: sampled ids are never tokenised again.
    """

    prompt_ids: np.ndarray
    tokens: np.ndarray
    sampler_logp: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    reward: float
    text: str
    weight: float = 1.0
    """Weight of the turn's loss in supervised training; 0 excludes a turn of a recorded conversation."""
    restart: bool = False
    """A new sequence starts with this turn, and `prompt_ids` is its whole prompt, because the conversation was cut or
    this is a second one. The trajectory is then several sequences to the model, and still one episode to credit."""
    experts: np.ndarray | None = dataclasses.field(default=None, metadata={"written": False})
    """See `Completion`. Not written to disk: they are too large."""
    alternatives: Alternatives | None = None
    """See `Completion`. Only shown to people."""
    sampler: str = ""
    """See `Completion`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expert:
    """A recorded episode whose first turns others replay."""

    id: str
    """A hash of the episode's text."""
    turns: int
    """Number of turns of the whole episode."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode: its turns, its reward by named parts, how it ended, and whose fault it was."""

    key: Key
    task: Task
    turns: tuple[Turn, ...]
    reward: float
    reward_parts: Mapping[str, float]
    success: bool
    status: Status
    fault: Fault | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers of the environment, summed over the turns."""
    observation_hashes: tuple[str, ...] | None = None
    """A hash of the environment's messages at the opening and after each turn. None: expert starts do not need it."""
    attempts: int = 1
    """The number of starts; more than 1 after faults of the infrastructure."""
    loops: int = 0
    """Number of attempts that were discarded because the policy repeated itself without effect."""
    expert: Expert | None = None
    """The expert episode whose first turns were replayed before the policy took over; may be zero turns."""
    env_s: float = 0.0
    sample_s: float = 0.0
    trained: Mapping[str, TokenColumn] | None = None
    """Training results of the sampled tokens, by column; None if the trainer did not receive the trajectory."""
    reference: str | None = None
    """The reference answer of the task (`EnvSpec.reference`); only for display."""

    @property
    def lost(self) -> bool:
        """Return whether the trajectory failed for another reason than the policy's own loops."""
        return self.status == "failed" and not (self.fault and self.fault.kind == "agent")

    @property
    def tampered(self) -> bool:
        """Return whether the environment saw the policy tamper with its task (its metric `tamper_n`)."""
        return self.metrics.get("tamper_n", 0) > 0

    @property
    def num_sampled_tok(self) -> int:
        """Tokens that the policy sampled, of all turns."""
        return sum(len(t.tokens) for t in self.turns)

    @property
    def num_replayed(self) -> int:
        """Turns of an expert that were replayed at the start of the episode."""
        return sum(bool(len(t.versions)) and bool((t.versions < 0).all()) for t in self.turns)

    @property
    def starts(self) -> np.ndarray:
        """Index in `stream()` of the first token of each sequence: 0, and every turn that restarts; int64 `[S]`."""
        sizes = [len(t.prompt_ids) + len(t.tokens) for t in self.turns]
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        return begins[[i == 0 or t.restart for i, t in enumerate(self.turns)]]

    def stream(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, `sampled` mask and sampler log-probs (0 if not sampled) of the whole episode, each `[T]`."""
        tokens, sampled, logp = [], [], []
        for turn in self.turns:
            tokens += [turn.prompt_ids, turn.tokens]
            sampled += [np.zeros(len(turn.prompt_ids), bool), np.ones(len(turn.tokens), bool)]
            logp += [np.zeros(len(turn.prompt_ids), np.float32), turn.sampler_logp]
        return (
            np.concatenate(tokens).astype(np.int32),
            np.concatenate(sampled),
            np.concatenate(logp).astype(np.float32),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a record of everything above for JSON: one line of `rollouts/step_N.jsonl`."""
        return {"schema": SCHEMA_VERSION, **_plain(self)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Trajectory:
        """Return the trajectory of a record that `to_json` made."""
        fields = {name: value for name, value in record.items() if name != "schema"}
        hashes = fields["observation_hashes"]
        return Trajectory(
            **fields
            | {
                "key": Key(**fields["key"]),
                "task": Task(**fields["task"]),
                "turns": tuple(map(_turn, fields["turns"])),
                "fault": fields["fault"] and Fault(**fields["fault"]),
                "expert": fields["expert"] and Expert(**fields["expert"]),
                "observation_hashes": None if hashes is None else tuple(hashes),
            }
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Trajectories of the same start: the unit of credit and of dropping."""

    task: Task
    prompt_index: int
    trajectories: tuple[Trajectory, ...]
    cancelled: int = 0
    """Spare episodes that were cancelled when enough others were complete."""
    demonstration: Trajectory | None = None
    """The expert's turns, to imitate because all trajectories failed; not played (`rollout.start_states.fallback`)."""

    @property
    def rewards(self) -> np.ndarray:
        """Rewards of the trajectories, in their order."""
        return np.array([t.reward for t in self.trajectories], np.float32)

    def to_json(self) -> dict[str, Any]:
        """Return a record of everything for JSON, without the fields that are not written (`Turn.experts`)."""
        return {"schema": SCHEMA_VERSION, **_plain(self)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Group:
        """Return the group of a record that `to_json` made."""
        shown = record["demonstration"]
        return Group(
            Task(**record["task"]),
            record["prompt_index"],
            tuple(map(Trajectory.from_json, record["trajectories"])),
            record["cancelled"],
            shown and Trajectory.from_json(shown),
        )


def _turn(record: Mapping[str, Any]) -> Turn:
    dtypes = {"prompt_ids": np.int32, "tokens": np.int32, "sampler_logp": np.float32, "versions": np.int32}
    fields = dict(record) | {name: np.array(record[name], dtype) for name, dtype in dtypes.items()}
    if found := record.get("alternatives"):
        fields["alternatives"] = Alternatives(np.array(found["ids"], np.int32), np.array(found["logp"], np.float32))
    return Turn(**fields)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        written = (f.name for f in dataclasses.fields(value) if f.metadata.get("written", True))
        return {name: _plain(getattr(value, name)) for name in written}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(v) for v in value]
    return value
