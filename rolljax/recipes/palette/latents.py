"""The latent space of Reasoning Palette (arXiv:2512.17206): a variational autoencoder of mean embeddings.

    python -m rolljax.recipes.palette.latents --model runs/palette_base/hf --env styled_words --to palette.safetensors

The mean embedding h of a question and its answer is encoded to a normal distribution of z and decoded again; the loss
is `||h - h'||^2 + beta KL(q(z|h), N(0, I))`. Latents drawn from N(0, I) are decoded to vectors at the mean norm of the
embedding, for `Recipe.prefixes`. The model itself is not changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from rolljax.envs.base import EnvSpec
from rolljax.envs.catalog import make_spec
from rolljax.errors import Checked, Range
from rolljax.model import hf
from rolljax.model.decoder import Model, Params
from rolljax.model.prefixes import Prefixes, save_prefixes
from rolljax.model.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True)
class LatentSpace(Checked):
    """Settings of the autoencoder, and of the latents that are drawn from it."""

    latents: Annotated[int, Range(low=1)] = 64
    """Number of latents."""
    length: Annotated[int, Range(low=1)] = 8
    """Vectors of a latent."""
    tiled: bool = True
    """All vectors of a latent are decoded from one z; False: from one each."""
    beta: Annotated[float, Range(low=0)] = 0.01
    """Factor of the divergence from the prior."""
    width_frac: Annotated[float, Range(above=0)] = 1 / 16
    """Numbers of z, as a share of the hidden size."""
    hidden_mult: Annotated[float, Range(above=0)] = 2.0
    """Width of the hidden layers, in hidden sizes."""
    steps: Annotated[int, Range(low=1)] = 2000
    """Updates."""
    batch: Annotated[int, Range(low=1)] = 128
    """Pairs of an update."""
    lr: Annotated[float, Range(above=0)] = 1e-3
    """Learning rate of Adam."""
    seed: int = 0
    """Seed of the weights, of the batches and of the latents."""


@dataclasses.dataclass(frozen=True, eq=False)
class Autoencoder:
    """A trained autoencoder. It sees mean embeddings less their mean."""

    params: Params
    mean_D: np.ndarray

    def encode(self, means_ND: np.ndarray) -> np.ndarray:
        """Return the means of z of mean embeddings, `[N, z]`."""
        return np.asarray(encoded(self.params, jnp.asarray(means_ND - self.mean_D))[0])

    def decode(self, z_NZ: np.ndarray) -> np.ndarray:
        """Return the mean embeddings of latents, `[N, D]`."""
        return np.asarray(_mlp(self.params["decoder"], jnp.asarray(z_NZ))) + self.mean_D


def kl(mu: jax.Array, log_var: jax.Array) -> jax.Array:
    """Return the divergence of N(mu, exp(log_var)) from N(0, I), in nats, summed over the last axis."""
    return 0.5 * jnp.sum(mu**2 + jnp.exp(log_var) - 1 - log_var, -1)


def encoded(params: Params, means_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and log-variance of z, each `[N, z]`."""
    mu, log_var = jnp.split(_mlp(params["encoder"], means_ND), 2, -1)
    return mu, log_var


def loss(params: Params, means_ND: jax.Array, noise_NZ: jax.Array, beta: float) -> jax.Array:
    """Return the mean loss of mean embeddings, with `noise_NZ` from N(0, I)."""
    mu, log_var = encoded(params, means_ND)
    again = _mlp(params["decoder"], mu + jnp.exp(0.5 * log_var) * noise_NZ)
    return jnp.mean(jnp.sum((means_ND - again) ** 2, -1) + beta * kl(mu, log_var))


def fit(means_ND: np.ndarray, space: LatentSpace) -> Autoencoder:
    """Train an autoencoder of mean embeddings `[N, D]`."""
    width = means_ND.shape[1]
    z, hidden = max(1, round(width * space.width_frac)), round(width * space.hidden_mult)
    mean = means_ND.mean(0)
    data = jnp.asarray(means_ND - mean, jnp.float32)
    first, second, noise = jax.random.split(jax.random.key(space.seed), 3)
    params = {
        "encoder": _layers(first, (width, hidden, 2 * z)),
        "decoder": _layers(second, (z, hidden, width)),
    }
    tx = optax.adam(space.lr)

    @jax.jit
    def step(params: Params, state: optax.OptState, key: jax.Array) -> tuple[Params, optax.OptState]:
        pick, draw = jax.random.split(key)
        rows = data[jax.random.randint(pick, (space.batch,), 0, len(data))]
        grads = jax.grad(loss)(params, rows, jax.random.normal(draw, (space.batch, z)), space.beta)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for key in jax.random.split(noise, space.steps):
        params, state = step(params, state, key)
    return Autoencoder(params, mean)


def draw(autoencoder: Autoencoder, space: LatentSpace, norm: float) -> Prefixes:
    """Draw latents from the prior, and decode them to vectors of a norm."""
    z = len(autoencoder.params["decoder"][0]["w"])
    shape = (space.latents, 1 if space.tiled else space.length, z)
    drawn = np.random.default_rng(space.seed).normal(size=shape).astype(np.float32)
    vectors = autoencoder.decode(drawn.reshape(-1, z))
    vectors *= norm / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    vectors = vectors.reshape(*shape[:2], -1)
    return Prefixes(np.ascontiguousarray(np.broadcast_to(vectors, (space.latents, space.length, vectors.shape[2]))))


def embedding(folder: str | Path) -> np.ndarray:
    """Return the embedding of a Hugging Face folder, float32 `[V, D]`."""
    model, here = Model(hf.read_config(folder)), SingleDeviceSharding(jax.devices()[0])
    return np.asarray(hf.load(str(folder), model, jax.tree.map(lambda _: here, model.abstract()))["embed"])


def mean_embeddings(folder: str | Path, embedding_VD: np.ndarray, spec: EnvSpec, tasks: int) -> np.ndarray:
    """Return the mean embedding of the question and the reference answer of an environment's first tasks, `[N, D]`."""
    tokenizer, env, found = load_tokenizer(folder), spec.make(), []
    for task in map(spec.task, range(tasks)):
        messages = env.reset(task)
        texts = [*(m.content for m in messages), env.reference_answer()]
        ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
        found.append(embedding_VD[ids].mean(0))
    return np.stack(found)


def make(folder: str | Path, specs: Sequence[EnvSpec], tasks: int, space: LatentSpace) -> tuple[Autoencoder, Prefixes]:
    """Train the autoencoder of a model on the first tasks of environments, and draw latents from it."""
    table = embedding(folder)
    means = np.concatenate([mean_embeddings(folder, table, spec, tasks) for spec in specs])
    autoencoder = fit(means, space)
    return autoencoder, draw(autoencoder, space, float(np.linalg.norm(table, axis=1).mean()))


def _layers(key: jax.Array, sizes: Sequence[int]) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (i, o)) * i**-0.5, "b": jnp.zeros(o)}
        for k, i, o in zip(keys, sizes, sizes[1:], strict=False)
    ]


def _mlp(layers: Sequence[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    *before, last = layers
    x = functools.reduce(lambda x, one: jax.nn.gelu(x @ one["w"] + one["b"]), before, x)
    return x @ last["w"] + last["b"]


def main(argv: Sequence[str] | None = None) -> int:
    """Make a file of latent prefixes."""
    parser = argparse.ArgumentParser(
        prog="python -m rolljax.recipes.palette.latents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="Hugging Face folder of the model")
    parser.add_argument("--env", required=True, nargs="+", help="environments with reference answers, by name")
    parser.add_argument("--tasks", type=int, default=2000, help="tasks of each environment")
    parser.add_argument("--to", required=True, help="the safetensors file to write")
    for field in dataclasses.fields(LatentSpace):
        if field.name != "tiled":
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--each", action="store_true", help="decode every vector of a latent from a z of its own")
    args = parser.parse_args(argv)
    names = [field.name for field in dataclasses.fields(LatentSpace) if field.name != "tiled"]
    space = LatentSpace(**{name: getattr(args, name) for name in names}, tiled=not args.each)
    _, prefixes = make(args.model, list(map(make_spec, args.env)), args.tasks, space)
    save_prefixes(args.to, prefixes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
