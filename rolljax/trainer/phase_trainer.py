"""The trainer of one phase: from trajectories to the next state. `PhaseTrainer.step` reads from top to bottom.

    trajectories -> samples, Episodes -> log-probs, values -> credit -> pack -> update critics -> update policy

`PhaseTrainer` holds the phase's programs and nothing that changes: training state and algorithm state go in and come
out.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rolljax.errors import TrainerError
from rolljax.metrics import NAMES, MetricsReport
from rolljax.model.decoder import Model, Params
from rolljax.model.value import ValueModel
from rolljax.trainer.algorithms.base import Algorithm, AlgorithmState
from rolljax.trainer.batch import MAX_SAMPLERS, Packed, PackShape, Sample, TokenBatch, pack
from rolljax.trainer.contexts import in_context
from rolljax.trainer.credit.emptiness import could_teach
from rolljax.trainer.credit.episodes import Credit, Episodes, apply_credit, credit_metrics, token_columns
from rolljax.trainer.critic import Critic
from rolljax.trainer.forward import without_experts
from rolljax.trainer.forward_passes import ForwardPasses
from rolljax.trainer.mesh import PlacedBatch
from rolljax.trainer.optimizer import Optimizer
from rolljax.trainer.state import CriticSettings, StateBuilder, TrainState
from rolljax.trainer.update import ReferencePolicies, make_critic_update, make_policy_update
from rolljax.types import Key, SamplerGap, TokenColumn, Trajectory

MetricsRow = dict[str, float]
"""Numbers by the names of `metrics.NAMES`."""
Samples = Sequence[Sequence[Sample]]
"""Samples by group, and in it by sibling."""


class NotFinite(TrainerError):
    """A loss or gradient was not finite. `batch` is its batch, on the host (NumPy): the error may cross processes."""

    def __init__(self, message: str, batch: TokenBatch) -> None:
        super().__init__(message)
        self.batch = batch

    def __reduce__(self) -> tuple[type[NotFinite], tuple[str, TokenBatch]]:
        return NotFinite, (str(self), self.batch)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedStep:
    """The result of a training step, in addition to the new state: the numbers that the algorithm carries to the next
    step, metrics, the number of groups that were trained, and columns of each trajectory
    (`credit.episodes.token_columns`)."""

    algorithm_state: AlgorithmState
    row: MetricsRow
    num_trained: int
    columns: Mapping[Key, Mapping[str, TokenColumn]] = dataclasses.field(default_factory=dict)
    gaps: Mapping[str, SamplerGap] = dataclasses.field(default_factory=dict)
    """By name of the sampler, if samplers are compared."""


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseTrainer:
    """The programs of one phase."""

    mesh: Mesh
    model: Model
    algorithm: Algorithm
    optimizer: Optimizer
    shape: PackShape
    """Fixed shape that holds one update's share of a full step's groups."""
    steps: int
    """Number of steps; sets the number of updates for the schedule."""
    groups_per_step: int
    """Number of groups of a full step."""
    updates_per_step: int = 1
    """Number of updates per step, for the schedule and for distributing groups."""
    epochs: int = 1
    """Number of passes over each step's data; sets the number of updates for the schedule."""
    temperature: float = 1.0
    limit_tok: int = 1
    seed: int = 0
    references: ReferencePolicies = dataclasses.field(default_factory=dict)
    """The policies that `algorithm.needs().references` names."""
    base: Params | None = None
    """The frozen weights of a model with adapters; the policy's parameters are then its adapters."""
    replay_experts: bool = False
    """Tokens take the experts that they took in the sampler."""
    first_latent_id: int | None = None
    """First token id of latent prefixes (`model.prefixes`); None: there are none."""
    compare_samplers: bool = False
    """Measure each sampler's distance from the trainer (`TrainedStep.gaps`)."""

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(
        self, state: TrainState, groups: Sequence[Sequence[Trajectory]], algorithm_state: AlgorithmState, step: int
    ) -> tuple[TrainState, TrainedStep]:
        """Compute credit and make all updates of a step; return the new state and the step's result.

        Args:
          groups: the trajectories that take part. algorithm_state: from the result of the step before; empty in the
            first step.

        Raises:
          NotFinite: a loss or gradient was not finite. The state is then the one before that update.
          TrainerError: no token of these trajectories could be trained on, regardless of the rewards.
        """
        if not groups:  # not one trajectory survived
            add_updates(report := MetricsReport(), [], [])
            return state, TrainedStep(algorithm_state, report.row(), 0)
        clock = Stopwatch()
        with clock:
            names = sorted({turn.sampler for group in groups for t in group for turn in t.turns} - {""})
            numbers = dict(zip(names, range(1, MAX_SAMPLERS), strict=False)) if self.compare_samplers else None
            samples = [[Sample.of(t, self._unknown_experts, numbers) for t in group] for group in groups]
            batches = self.pack_samples(samples)
            episodes = Episodes.of(groups, limit_tok=self.limit_tok, step=step)
        episodes = self.compute_credit_inputs(state, batches, episodes)
        if self.algorithm.needs().context:
            episodes = self.compute_context_inputs(state, samples, episodes)
        with clock:
            credit = self.algorithm.credit(episodes, algorithm_state)
            kept = apply_credit(self.algorithm.needs(), samples, episodes, credit)
            self._check_signal(kept, episodes, algorithm_state)
            if step == 0:
                state, kept = self._center_critics(state, kept)
            micro_batches = self.pack_micro_batches(kept, self._kl_coef(algorithm_state))
        state, critic_rows = self.update_critics(state, micro_batches, step)
        if self.critic and self.critic.first:  # advantages come from critics that have learned from this step
            episodes = dataclasses.replace(episodes, values=self.compute_values(state, batches, episodes))
            with clock:
                credit = _with_stats_before(credit, self.algorithm.credit(episodes, algorithm_state))
                kept = apply_credit(self.algorithm.needs(), samples, episodes, credit)
                micro_batches = self.pack_micro_batches(kept, self._kl_coef(algorithm_state))
        state, policy_rows, gaps = self.update_policy(state, micro_batches, step)
        report = MetricsReport()
        add_updates(report, micro_batches, critic_rows + policy_rows)
        report.add_row(credit_metrics(episodes, credit))
        report.add("time/pack_s", clock.seconds)
        keys = [t.key for group in groups for t in group]
        columns = dict(zip(keys, token_columns(episodes, credit), strict=True))
        found = _gaps(numbers or {}, gaps)
        return state, TrainedStep(dict(credit.algorithm_state), report.row(), len(kept), columns, found)

    def cross_entropies(self, state: TrainState, groups: Sequence[Sequence[Trajectory]]) -> tuple[float, float]:
        """Return the mean cross-entropy of the trajectories' reference tokens, in nats at temperature 1, under the
        policy and under the teacher that `algorithm.needs().divergence` names."""
        term = self.algorithm.needs().divergence
        assert term is not None, "the algorithm has no teacher"
        own = self.model.full_params(state.params, self.base)
        policies = [(self.model, own), self.references[term.policy]]
        samples = [[Sample.of(t, self._unknown_experts) for t in group] for group in groups]
        size, total, number = -(-self.groups_per_step // self.updates_per_step), np.zeros(2), 0
        for start in range(0, len(samples), size):
            share = samples[start : start + size]
            batch = PlacedBatch(self.mesh, pack(share, self.shape, 1.0, limit_tok=self.limit_tok))
            masks = [s.mask for group in share for s in group]
            number += sum(int(mask.sum()) for mask in masks)
            for k, (model, params) in enumerate(policies):
                placed = batch.on_devices if k == 0 else without_experts(batch.on_devices)
                logps = batch.packed.unpack(self.forward_passes.logprob_program(model)(params, placed))
                total[k] -= sum(logp[mask].sum(dtype=np.float64) for logp, mask in zip(logps, masks, strict=True))
        student, teacher = total / max(number, 1)
        return float(student), float(teacher)

    def compute_credit_inputs(self, state: TrainState, batches: Sequence[PlacedBatch], episodes: Episodes) -> Episodes:
        """Return the episodes with all model outputs that the algorithm needs.

        Args:
          batches: `pack_samples` of the same trajectories.
        """
        if not self._has_forward_passes:
            return episodes
        needs = self.algorithm.needs()
        found = self.forward_passes.compute_logprobs(state.params, batches, episodes.mask)
        if needs.attention:
            found |= self.forward_passes.compute_attention_stats(state.params, batches, episodes.mask)
        if needs.critics:
            found["values"] = self.compute_values(state, batches, episodes)
        return dataclasses.replace(episodes, **found)  # type: ignore[arg-type]

    def compute_context_inputs(self, state: TrainState, samples: Samples, episodes: Episodes) -> Episodes:
        """Return the episodes with the log-probs of their tokens after another prompt (`Needs.context`)."""
        needs = self.algorithm.needs()
        assert needs.context is not None
        moved = in_context(samples, episodes.success, episodes.groups, needs.context)
        size = self.shape.num_micro * self.shape.micro_rows  # each has room in a row of its own
        parts = [moved[start : start + size] for start in range(0, len(moved), size)]
        batches = [PlacedBatch(self.mesh, pack([[s] for s in p], self.shape, self.temperature)) for p in parts]
        found = self.forward_passes.compute_context_logprobs(state.params, batches, episodes.mask)
        return dataclasses.replace(episodes, **found)  # type: ignore[arg-type]

    def compute_values(self, state: TrainState, batches: Sequence[PlacedBatch], episodes: Episodes) -> np.ndarray:
        """Compute the values `[critics, N, T]` of the state before every token."""
        assert state.critics is not None
        return self.forward_passes.compute_values(state.critics.params, batches, episodes.mask)

    def pack_samples(self, samples: Samples) -> list[PlacedBatch]:
        """Pack all samples for forward passes, in batches of this phase's shape; none if the algorithm needs none.

        If groups stay together, the shape only has room for pairs, so groups are split into pairs. That is correct,
        because log-probs of a sample do not depend on its neighbours in a row.
        """
        if not self._has_forward_passes:
            return []
        if self.algorithm.unsplit_groups:
            samples = [group[i : i + 2] for group in samples for i in range(0, len(group), 2)]
        size = -(-self.groups_per_step // self.updates_per_step)
        shares = [samples[start : start + size] for start in range(0, len(samples), size)]
        return [PlacedBatch(self.mesh, self.pack(share)) for share in shares]

    def pack_micro_batches(self, kept: Samples, kl_coef: float = 0.0) -> list[PlacedBatch]:
        """Pack samples with their credit into the micro-batches of each of a step's updates."""
        shares = [kept[u :: self.updates_per_step] for u in range(min(self.updates_per_step, len(kept)))]
        return [PlacedBatch(self.mesh, self.pack(share, kl_coef)) for share in shares]

    def update_critics(
        self, state: TrainState, batches: Sequence[PlacedBatch], step: int
    ) -> tuple[TrainState, list[MetricsRow]]:
        """Apply a step's updates of the critics, if there are any; return the metrics of each."""
        rows: list[MetricsRow] = []
        for _ in range(self.critic.epochs if self.critic else 0):
            for batch in batches:
                critics, stats = self.critic_update(state.critics, batch.on_devices, self.base)
                state = dataclasses.replace(state, critics=critics)
                rows.append(_checked(stats, "critic", batch.host, step))
        return state, rows

    def update_policy(
        self, state: TrainState, batches: Sequence[PlacedBatch], step: int
    ) -> tuple[TrainState, list[MetricsRow], np.ndarray]:
        """Apply a step's updates of the policy, none while only critics learn.

        Returns:
          The state, the metrics of each update, and `update.sampler_gaps` of the first one.
        """
        rows: list[MetricsRow] = []
        gaps = np.zeros((MAX_SAMPLERS, 2))
        if not self.algorithm.trains_policy or (self.critic and step < self.critic.warmup_steps):
            return state, rows, gaps
        references = {name: params for name, (_, params) in self.references.items()}
        for _ in range(self.epochs):
            for batch in batches:
                policy, stats = self.policy_update(state.policy, batch.on_devices, references, self.base)
                state = dataclasses.replace(state, policy=policy)
                found = stats.pop("sampler_gaps", None)
                if found is not None and not rows:
                    gaps = jax.device_get(found)
                rows.append(_checked(stats, "optim", batch.host, step))
        return state, rows, gaps

    def pack(self, groups: Samples, kl_coef: float = 0.0) -> Packed:
        """Pack the rows of one update."""
        return pack(
            groups,
            self.shape,
            self.temperature,
            aggregation=self.algorithm.aggregation,
            limit_tok=self.limit_tok,
            kl_coef=kl_coef,
            unsplit_groups=self.algorithm.unsplit_groups,
            first_latent_id=self.first_latent_id,
        )

    def _kl_coef(self, algorithm_state: AlgorithmState) -> float:
        return algorithm_state.get("kl_coef", self.algorithm.kl_coef)

    def _check_signal(self, kept: Samples, episodes: Episodes, algorithm_state: AlgorithmState) -> None:
        if not kept and not could_teach(self.algorithm, episodes, algorithm_state):
            raise TrainerError(
                f"step {episodes.step + 1} of the phase: {type(self.algorithm).__name__} leaves out all {episodes.num} "
                "trajectories, and would whatever their rewards: look at its filters, at the weights of recorded turns "
                "and at what its teachers teach"
            )

    def _center_critics(self, state: TrainState, kept: list[list[Sample]]) -> tuple[TrainState, list[list[Sample]]]:
        """Shift new critics by the mean return of their first samples, so that their values do not start from 0."""
        fresh = self.critic is not None and self.critic.model != "previous" and self.algorithm.trains_policy
        if not fresh or not kept or state.critics is None:
            return state, kept
        mean = np.concatenate([s.columns["returns"][s.mask] for group in kept for s in group]).mean()
        params = state.critics.params
        bias = params["value"]["b"]
        bias = jax.device_put(bias + float(mean), bias.sharding)
        params = {**params, "value": {**params["value"], "b": bias}}
        state = dataclasses.replace(state, critics=dataclasses.replace(state.critics, params=params))
        moved = [[s.with_columns(old_values_C=s.columns["old_values_C"] + mean) for s in group] for group in kept]
        return state, moved

    @property
    def _unknown_experts(self) -> np.ndarray | None:
        """Expert ids of tokens whose experts were not recorded, for `Sample.of`; None: no experts are replayed."""
        routing = self.model.cfg.routing
        if routing is None or not self.replay_experts:
            return None
        return np.full((self.model.cfg.num_layers, routing.per_token), -1, routing.dtype)

    # ---- the state --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def states(self) -> StateBuilder:
        """Makes the phase's states, their shapes and their shardings."""
        critics = CriticSettings(self.critic, self.value_model, self.num_critic_updates) if self.critic else None
        return StateBuilder(self.mesh, self.model, self.optimizer, self.num_updates, critics, self.seed)

    @property
    def critic(self) -> Critic | None:
        return self.algorithm.needs().critics

    @property
    def num_updates(self) -> int:
        """Updates of the policy in the whole phase."""
        return self.steps * self.updates_per_step * self.epochs

    @property
    def num_critic_updates(self) -> int:
        """Updates of the critics in the whole phase."""
        return self.steps * self.updates_per_step * (self.critic.epochs if self.critic else 0)

    # ---- the programs -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def value_model(self) -> ValueModel:
        """The model of every critic."""
        assert self.critic is not None
        return self.critic.value_model(self.model)

    @functools.cached_property
    def _has_forward_passes(self) -> bool:
        return self.algorithm.needs().forward_passes

    @functools.cached_property
    def forward_passes(self) -> ForwardPasses:
        value_model = self.value_model if self.critic else None
        return ForwardPasses(
            self.mesh, self.model, self.algorithm.needs(), self.references, value_model=value_model, base=self.base
        )

    @functools.cached_property
    def policy_update(self) -> jax.stages.Wrapped:
        """See `update.make_policy_update`."""
        models = {name: model for name, (model, _) in self.references.items()}
        return make_policy_update(
            self.mesh,
            self.model,
            self.algorithm,
            self.optimizer,
            self.num_updates,
            self.states.shardings.policy,
            models,
        )

    @functools.cached_property
    def critic_update(self) -> jax.stages.Wrapped:
        """See `update.make_critic_update`."""
        assert self.critic is not None and self.states.shardings.critics is not None
        return make_critic_update(
            self.mesh,
            self.value_model,
            self.algorithm,
            self.critic,
            self.num_critic_updates,
            self.states.shardings.critics,
        )


class Stopwatch:
    """Seconds spent in its `with` blocks, all together."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def _checked(stats: Mapping[str, jax.Array], part: str, batch: TokenBatch, step: int) -> MetricsRow:
    """Return the metrics of an update of the policy (`part` is `optim`) or of the critics (`critic`). Raise
    `NotFinite`."""
    row = {k: float(v) for k, v in jax.device_get(dict(stats)).items()}
    if not row.pop(f"{part}/finite"):
        loss = row["loss/total" if part == "optim" else "critic/loss"]
        raise NotFinite(
            f"step {step + 1} of the phase, {part}: loss {loss}, gradient norm {row[f'{part}/grad_norm']}", batch
        )
    return {k: v for k, v in row.items() if k in NAMES}


def _gaps(numbers: Mapping[str, int], gaps: np.ndarray) -> dict[str, SamplerGap]:
    """Return the gap of each sampler with a trained token. gaps: sums and numbers of tokens, `[S, 2]`."""
    each = ((name, *gaps[number].tolist()) for name, number in numbers.items())
    return {name: SamplerGap(total / tokens, int(tokens)) for name, total, tokens in each if tokens}


def _with_stats_before(before: Credit, after: Credit) -> Credit:
    """Return `after` with the explained variance of `before`, measured before the critics learned from this step."""
    kept = {name: value for name, value in before.stats.items() if name == "critic/explained_var"}
    return dataclasses.replace(after, stats={**after.stats, **kept})


def add_updates(report: MetricsReport, batches: Sequence[PlacedBatch], rows: Sequence[MetricsRow]) -> None:
    """Add the metrics of a step's updates, from its batches and from each update's own metrics."""
    for row in rows:
        report.add_row(row)
    packed = [batch.host for batch in batches]
    filled = sum(int((b.segment_ids > 0).sum()) for b in packed)
    computed = sum(int(b.num_micro) * b.tokens.shape[1] * b.tokens.shape[2] for b in packed)
    report.add("optim/updates_n", float(sum("optim/grad_norm" in r for r in rows)))
    report.add("train/tokens_n", float(filled))
    report.add("train/trained_tok_n", float(sum(float(b.num_tokens) for b in packed)))
    report.add("train/sequences_n", float(sum(float(b.num_sequences) for b in packed)))
    report.add("train/pack_frac", filled / max(computed, 1))
