"""Experts in whole runs: the trainer uses the sampler's choice of experts, and the balance is that of `transformers`.
(Logits, gradients and folders: `test_families.py`; the TPU compiler: `test_moe_tpu.py`.)"""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rolljax import metrics
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.batch import PackShape, Sample, pack
from rolljax.trainer.forward import hidden_before, policy_outputs
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.types import Key, SamplingParams, Task, Trajectory, Turn

from ..families import load, make_folder
from .test_sampler import close

MODEL = Model(
    Qwen3MoeConfig(hidden_size=32, head_dim=8, num_experts=8, experts_per_token=2, expert_ffn_size=24, init_std=0.3)
)
SHAPE = PackShape(1, 4, 96)
UNKNOWN = np.full((2, 2), -1, np.int8)


# ---- replay ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: MODEL.init(0))()


@pytest.fixture(scope="module")
def trajectories(params):
    """Sample four answers of 40 tokens with pages for two and a half of them, so that some are recomputed."""
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(
        slots=4, max_context=64, page_size=4, pages=34, prefill_chunk=64, steps_per_dispatch=4, record_experts=True
    )
    sampler = Sampler(Engine(MODEL, cfg, mesh, BATCH_AXES), params, 0, longest_prompt=0)
    prompts = [np.arange(3 + i, dtype=np.int32) for i in range(4)]

    async def all_of_them():
        return await asyncio.gather(
            *(sampler.generate(p, SamplingParams(1.0, 40), (i,)) for i, p in enumerate(prompts))
        )

    try:
        done = asyncio.run(all_of_them())
        assert sampler.stats.preemptions > 0
    finally:
        close(sampler)
    made = []
    for i, (prompt, c) in enumerate(zip(prompts, done, strict=True)):
        turn = Turn(prompt, c.tokens, c.sampler_logp, c.versions, c.finish_reason, 0.0, "", experts=c.experts)
        made.append(Trajectory(Key(0, i, 0), Task("e", i, str(i)), (turn,), i % 2, {}, True, "ok"))
    return made


@pytest.fixture(scope="module")
def rows(trajectories):
    batch = pack([[Sample.of(t, UNKNOWN)] for t in trajectories], SHAPE, 1.0).batch
    return dataclasses.replace(batch, **{n: a[0] for n, a in batch.arrays().items()})


@pytest.fixture(scope="module")
def read(rows):
    """Return (parameters, replay) -> choices `[B, T, L, k]` and log-probs of the trainer's forward pass."""

    @jax.jit
    def run(params, batch):
        attend = packed(batch.segment_ids, batch.branch_ids, batch.positions)
        given = None if batch.expert_ids_Lk is None else jnp.moveaxis(batch.expert_ids_Lk, 2, 0)
        out = MODEL.bind(params)(batch.tokens, batch.positions, attend, expert_ids_LBTk=given)
        return jnp.moveaxis(out.mixtures.expert_ids_BTk, 0, 2), policy_outputs(MODEL, params, batch).logp

    return lambda params, replay: run(params, rows if replay else dataclasses.replace(rows, expert_ids_Lk=None))


def same(chosen, rows):
    """Return the fraction of tokens and layers with the same set of experts, where the sampler's choice is known."""
    known = rows.expert_ids_Lk[..., 0] >= 0
    assert 0.8 * 4 * 40 * 2 < known.sum() < 4 * 40 * 2
    return (np.sort(chosen, axis=-1) == np.sort(rows.expert_ids_Lk, axis=-1)).all(-1)[known].mean()


@pytest.mark.slow
def test_the_trainer_takes_the_experts_of_the_sampler(params, rows, read):
    """A router that is a little off chooses other experts; told which, it does not, and the log-probs come closer."""
    assert same(read(params, False)[0], rows) == 1  # what was recorded stands at its own token
    noise = 0.03 * jax.random.normal(jax.random.key(0), params["layers"]["router"].shape)
    off = {**params, "layers": {**params["layers"], "router": params["layers"]["router"] + noise}}
    alone, logp_alone = read(off, False)
    told, logp_told = read(off, True)
    assert same(told, rows) == 1 > 0.98 > same(alone, rows)
    gap = lambda logp: np.abs(np.asarray(logp) - rows.sampler_logp)[rows.scale > 0].mean()  # noqa: E731
    assert 0 < gap(logp_told) < 0.6 * gap(logp_alone)


@pytest.mark.slow
def test_a_step_replays_and_reports(params, trajectories):
    mesh = MeshSpec().build(jax.devices()[:1])
    trainer = PhaseTrainer(
        mesh,
        MODEL,
        Grpo(anchor="proximal"),
        AdamW(),
        SHAPE,
        steps=1,
        groups_per_step=2,
        replay_experts=True,
    )
    groups = [trajectories[:2], trajectories[2:]]
    _, step = trainer.step(trainer.states.init(jax.tree.map(jnp.copy, params)), groups, {}, 0)
    router = {k: v for k, v in step.row.items() if k.startswith("router/")}
    assert len(router) == 5 and metrics.check_row(step.row) == []
    known = sum(int((t.turns[0].experts[:, 0, 0] >= 0).sum()) for t in trajectories)
    assert router["router/replayed_frac"] == pytest.approx(known / step.row["train/tokens_n"])
    assert step.row["mismatch/abs_max_nat"] < 1e-4
    assert "experts" not in trajectories[0].to_json()["turns"][0]


# ---- balance --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_balance_is_that_of_transformers(tmp_path):
    """Its value over padded rows, and its gradient in everything before the routers."""
    reference = make_folder(tmp_path, "qwen3_moe")
    model, params = load(tmp_path)
    rng = np.random.default_rng(0)
    lengths = (24, 9, 17)
    mask = np.arange(24) < np.array(lengths)[:, None]
    ids = np.where(mask, rng.integers(0, 277, mask.shape), 0)
    routing = model.cfg.routing
    logits = reference.model(torch.tensor(ids), torch.tensor(mask), output_router_logits=True).router_logits
    want = load_balancing_loss_func(logits, routing.num_experts, routing.per_token, torch.tensor(mask))
    want.backward()

    groups = [
        [Sample(ids[i, :n].astype(np.int32), np.array([n - 1]), np.array([0]), COLUMNS)] for i, n in enumerate(lengths)
    ]
    batch = pack(groups, PackShape(1, 3, 24), 1.0).batch
    one = dataclasses.replace(batch, **{n: a[0] for n, a in batch.arrays().items()})
    found, grads = jax.jit(jax.value_and_grad(lambda p: hidden_before(model, p, one)[2].balance_loss()))(params)
    assert float(found) == pytest.approx(want.item(), rel=1e-5)
    named = {n: p.grad.numpy() for n, p in reference.named_parameters() if p.grad is not None}
    for layer in range(2):
        theirs = named[f"model.layers.{layer}.mlp.gate.weight"].T
        error = np.linalg.norm(grads["layers"]["router"][layer] - theirs) / np.linalg.norm(theirs)
        assert error < 1e-3
    theirs = named["model.embed_tokens.weight"]
    assert np.linalg.norm(grads["embed"] - theirs) < 1e-3 * np.linalg.norm(theirs)


COLUMNS = {"mask": np.ones(1, bool), "sampler_logp": np.zeros(1, np.float32)}
