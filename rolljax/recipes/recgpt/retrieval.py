"""Retrieval by users, items and tags, as RecGPT (arXiv 2507.22879) fuses them: three towers trained together by optax.

`y_col = h_u . h_v` says who likes what, `y_sem = h_t . h_v` what fits the tags that a language model predicts for the
user. `L = L_col + alpha L_tag + (1 - alpha) L_cate`; items are ranked by `beta y_col + (1 - beta) y_sem`. That the
losses are softmaxes over the batch, and what the towers look like, is our choice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Towers = dict[str, jax.Array]
TEMPERATURE = 0.1


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """Settings of the towers and of their training."""

    dim: int = 32
    """Size of the vectors that towers return."""
    alpha: float = 0.5
    """Weight of the tag loss against the category loss."""
    steps: int = 300
    """Updates of the training."""
    batch: int = 128
    """Users of an update."""
    lr: float = 0.01
    """Learning rate of Adam."""


@dataclasses.dataclass(frozen=True)
class UserLog:
    """Users and items as numbers."""

    history: np.ndarray
    """Items of each user, oldest first, `[users, events]`."""
    target: np.ndarray
    """The item that was left out, `[users]`."""
    tags: np.ndarray
    """The tag predicted for each user, `[users]`."""
    item_tag: np.ndarray
    """Tag of each item, `[items]`."""
    item_category: np.ndarray
    """Category of each item, `[items]`."""

    @staticmethod
    def of(users: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]], predicted: Sequence[str]) -> UserLog:
        """Build the log from the users and items of `rolljax.recipes.recgpt.users`, with the tag predicted for each
        user."""
        number = {item["id"]: i for i, item in enumerate(items)}
        tag_names = sorted({item["tags"][0] for item in items})
        categories = sorted({item["category"] for item in items})
        return UserLog(
            np.array([[number[e["item"]] for e in user["events"]] for user in users]),
            np.array([number[user["target"]] for user in users]),
            np.array([tag_names.index(tag) if tag in tag_names else len(tag_names) for tag in predicted]),
            np.array([tag_names.index(item["tags"][0]) for item in items]),
            np.array([categories.index(item["category"]) for item in items]),
        )


def start(cfg: TowerConfig, log: UserLog, seed: int) -> Towers:
    """Initialise the embeddings of items and tags, normal around 0; one extra row of tags for unknown ones."""
    keys = jax.random.split(jax.random.key(seed), 3)
    num_items, num_tags = len(log.item_tag), int(log.item_tag.max()) + 2
    shapes = {"user_of_item": num_items, "item": num_items, "tag": num_tags}
    return {n: 0.1 * jax.random.normal(k, (rows, cfg.dim)) for (n, rows), k in zip(shapes.items(), keys, strict=True)}


def unit(x: jax.Array) -> jax.Array:
    """Scale vectors to length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True).clip(1e-6)


def user_tower(towers: Towers, history: jax.Array) -> jax.Array:
    """Return `h_u [users, dim]`: the mean of the items that the user touched."""
    return unit(towers["user_of_item"][history].mean(1))


def item_tower(towers: Towers, items: jax.Array, item_tag: jax.Array) -> jax.Array:
    """Return `h_v [items, dim]`: the item and its tag."""
    return unit(towers["item"][items] + towers["tag"][item_tag[items]])


def tag_tower(towers: Towers, tags: jax.Array) -> jax.Array:
    """Return `h_t [users, dim]`."""
    return unit(towers["tag"][tags])


def losses(
    h_u: jax.Array, h_t: jax.Array, h_v: jax.Array, categories: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `L_col`, `L_tag` and `L_cate` of a batch whose row i has item i as its positive, all `[batch, dim]`.

    The first two are the softmax cross-entropy of users and of tags against the batch's items, the third that of tags
    against all items of the positive's category.
    """
    by_user = jax.nn.log_softmax(h_u @ h_v.T / TEMPERATURE)
    by_tag = jax.nn.log_softmax(h_t @ h_v.T / TEMPERATURE)
    alike = categories[:, None] == categories[None]
    cate = -(jnp.where(alike, by_tag, 0).sum(1) / alike.sum(1)).mean()
    return -jnp.diagonal(by_user).mean(), -jnp.diagonal(by_tag).mean(), cate


def loss(towers: Towers, batch: Mapping[str, jax.Array], alpha: float) -> jax.Array:
    """Compute `L_col + alpha L_tag + (1 - alpha) L_cate`."""
    h_v = item_tower(towers, batch["target"], batch["item_tag"])
    col, tag, cate = losses(
        user_tower(towers, batch["history"]),
        tag_tower(towers, batch["tags"]),
        h_v,
        batch["item_category"][batch["target"]],
    )
    return col + alpha * tag + (1 - alpha) * cate


def train(cfg: TowerConfig, log: UserLog, seed: int = 0) -> Towers:
    """Fit towers to the targets of a log's users."""
    towers, optimizer = start(cfg, log, seed), optax.adam(cfg.lr)
    state = optimizer.init(towers)
    fixed = {"item_tag": jnp.array(log.item_tag), "item_category": jnp.array(log.item_category)}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(towers: Towers, state: Any, batch: dict[str, jax.Array]) -> tuple[Towers, Any]:
        grads = jax.grad(loss)(towers, batch | fixed, cfg.alpha)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(towers, updates), state

    rng = np.random.default_rng(seed)
    for _ in range(cfg.steps):
        rows = rng.integers(len(log.target), size=cfg.batch)
        batch = {"history": log.history[rows], "target": log.target[rows], "tags": log.tags[rows]}
        towers, state = step(towers, state, batch)
    return towers


def fused(y_col: Any, y_sem: Any, beta: float) -> Any:
    """Compute `beta y_col + (1 - beta) y_sem`."""
    return beta * y_col + (1 - beta) * y_sem


def ranks(towers: Towers, log: UserLog, beta: float = 0.5) -> np.ndarray:
    """Return the rank of each user's target among all items, from 1, `[users]`; an item ranks after those with the same
    score. beta: the weight of collaboration against tags; 0: tags alone, 1: collaboration alone."""
    h_v = item_tower(towers, jnp.arange(len(log.item_tag)), jnp.array(log.item_tag))
    y_col = user_tower(towers, jnp.array(log.history)) @ h_v.T
    y_sem = tag_tower(towers, jnp.array(log.tags)) @ h_v.T
    scores = np.asarray(fused(y_col, y_sem, beta))
    own = scores[np.arange(len(scores)), log.target]
    return (scores >= own[:, None]).sum(1)
