"""A task in which one token decides and the others follow from it, for transformers of a few thousand weights.

    question x -> n p n f1 n f2 n f3 ...    p: the plan, f_k: what follows from it at place k, n: noise

The model was taught (supervised, plans at random) to keep to its plan: every `f_k` is a function of `p` and `k`, so
that later tokens look back at the plan. What it has to find out by reinforcement is which plan is right, the same one
for all questions: reward 1 if the plan and all that follows are right. The reward does not show that the plan decides.

Several runs are trained side by side by plain gradient descent, as in `toys.py`, each with weights, answers and a
secret of its own. The rest is what a run uses: the model, its attention statistics, `Episodes`, `Algorithm.credit`, the
scales of the aggregation, `TokenBatch` and `update.policy_loss`.

Shape letters: R runs, N answers of a step, T tokens of one, S of one with its question, V symbols; L, B, K, C as in the
map of the code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys

from rolljax.model.attention import attention, packed
from rolljax.model.decoder import Model, Params
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.trainer import attention_stats, update
from rolljax.trainer.aggregation import token_scales
from rolljax.trainer.algorithms.attention_rhythm import AttentionRhythm
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.episodes import Credit, Episodes

QUESTIONS, PLANS, NOISE, FOLLOWS, GROUP = 4, 8, 4, 4, 8
PLACES = 1 + FOLLOWS
LENGTH = 2 * PLACES
"""Tokens of an answer: noise and plan, then noise and what follows, again and again."""
PLAN = 1
"""Place of the plan in the answer."""
FIRST_PLAN = QUESTIONS
FIRST_FOLLOW = FIRST_PLAN + PLANS
FIRST_NOISE = FIRST_FOLLOW + 2 * FOLLOWS
VOCAB = FIRST_NOISE + NOISE * PLACES


@functools.cache
def model_of(layers: int) -> Model:
    """Return the model with a number of layers, of one head each."""
    shape = {"hidden_size": 32, "ffn_size": 64, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    return Model(Qwen3Config(vocab_size=VOCAB, num_layers=layers, init_std=0.1, **shape))


ASKED = np.repeat(np.arange(QUESTIONS), GROUP)
"""The question of every answer of a step, `[N]`."""


def symbols(plans: np.ndarray) -> np.ndarray:
    """Plan and what follows from it, `[..., PLACES]`, for plans `[...]`: one of two symbols at every place, which half
    of the plans share, so that only the plan itself tells what follows."""
    k = np.arange(FOLLOWS)
    bits = (plans[..., None] * (2 * k + 1) // 4 + k) % 2
    return np.concatenate([FIRST_PLAN + plans[..., None], FIRST_FOLLOW + 2 * k + bits], -1)


def noise(rng: np.random.Generator, num: int) -> np.ndarray:
    """Return meaningless symbols, from a different set at each place, `[num, PLACES]`."""
    return FIRST_NOISE + NOISE * np.arange(PLACES) + rng.integers(0, NOISE, (num, PLACES))


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _taught(layers: int, params: Params, data: jax.Array, steps: int, batch: int) -> Params:
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        ones = jnp.ones_like(tokens)
        positions = jnp.broadcast_to(jnp.arange(1 + LENGTH), tokens.shape)
        decoder = model_of(layers).bind(params)
        hidden = decoder(tokens, positions, packed(ones, ones, positions)).hidden
        logp = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()

    def step(i: jax.Array, algorithm_state: tuple[Params, Any]) -> tuple[Params, Any]:
        params, state = algorithm_state
        tokens = jax.lax.dynamic_slice_in_dim(data, i * batch, batch)
        updates, state = tx.update(jax.grad(loss)(params, tokens), state)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, steps, step, (params, tx.init(params)))[0]


def taught(layers: int, seed: int, steps: int = 400, batch: int = 32) -> Params:
    """Train a model that answers any question with a random plan and follows that plan."""
    rng = np.random.default_rng(seed)
    data = np.zeros((steps * batch, 1 + LENGTH), np.int32)
    data[:, 0] = rng.integers(0, QUESTIONS, len(data))
    data[:, 1::2] = noise(rng, len(data))
    data[:, 1 + PLAN :: 2] = symbols(rng.integers(0, PLANS, len(data)))
    return _taught(layers, model_of(layers).init(seed), jnp.asarray(data), steps, batch)


def _next_law(model: Model, params: Params, tokens_N: jax.Array, at: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """Return log-probs `[N, V]` after token number `at`; the cache is `[L, N, S, K, C]` twice."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, layer: Any, window: Any = None) -> Any:
        cache = tuple(c.at[layer, :, at].set(new[:, 0]) for c, new in zip(cache, (k, v), strict=True))
        seen = jnp.broadcast_to(jnp.arange(1 + LENGTH) <= at, (len(q), 1, 1 + LENGTH))
        return attention(q, cache[0][layer], cache[1][layer], seen), cache

    decoder = model.bind(params)
    out = decoder(tokens_N[:, None], jnp.full((len(tokens_N), 1), at), attend, cache)
    return jax.nn.log_softmax(decoder.logits(out.hidden[:, 0])), out.cache


@functools.partial(jax.jit, static_argnums=0)
def sample(layers: int, params: Params, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sample answers; return them with their log-probs, `[R, N, T]`."""
    return jax.vmap(functools.partial(_sample, model_of(layers)))(params, keys)


def _sample(model: Model, params: Params, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    cfg, num = model.cfg, len(ASKED)
    empty = jnp.zeros((cfg.num_layers, num, 1 + LENGTH, cfg.num_kv_heads, cfg.head_dim))

    def step(algorithm_state: Any, t: jax.Array) -> Any:
        token, cache = algorithm_state
        law, cache = _next_law(model, params, token, t, cache)
        drawn = jax.random.categorical(jax.random.fold_in(key, t), law)
        return (drawn, cache), (drawn, jnp.take_along_axis(law, drawn[:, None], 1)[:, 0])

    first = (jnp.asarray(ASKED, jnp.int32), (empty, empty))
    _, (tokens, logp) = jax.lax.scan(step, first, jnp.arange(LENGTH))
    return tokens.T, logp.T


def episodes(tokens: np.ndarray, logp: np.ndarray, right: np.ndarray, step: int, rhythm: Any, **read: Any) -> Episodes:
    """Return the answers `[N, T]` of one run as episodes.

    Args:
      right: `[]`, the plan they should have. rhythm: attention statistics (None: none are needed).
      read: further fields of `Episodes`.
    """
    if rhythm is not None:
        read |= {"waad": rhythm.waad_MBT[0][:, 1:], "fai": rhythm.fai_MBT[0][:, 1:]}
    rewards = (tokens[:, PLAN::2] == symbols(right)).all(1).astype(np.float64)
    return toys.one_turn_episodes(
        rewards,
        np.arange(len(tokens)) // GROUP,
        np.ones(tokens.shape, bool),
        logp,
        limit_tok=LENGTH,
        states=ASKED,
        step=step,
        **read,
    )


def layout() -> dict[str, np.ndarray]:
    """Return the arrays of rows of a question and its answer, `[N, S]`, that do not depend on the tokens."""
    shape = (len(ASKED), 1 + LENGTH)
    places = np.broadcast_to(np.arange(1 + LENGTH), shape).astype(np.int32)
    answer = (places > 0).astype(np.int32)
    return {
        "positions": places,
        "segment_ids": np.ones(shape, np.int32),
        "branch_ids": answer,
        "prev": np.maximum(places - 1, 0),
        "sequence_ids": answer,
        "turn_ids": answer,
    }


def pack(algorithm: Algorithm, tokens: np.ndarray, e: Episodes, credit: Credit) -> TokenBatch:
    """Pack every answer into a row `[S]`."""
    mask = e.mask if credit.mask is None else credit.mask & e.mask
    keep = np.ones(e.num, bool) if credit.keep is None else credit.keep
    mask = mask & keep[:, None]
    scale = np.zeros(mask.shape)
    scale[keep] = np.array(token_scales([mask[keep]], algorithm.aggregation, e.limit_tok)[0]).reshape(-1, LENGTH)
    behind = lambda x: np.pad(x, ((0, 0), (1, 0))).astype(np.float32)  # noqa: E731
    weights = np.broadcast_to(credit.weights, mask.shape)
    optional = {"trainer_logp": e.trainer_logp, "weights": weights, "rewards": credit.rewards}
    return TokenBatch(
        tokens=np.concatenate([ASKED[:, None], tokens], 1).astype(np.int32),  # type: ignore[arg-type]
        **layout(),  # type: ignore[arg-type]
        scale=behind(scale),  # type: ignore[arg-type]
        advantages=behind(credit.advantages),  # type: ignore[arg-type]
        sampler_logp=behind(e.sampler_logp),  # type: ignore[arg-type]
        **{name: behind(x) for name, x in optional.items() if x is not None},  # type: ignore[arg-type]
        num_micro=np.int32(1),  # type: ignore[arg-type]
        num_tokens=np.float32(mask.sum()),  # type: ignore[arg-type]
        num_computed=np.float32(e.mask.sum()),  # type: ignore[arg-type]
        num_sequences=np.float32(mask.any(1).sum()),  # type: ignore[arg-type]
        temperature=np.float32(1),  # type: ignore[arg-type]
        kl_coef=np.float32(0),  # type: ignore[arg-type]
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _descend(layers: int, algorithm: Algorithm, params: Params, batch: TokenBatch, lr: jax.Array) -> Params:
    """Apply one gradient step to each run."""
    loss = update.policy_loss(model_of(layers), algorithm, {})
    grads = jax.vmap(jax.grad(loss, has_aux=True))(params, batch)[0]
    return jax.tree.map(lambda p, g: p - lr * g, params, grads)


@functools.partial(jax.jit, static_argnums=0)
def success(layers: int, params: Params, right: jax.Array) -> jax.Array:
    """Return the mean probability of the right plan `right [R]`, over questions and the noise before it, `[R]`."""
    return jax.vmap(functools.partial(_success, model_of(layers)))(params, right)


def _success(model: Model, params: Params, right: jax.Array) -> jax.Array:
    x, n = (a.reshape(-1) for a in jnp.meshgrid(jnp.arange(QUESTIONS), FIRST_NOISE + jnp.arange(NOISE), indexing="ij"))
    tokens = jnp.stack([x, n], 1)
    ones, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(2), tokens.shape)
    decoder = model.bind(params)
    law = jax.nn.softmax(decoder.logits(decoder(tokens, positions, packed(ones, ones, positions)).hidden[:, 1]))
    return law[:, FIRST_PLAN + right].mean()


def rhythms(
    layers: int, maps: attention_stats.AttentionMaps
) -> Callable[[Params, np.ndarray], list[attention_stats.Rhythm]]:
    """Return a function from the parameters and answers `[R, N, T]` of all runs to the attention statistics of each."""
    measure, rows = attention_stats.make_attention_stats(model_of(layers), None, maps), layout()

    @jax.jit
    @jax.vmap
    def heads(params: Params, tokens_NT: jax.Array) -> attention_stats.HeadStats:
        tokens = jnp.concatenate([jnp.asarray(ASKED, jnp.int32)[:, None], tokens_NT], 1)
        sampled = rows["sequence_ids"] > 0
        return measure(params, tokens, rows["positions"], rows["segment_ids"], rows["branch_ids"], sampled)

    def read(params: Params, tokens: np.ndarray) -> list[attention_stats.Rhythm]:
        found = jax.device_get(heads(params, tokens))
        each = [jax.tree.map(lambda x, r=r: x[r], found) for r in range(len(tokens))]
        return [attention_stats.reduce([one], maps) for one in each]

    return read


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """success `[A, seeds, steps + 1]`: mean probability of the right plan, by algorithm and seed. factors `[A, T]`:
    what the advantages of the tokens of an answer were multiplied by, on average."""

    success: np.ndarray
    factors: np.ndarray

    @property
    def speed(self) -> np.ndarray:
        """Mean success over the steps, `[A, seeds]`."""
        return self.success[..., 1:].mean(-1)


def train(
    algorithms: Sequence[AttentionRhythm],
    maps: attention_stats.AttentionMaps,
    *,
    layers: int = 1,
    seeds: int,
    steps: int,
    lr: float,
) -> History:
    """Train the same taught models on the same random numbers with each algorithm. All must have the same objective."""
    each = [(a, s) for a in algorithms for s in range(seeds)]
    secrets = np.array([np.random.default_rng([s, 1]).integers(0, PLANS) for _, s in each])
    start = [taught(layers, s) for s in range(seeds)] * len(algorithms)
    params = jax.tree.map(lambda *x: jnp.stack(x), *start)
    read, curves, factors = (
        rhythms(layers, maps),
        [np.asarray(success(layers, params, secrets))],
        np.zeros((len(each), LENGTH)),
    )
    for step in range(steps):
        keys = jnp.stack([jax.random.fold_in(jax.random.key(s), step) for _, s in each])
        tokens, logp = (np.asarray(x) for x in sample(layers, params, keys))
        batches = []
        for r, rhythm in enumerate(read(params, tokens)):
            algorithm = each[r][0]
            e = episodes(tokens[r], logp[r], secrets[r], step, rhythm)
            batches.append(pack(algorithm, tokens[r], e, algorithm.credit(e, {})))
            factors[r] += algorithm.factors(e).mean(0)
        batch = jax.tree.map(lambda *x: np.stack(x), *batches)
        params = _descend(layers, algorithms[0], params, batch, jnp.float32(lr))
        curves.append(np.asarray(success(layers, params, secrets)))
    shape = (len(algorithms), seeds)
    return History(np.array(curves).T.reshape(*shape, -1), (factors / steps).reshape(*shape, -1).mean(1))
