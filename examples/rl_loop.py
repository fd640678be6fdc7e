"""The whole of `rolljax.loop` without settings, threads or rooms: read it from top to bottom.

    python examples/rl_loop.py            # the quickstart's first steps: warm start, then GRPO

It makes the same model see the same tasks in the same order, draws the same samples, and gets the same losses as
`python -m rolljax.train --gin configs/quickstart.gin` with the same numbers of steps, and
with AdamW in the warm start too (tests/e2e/test_twin.py).

Deliberately absent: packing several updates' worth of micro-batches into one program, checkpoints, evaluation, several
devices, environments that take more than one turn, and everything that can go wrong.
"""

import os
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rolljax.envs.adapters.reasoning_gym import ReasoningGym
from rolljax.envs.tasks import TaskStream
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.sampler.arrays import ADDRESS_LEN, Inserts, PrefillChunks
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.batch import PackShape, Sample, pack
from rolljax.trainer.mesh import MeshSpec

# ---- settings: configs/quickstart.gin, written out

SEED = 0
ENV = ReasoningGym("spell_backward", {"min_word_len": 4, "max_word_len": 4})
HELD_OUT_FRAC = 0.1
MODEL = Model(Qwen3Config(init_std=0.1))
SAMPLER = SamplerConfig(slots=512, max_context=80, prefill_chunk=4096)
ROW_LEN, MICRO_ROWS = 128, 8
MAX_ANSWER_TOK = 6
SFT_LR, SFT_BATCH, SFT_TEMPERATURE = 3e-3, 64, 0.7
RL_LR, RL_PROMPTS, RL_GROUP, RL_UPDATES = 1.5e-3, 64, 8, 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.5


# ---- sampling: the three engine programs, driven by hand


def sample_all(engine, params, state, prompts, addresses, stop_ids):
    """Sample one answer per (prompt, address). Returns the state, and per answer its tokens and log-probs."""
    cfg, page = engine.cfg, engine.cfg.page_size
    distinct = list(dict.fromkeys(p.tobytes() for p in prompts))
    ids = [np.frombuffer(p, np.int32) for p in distinct]
    W, T = cfg.pages_per_sequence, cfg.chunk_size(max(map(len, ids)))
    R = cfg.prefill_rows(T, 1)
    assert len(ids) <= R and len(prompts) <= cfg.slots

    # prefill every distinct prompt once, into pages 0 .. R*W-1
    pieces = PrefillChunks.empty(R, T, W)
    for row, p in enumerate(ids):
        pieces.tokens[row, : len(p)], pieces.count[row] = p, len(p)
        pieces.table[row] = row * W + np.arange(W)
    state, logits = engine.prefill(params, state, pieces, read=0)

    # one slot per answer: it shares the prompt's full pages and copies the last, partly filled one
    new, table = Inserts.empty(cfg.slots), np.full((cfg.slots, W), -1, np.int32)
    for slot, (p, address) in enumerate(zip(prompts, addresses, strict=True)):
        row, whole = distinct.index(p.tobytes()), len(p) // page
        own = (R + slot) * W + np.arange(W - whole)
        new.row[slot], table[slot] = row, [*pieces.table[row, :whole], *own]
        if len(p) % page:
            new.copy_from[slot], new.copy_to[slot] = pieces.table[row, whole], own[0]
        new.length[slot], new.max_tokens[slot] = len(p), MAX_ANSWER_TOK
        new.address[slot, : len(address)] = address
        new.stop[slot, : len(stop_ids)] = stop_ids
    state, out = engine.insert(state, logits, new)
    answers = [([], []) for _ in prompts]

    # decode until nobody is left
    while True:
        out = jax.device_get(out)
        for slot, (t, x) in enumerate(answers):
            n = int(out.valid[slot])
            t.extend(map(int, out.tokens[slot, :n]))
            x.extend(out.sampler_logp[slot, :n])
        if out.done.all():
            break
        state, out = engine.generate(params, state, table, np.where(out.done, -1, np.arange(cfg.slots)))
    return state, [(np.array(t, np.int32), np.array(x, np.float32)) for t, x in answers]


# ---- the loss: log-probs of every token given what stands before it


class Row(NamedTuple):
    """One micro-batch of packed rows, every array `[B, T]` (`rolljax.trainer.batch` says what they are)."""

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    branch_ids: np.ndarray
    prev: np.ndarray
    scale: np.ndarray
    advantages: np.ndarray
    sampler_logp: np.ndarray


def log_probs(params, row, temperature=1.0):
    """Compute the log-prob of each token of packed rows `[B, T]`, from the hidden state of the token before it."""
    decoder = MODEL.bind(params)
    hidden = decoder(row.tokens, row.positions, packed(row.segment_ids, row.branch_ids, row.positions)).hidden
    before = jnp.take_along_axis(hidden, row.prev[..., None], axis=1)
    logits = jax.nn.log_softmax(decoder.logits(before) / temperature)
    return jnp.take_along_axis(logits, row.tokens[..., None], axis=-1)[..., 0]


def sft_loss(params, row):
    return jnp.sum(-log_probs(params, row, SFT_TEMPERATURE) * row.scale)


def grpo_loss(params, row):
    # where the scale is 0, sampler_logp is 0 and could make the ratio overflow: clean before, not after
    logp = jnp.where(row.scale > 0, log_probs(params, row), 0.0)
    ratio = jnp.exp(logp - row.sampler_logp)
    clipped = jnp.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = -jnp.minimum(ratio * row.advantages, clipped * row.advantages)
    return jnp.sum(loss * row.scale)


def make_update(loss_fn, tx):
    """Return a function that makes one optimizer update from all micro-batches.

    A token's scale is its share of the whole update (here one over the number of tokens in it), so that micro-batches
    simply add up.
    """
    grad_fn = jax.jit(jax.value_and_grad(loss_fn))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    step = jax.jit(lambda g, o, p: tx.update(g, o, p))

    def update(params, opt_state, batch):
        total, grads = 0.0, None
        for i in range(int(batch.num_micro)):
            row = Row(*(getattr(batch, name)[i] for name in Row._fields))
            value, g = grad_fn(params, row)
            total, grads = total + float(value), g if grads is None else add(grads, g)
        changes, opt_state = step(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, total

    return update


# ---- the loop


def run(sft_steps: int, rl_steps: int) -> list[float]:
    """Train; returns the loss of every step (RL: the mean over its updates)."""
    chat, stream, env = Chat(byte_tokenizer()), TaskStream(ENV, SEED, HELD_OUT_FRAC), ENV.make()
    losses = []
    params = jax.jit(lambda: MODEL.init(SEED))()

    # warm start: cross-entropy on the reference answers
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SFT_LR, 0.9, 0.95, weight_decay=0.0))
    opt_state, update = tx.init(params), make_update(sft_loss, tx)
    for step in range(sft_steps):
        groups = []
        for task in (next(stream) for _ in range(SFT_BATCH)):
            prompt, reference = chat.prompt_ids(env.reset(task)), chat.answer_ids(env.reference_answer())
            groups.append([one_sample(prompt, reference, np.zeros(len(reference)), advantage=1.0)])
        batch = pack(groups, PackShape(SFT_BATCH, MICRO_ROWS, ROW_LEN), SFT_TEMPERATURE).batch
        params, opt_state, loss = update(params, opt_state, batch)
        losses.append(loss)
        print(f"sft {step + 1}  loss {loss:.4f}")

    # GRPO: sample groups, score them, compare within the group, update
    engine = Engine(MODEL, SAMPLER, MeshSpec().build(jax.devices()[:1]), ("data", "fsdp"))
    state = engine.init_decode_state()
    rate = optax.linear_schedule(RL_LR, 0.1 * RL_LR, rl_steps * RL_UPDATES)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, 0.9, 0.95, weight_decay=0.0))
    opt_state, update = tx.init(params), make_update(grpo_loss, tx)
    for step in range(rl_steps):
        tasks = [next(stream) for _ in range(RL_PROMPTS)]
        prompts = [chat.prompt_ids(env.reset(task)) for task in tasks]
        # the address of a sample's randomness: run seed, stream (phase), prompt index, sibling, turn
        prompt_indices = range(step * RL_PROMPTS, (step + 1) * RL_PROMPTS)
        addresses = [(SEED, 1, prompt_index, i, 0) for prompt_index in prompt_indices for i in range(RL_GROUP)]
        assert len(addresses[0]) == ADDRESS_LEN
        repeated = [p for p in prompts for _ in range(RL_GROUP)]
        state, answers = sample_all(engine, params, state, repeated, addresses, chat.stop_ids)

        groups, rewards = [], []
        for g, task in enumerate(tasks):
            members = answers[g * RL_GROUP : (g + 1) * RL_GROUP]
            r = []
            for tokens, _ in members:
                env.reset(task)
                r.append(env.step(chat.text(tokens, prompts[g])).reward)
            rewards += r
            if np.ptp(r) == 0:
                continue  # all equal: nothing to compare
            advantage = (np.array(r) - np.mean(r)) / (np.std(r, ddof=1) + 1e-6)
            groups.append([one_sample(prompts[g], t, x, a) for (t, x), a in zip(members, advantage, strict=True)])
        step_losses = []
        for part in (groups[u::RL_UPDATES] for u in range(min(RL_UPDATES, len(groups)))):
            batch = pack(part, PackShape(RL_PROMPTS, MICRO_ROWS, ROW_LEN), 1.0).batch
            params, opt_state, loss = update(params, opt_state, batch)
            step_losses.append(loss)
        losses.append(float(np.mean(step_losses)) if step_losses else 0.0)
        print(f"rl {step + 1}  reward {np.mean(rewards):.3f}  loss {losses[-1]:.4f}")
    return losses


def one_sample(prompt, answer, logp, advantage):
    """Return prompt and answer as one training sequence. Each column has a value per token of the answer; all tokens
    count, and all have the answer's advantage."""
    n = len(answer)
    columns = {"mask": np.ones(n, bool), "sampler_logp": logp, "advantages": np.full(n, advantage)}
    at = len(prompt) + np.arange(n)
    return Sample(np.concatenate([prompt, answer]), at, turns=np.zeros(n, int), columns=columns)


if __name__ == "__main__":
    run(sft_steps=100, rl_steps=50)
