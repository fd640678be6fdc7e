"""The trainer of one phase: from trajectories to the next state.

    trajectories -> Episodes -> read what the algorithm needs -> credit -> pack -> updates

`PhaseTrainer` holds the phase's programs and nothing that changes: state and carry go in and come out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rolljax.errors import TrainerError
from rolljax.metrics import NAMES, reduce_parts
from rolljax.model.axes import on_mesh
from rolljax.model.decoder import DecoderConfig, Model, Params
from rolljax.model.lora import Base
from rolljax.model.value import ValueModel
from rolljax.trainer import attention_stats
from rolljax.trainer.algorithms.base import Algorithm, Carry
from rolljax.trainer.batch import Packed, PackShape, Sample, TokenBatch, pack
from rolljax.trainer.credit import estimators
from rolljax.trainer.credit.emptiness import could_teach
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.critic import Critic
from rolljax.trainer.forward import Split, read_policy, read_values, unchosen
from rolljax.trainer.mesh import param_shardings, put, replicated, rows
from rolljax.trainer.optimizer import Optimizer, opt_state_shardings
from rolljax.trainer.state import ParamState, TrainState
from rolljax.trainer.update import ReferencePolicies, make_critic_update, make_policy_update, put_batch
from rolljax.types import Trajectory

Row = dict[str, float]
Groups = Sequence[Sequence[Trajectory]]


class NotFinite(TrainerError):
    """A loss or gradient was not finite. `batch` is what it came from."""

    def __init__(self, message: str, batch: TokenBatch) -> None:
        super().__init__(message)
        self.batch = batch


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What a step made: the state, what the algorithm carries on, metrics, and how many groups were trained on."""

    state: TrainState
    carry: Carry
    row: Row
    num_trained: int


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseTrainer:
    """The programs of one phase.

    steps, updates_per_step, epochs: how many updates there will be, for the schedule and for dealing out groups.
    groups_per_step, shape: groups of a full step, and the fixed shape that holds one update's share of them.
    references: the policies that `algorithm.needs().references` names. base: the frozen weights of a model with
      adapters; the policy's parameters are then its adapters. replay_experts: tokens take the experts that they took
      in the sampler.
    """

    mesh: Mesh
    model: Model
    algorithm: Algorithm
    optimizer: Optimizer
    shape: PackShape
    steps: int
    groups_per_step: int
    updates_per_step: int = 1
    epochs: int = 1
    temperature: float = 1.0
    limit_tok: int = 1
    seed: int = 0
    references: ReferencePolicies = dataclasses.field(default_factory=dict)
    base: Base | None = None
    replay_experts: bool = False

    @property
    def _unknown_experts(self) -> np.ndarray | None:
        """What `Sample.of` takes for tokens whose experts nobody recorded; None: none are replayed."""
        routing = self.model.cfg.routing
        if routing is None or not self.replay_experts:
            return None
        return np.full((self.model.cfg.num_layers, routing.per_token), -1, routing.dtype)

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def critic(self) -> Critic | None:
        return self.algorithm.needs().critics

    @functools.cached_property
    def value_model(self) -> ValueModel:
        """What every critic is: of a shape of its own, all of its weights are trained; of the policy's, what is trained
        of the policy."""
        assert self.critic is not None
        shape = self.critic.model
        if isinstance(shape, DecoderConfig):
            return ValueModel(dataclasses.replace(self.model.plain, cfg=shape))
        return ValueModel(self.model)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where every leaf of the state lives: optimizer moments beside the parameters they belong to."""
        policy = self._learned(self.optimizer, self.num_updates, self.model)
        critics = None
        if self.critic:
            critics = self._learned(self.critic.optimizer, self.num_critic_updates, self.value_model, self.critic.num)
        return TrainState(policy, critics)

    def _learned(self, optimizer: Optimizer, updates: int, model: Model | ValueModel, stack: int = 0) -> ParamState:
        abstract, axes = model.abstract(), model.axes()
        if stack:
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct((stack, *x.shape), x.dtype), abstract)
            axes = jax.tree.map(lambda a: ("critics", *a), axes, is_leaf=lambda a: isinstance(a, tuple))
        params = param_shardings(self.mesh, axes, abstract)
        tx = optimizer.build(updates)
        return ParamState(
            params,
            optimizer.host_shardings(
                opt_state_shardings(self.mesh, jax.vmap(tx.init) if stack else tx.init, abstract, params)
            ),
            replicated(self.mesh),  # type: ignore[arg-type]
        )

    def full_params(self, params: Params) -> Params:
        """The policy's parameters as `Model.bind` takes them: beside the frozen weights, if there are any."""
        return self.model.full_params(params, self.base)

    @property
    def num_updates(self) -> int:
        """Updates of the policy in the whole phase."""
        return self.steps * self.updates_per_step * self.epochs

    @property
    def num_critic_updates(self) -> int:
        return self.steps * self.updates_per_step * (self.critic.epochs if self.critic else 0)

    def init(self, params: Params, previous: ParamState | None = None) -> TrainState:
        """A fresh state around the policy's `params`.

        Args:
          previous: the critics of the phase before, for `Critic.model = 'previous'`.
        """
        tx = self.optimizer.build(self.num_updates)
        make = lambda p: ParamState(p, tx.init(p), jnp.zeros((), jnp.int32))  # noqa: E731
        params = jax.device_put(params, self.shardings.policy.params)
        policy = jax.jit(make, out_shardings=self.shardings.policy)(params)
        return TrainState(policy, self._init_critics(params, previous) if self.critic else None)

    def _init_critics(self, params: Params, previous: ParamState | None) -> ParamState:
        settings, shardings = self.critic, self.shardings.critics
        assert settings is not None and shardings is not None
        tx = settings.optimizer.build(self.num_critic_updates)
        seeds = range(self.seed, self.seed + settings.num)

        def make(params: Params, previous: Params | None) -> ParamState:
            if previous is None:
                trunk = params if settings.model is None else None
                each = [self.value_model.init(seed, trunk) for seed in seeds]
                previous = jax.tree.map(lambda *x: jnp.stack(x), *each)
            count = jnp.zeros((settings.num,), jnp.int32)
            return ParamState(previous, jax.vmap(tx.init)(previous), count)

        if settings.model == "previous" and previous is None:
            raise TrainerError("Critic.model = 'previous', but the phase before has no critics")
        kept = previous.params if settings.model == "previous" and previous is not None else None
        return jax.jit(make, out_shardings=shardings)(params, kept)

    def abstract(self) -> TrainState:
        """Shapes and dtypes of the state."""
        like = self.model.abstract()
        kept = None
        if self.critic and self.critic.model == "previous":
            kept = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((self.critic.num, *x.shape), x.dtype),  # type: ignore[union-attr]
                self.value_model.abstract(),
            )
        count = jax.ShapeDtypeStruct((), jnp.int32)
        tx = self.optimizer.build(self.num_updates)
        policy = ParamState(like, jax.eval_shape(tx.init, like), count)  # type: ignore[arg-type]
        previous = ParamState(kept, None, count) if kept is not None else None  # type: ignore[arg-type]
        critics = jax.eval_shape(self._init_critics, like, previous) if self.critic else None
        return TrainState(policy, critics)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, groups: Groups, carry: Carry, step: int) -> Step:
        """Credit and all updates of a step.

        Args:
          groups: the trajectories that take part. carry: what the step before returned; empty at first.

        Raises:
          NotFinite: a loss or gradient was not finite. The state is then the one before that update.
          TrainerError: nothing of these trajectories can be trained on, whatever their rewards.
        """
        if not groups:  # not one trajectory survived
            return Step(state, carry, self.train(state, [], 0.0, step)[1], 0)
        samples = [[Sample.of(t, self._unknown_experts) for t in group] for group in groups]
        episodes = self.read(state, samples, Episodes.of(groups, limit_tok=self.limit_tok, step=step))
        result = self.algorithm.credit(episodes, carry)
        kept = self.credited(samples, episodes, result)
        if not kept and not could_teach(self.algorithm, episodes, carry):
            raise TrainerError(
                f"step {step + 1} of the phase: {type(self.algorithm).__name__} leaves out all {episodes.num} "
                "trajectories, and would whatever their rewards: look at its filters, at the weights of recorded turns "
                "and at what its teachers teach"
            )
        kl_coef = self._kl_coef(carry)
        if step == 0:
            state, kept = self._first_values(state, kept)
        parts: list[Row] | None = None
        if self.critic and self.critic.first:
            state, parts = self._fit_critics(state, self._batches(kept, kl_coef), step)
            episodes = dataclasses.replace(
                episodes, values=self._read_values(state, self._lots(samples), episodes.mask)
            )
            unfitted, result = result, self.algorithm.credit(episodes, carry)
            result = dataclasses.replace(result, stats={**result.stats, **_of_unfitted(unfitted)})
            kept = self.credited(samples, episodes, result)
        state, row = self.train(state, kept, kl_coef, step, parts)
        return Step(state, result.carry, {**row, **credit_row(episodes, result)}, len(kept))

    def train(
        self,
        state: TrainState,
        kept: Sequence[Sequence[Sample]],
        kl_coef: float,
        step: int,
        fitted: list[Row] | None = None,
    ) -> tuple[TrainState, Row]:
        """All updates on credited groups: the critics' first, then the policy's.

        Args:
          fitted: statistics of the critics' updates, if they have learned from this step already.
        """
        batches = self._batches(kept, kl_coef)
        state, parts = self._fit_critics(state, batches, step) if fitted is None else (state, list(fitted))
        if self.algorithm.trains_policy and not (self.critic and step < self.critic.warmup_steps):
            references = {name: params for name, (_, params) in self.references.items()}
            for _ in range(self.epochs):
                for batch, placed in batches:
                    policy, stats = self._update_policy(state.policy, placed, references, self.base)
                    state = dataclasses.replace(state, policy=policy)
                    parts.append(self._checked(stats, "optim", batch, step))
        row = {name: reduce_parts(name, [p[name] for p in parts if name in p]) for name in set().union(*parts)}
        packed = [batch for batch, _ in batches]
        filled = sum(int((b.segment_ids > 0).sum()) for b in packed)
        computed = sum(int(b.num_micro) * b.tokens.shape[1] * b.tokens.shape[2] for b in packed)
        return state, row | {
            "optim/updates_n": float(sum("optim/grad_norm" in p for p in parts)),
            "train/tokens_n": float(filled),
            "train/trained_tok_n": float(sum(float(b.num_tokens) for b in packed)),
            "train/sequences_n": float(sum(float(b.num_sequences) for b in packed)),
            "train/pack_frac": filled / max(computed, 1),
        }

    def _batches(self, kept: Sequence[Sequence[Sample]], kl_coef: float) -> list[tuple[TokenBatch, TokenBatch]]:
        """The batch of each update of a step, on the host and on the devices."""
        shares = [kept[u :: self.updates_per_step] for u in range(min(self.updates_per_step, len(kept)))]
        packed = [self.pack(share, kl_coef).batch for share in shares]
        return [(batch, put_batch(self.mesh, batch)) for batch in packed]

    def _fit_critics(
        self, state: TrainState, batches: Sequence[tuple[TokenBatch, TokenBatch]], step: int
    ) -> tuple[TrainState, list[Row]]:
        """All updates of the critics in a step, and the statistics of each."""
        parts: list[Row] = []
        for _ in range(self.critic.epochs if self.critic else 0):
            for batch, placed in batches:
                critics, stats = self._update_critics(state.critics, placed, self.base)
                state = dataclasses.replace(state, critics=critics)
                parts.append(self._checked(stats, "critic", batch, step))
        return state, parts

    def _checked(self, stats: Mapping[str, jax.Array], part: str, batch: TokenBatch, step: int) -> Row:
        row = {k: float(v) for k, v in jax.device_get(dict(stats)).items()}
        if not row.pop(f"{part}/finite"):
            loss = row["loss/total" if part == "optim" else "critic/loss"]
            raise NotFinite(
                f"step {step + 1} of the phase, {part}: loss {loss}, gradient norm {row[f'{part}/grad_norm']}", batch
            )
        return {k: v for k, v in row.items() if k in NAMES}

    def pack(self, groups: Sequence[Sequence[Sample]], kl_coef: float = 0.0) -> Packed:
        """One update's rows."""
        return pack(
            groups,
            self.shape,
            self.temperature,
            aggregation=self.algorithm.aggregation,
            limit_tok=self.limit_tok,
            kl_coef=kl_coef,
            whole=self.algorithm.unsplit_groups,
        )

    def _kl_coef(self, carry: Carry) -> float:
        return carry.get("kl_coef", self.algorithm.kl_coef)

    # ---- what credit needs to know ----------------------------------------------------------------------------------

    def read(self, state: TrainState, samples: Sequence[Sequence[Sample]], episodes: Episodes) -> Episodes:
        """The episodes with everything that the algorithm asked for."""
        needs = self.algorithm.needs()
        policies: dict[str, tuple[Model, Params]] = {}
        if needs.trainer_logp:
            policies["trainer_logp"] = (self.model, self.full_params(state.params))
        if needs.ref:
            policies["ref_logp"] = self.references[needs.ref]
        if needs.scorer:
            policies["scorer_logp"] = self.references[needs.scorer]
        policies |= {f"teacher{i}": self.references[name] for i, name in enumerate(needs.teachers)}
        if not (policies or needs.critics or needs.attention) or not samples:
            return episodes
        lots = self._lots(samples)
        found = self._read_attention(self.full_params(state.params), lots) if needs.attention else {}
        for packed in lots:
            for name, values in self._read_lot(packed, policies).items():
                found.setdefault(name, []).extend(values)
        arrays: dict[str, Any] = {name: _padded(values, episodes.mask) for name, values in found.items()}
        teachers = [arrays.pop(f"teacher{i}") for i in range(len(needs.teachers))]
        if teachers:
            arrays["teacher_logp"] = np.stack(teachers)
        if needs.critics:
            arrays["values"] = self._read_values(state, lots, episodes.mask)
        return dataclasses.replace(episodes, **arrays)

    def _lots(self, samples: Sequence[Sequence[Sample]]) -> list[Packed]:
        """All samples, in packs of this phase's shape. Where groups stay whole it has room for pairs only, and what is
        read does not depend on who stands beside whom."""
        if self.algorithm.unsplit_groups:
            samples = [group[i : i + 2] for group in samples for i in range(0, len(group), 2)]
        size = -(-self.groups_per_step // self.updates_per_step)
        return [self.pack(samples[start : start + size]) for start in range(0, len(samples), size)]

    def _read_lot(self, packed: Packed, policies: Mapping[str, tuple[Model, Params]]) -> dict[str, list[np.ndarray]]:
        batch = put_batch(self.mesh, packed.batch)
        found = {}
        for name, (model, params) in policies.items():
            of_policy = batch if name == "trainer_logp" else unchosen(batch)
            found[name] = packed.read(self._logp(model)(params, of_policy))
        return found

    def _read_values(self, state: TrainState, lots: Sequence[Packed], mask_NT: np.ndarray) -> np.ndarray:
        """What the critics say about every sample's tokens, `[M, N, T]`."""
        assert self.critic is not None and state.critics is not None
        found: list[list[np.ndarray]] = [[] for _ in range(self.critic.num)]
        for packed in lots:
            values = self._values(state.critics.params, put_batch(self.mesh, packed.batch), self.base)
            for rows_of_one, array in zip(found, np.asarray(values), strict=True):
                rows_of_one += packed.read(array)
        return np.stack([_padded(rows_of_one, mask_NT) for rows_of_one in found])

    @functools.cached_property
    def _programs(self) -> dict[Any, Any]:
        return {}

    def _logp(self, model: Model) -> Any:
        split = Split.of(self.mesh)
        if model not in self._programs:

            def logp(params: Params, batch: TokenBatch) -> jax.Array:
                with on_mesh(self.mesh):
                    return _over_micro(lambda p, b: read_policy(model, p, b, split=split).logp, params, batch)

            self._programs[model] = jax.jit(logp, out_shardings=replicated(self.mesh))
        return self._programs[model]

    @functools.cached_property
    def _values(self) -> Any:
        def all_critics(params: Params, batch: TokenBatch, base: Base | None) -> jax.Array:
            one = lambda p, b: read_values(self.value_model, self.value_model.full_params(p, base), b)  # noqa: E731
            with on_mesh(self.mesh):
                return jax.vmap(functools.partial(_over_micro, one), in_axes=(0, None))(params, batch)

        return jax.jit(all_critics, out_shardings=replicated(self.mesh))

    @functools.cached_property
    def _update_policy(self) -> Any:
        return make_policy_update(
            self.mesh,
            self.model,
            self.algorithm,
            self.optimizer,
            self.num_updates,
            self.shardings.policy,
            {name: model for name, (model, _) in self.references.items()},
        )

    @functools.cached_property
    def _update_critics(self) -> Any:
        assert self.critic is not None and self.shardings.critics is not None
        return make_critic_update(
            self.mesh, self.value_model, self.algorithm, self.critic, self.num_critic_updates, self.shardings.critics
        )

    def _read_attention(self, params: Params, lots: Sequence[Packed]) -> dict[str, list[np.ndarray]]:
        """WAAD and FAI of every sample; the heads are chosen once, by all lots together."""
        settings = self.algorithm.needs().attention
        assert settings is not None
        parts = []
        for packed in lots:
            b = packed.batch
            for i in range(int(b.num_micro)):
                columns = (b.tokens, b.positions, b.segment_ids, b.branch_ids, b.sequence_ids > 0)
                micro = put(self.mesh, [np.asarray(a)[i] for a in columns], [rows(self.mesh)] * len(columns))
                parts.append(jax.device_get(self._attention(params, *micro)))
        stats = attention_stats.reduce(parts, settings)
        found: dict[str, list[np.ndarray]] = {"waad": [], "fai": []}
        for packed in lots:
            whole = np.zeros((2, *np.shape(packed.batch.tokens)))
            n = int(packed.batch.num_micro)
            whole[0, :n], whole[1, :n] = stats.waad_MBT[:n], stats.fai_MBT[:n]
            stats = dataclasses.replace(stats, waad_MBT=stats.waad_MBT[n:], fai_MBT=stats.fai_MBT[n:])
            found["waad"] += packed.read(whole[0])
            found["fai"] += packed.read(whole[1])
        return found

    @functools.cached_property
    def _attention(self) -> Any:
        settings = self.algorithm.needs().attention
        assert settings is not None
        return attention_stats.make_attention_stats(self.model, self.mesh, settings)

    # ---- from credit to samples -------------------------------------------------------------------------------------

    def credited(self, samples: Sequence[Sequence[Sample]], episodes: Episodes, result: Credit) -> list[list[Sample]]:
        """The groups that take part, every sample with its columns."""
        needs = self.algorithm.needs()
        mask = episodes.mask if result.mask is None else result.mask & episodes.mask
        keep = np.ones(episodes.num, bool) if result.keep is None else result.keep
        keep = keep & mask.any(1)
        columns: dict[str, np.ndarray] = {"advantages": result.advantages, "mask": mask}
        optional = {n: getattr(result, n) for n in ("weights", "entropy_weights", "rewards")}
        if needs.trainer_logp:
            optional |= {"trainer_logp": episodes.required("trainer_logp"), "sampler_logp": episodes.behaviour_logp}
        if needs.ref:
            optional["ref_logp"] = episodes.ref_logp
        if needs.critics:
            optional |= self._critic_columns(episodes, result, mask & keep[:, None])
        columns |= {name: array for name, array in optional.items() if array is not None}
        kept: list[list[Sample]] = []
        n = 0
        for group in samples:
            members = []
            for sample in group:
                length = len(sample.at)
                if keep[n]:
                    members.append(sample.with_columns(**{k: _cut(a, n, length) for k, a in columns.items()}))
                n += 1
            if members:
                kept.append(members)
        return kept

    def _critic_columns(self, episodes: Episodes, result: Credit, part: np.ndarray) -> dict[str, np.ndarray]:
        values = np.moveaxis(episodes.required("values"), 0, -1)
        assert result.returns is not None
        if result.critic_weights is None:
            weights = np.ones(values.shape)
        else:
            weights = np.moveaxis(np.asarray(result.critic_weights, np.float64), 0, -1)
            # every critic's loss is a mean over its own share
            own = (weights * part[..., None]).sum((0, 1))
            weights = weights * np.where(own > 0, part.sum() / np.maximum(own, 1), 0)
        return {"returns": result.returns, "old_values_C": values, "critic_weights_C": weights}

    def _first_values(self, state: TrainState, kept: list[list[Sample]]) -> tuple[TrainState, list[list[Sample]]]:
        """Critics start from the mean return of what they see first, not from 0."""
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


def _over_micro(one: Any, params: Params, batch: TokenBatch) -> jax.Array:
    """`one(params, rows)` for every micro-batch that holds anything, `[M, B, T]`."""
    arrays = batch.arrays()

    def body(i, out):
        micro = {n: jax.lax.dynamic_index_in_dim(a, i, keepdims=False) for n, a in arrays.items()}
        return jax.lax.dynamic_update_index_in_dim(out, one(params, dataclasses.replace(batch, **micro)), i, 0)

    return jax.lax.fori_loop(0, batch.num_micro, body, jnp.zeros(batch.tokens.shape, jnp.float32))


def _padded(rows: Sequence[np.ndarray], mask: np.ndarray) -> np.ndarray:
    out = np.zeros(mask.shape)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def _of_unfitted(result: Credit) -> dict[str, float]:
    """Statistics that say how well critics foresee what they have not learned from."""
    return {name: value for name, value in result.stats.items() if name == "critic/explained_var"}


def _cut(array: np.ndarray, n: int, length: int) -> np.ndarray:
    values = array[n, :length]
    return values if values.dtype == bool else values.astype(np.float32)


def credit_row(e: Episodes, result: Credit) -> Row:
    """Statistics of a step's credit."""
    mask = e.mask if result.mask is None else result.mask & e.mask
    keep = np.ones(e.num, bool) if result.keep is None else result.keep
    part = mask & keep[:, None]
    values = np.where(part, result.advantages, 0)[part]
    groups = estimators.GroupStats(e.groups)
    flat = groups.flat(e.rewards)
    high = e.rewards >= (e.rewards.max() if e.num else 0)
    row = {
        "credit/adv_mean": float(values.mean()) if values.size else 0.0,
        "credit/adv_std": float(values.std()) if values.size else 0.0,
        "credit/adv_abs_max": float(np.abs(values).max()) if values.size else 0.0,
        "credit/masked_frac": 1 - float(part.sum()) / max(int(e.mask.sum()), 1),
        "reward/zero_std_frac": float(flat.mean()) if e.num else 0.0,
        "reward/all_high_frac": float((flat & high).mean()) if e.num else 0.0,
    }
    return row | {k: float(v) for k, v in result.stats.items()}
