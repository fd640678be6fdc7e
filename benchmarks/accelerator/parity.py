"""The sampler against the trainer: log-probs of the same tokens; greedy tokens against the plain decoder.

`gap` rows: answers sampled at temperature 1, their log-probs by the sampler and by the trainer's forward pass; k3 is
the mean of exp(d) - 1 - d with d = trainer - sampler (Schulman's estimate of the KL divergence).
`greedy` rows: at each of the sampled tokens the plain decoder, one forward pass without a cache, is asked for its own
choice. `regret` is how much likelier its choice is to it than the sampler's token: two tokens with the same logit may
change places, so equal tokens are counted and the regret is judged.
float32 rows compute in full float32: on GPUs and TPUs JAX multiplies float32 matrices in fewer bits by default.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from typing import Any

from common import Peaks, Piece, main, one_device_mesh, random_weights, shapes
from update import kernel, make_trainer

DTYPES = ("bfloat16", "float32")
COMPILE_S = 60.0
"""Taken for the programs of one type."""


def sizes(tiny: bool) -> tuple[int, int, int, int]:
    """Return the number of answers, and the tokens of a prompt, of an answer, and of a greedy answer."""
    return (2, 16, 16, 24) if tiny else (32, 64, 256, 512)


def estimate(tiny: bool, peaks: Peaks) -> float:
    return 30.0 + 2 * 2 * COMPILE_S


def body(piece: Piece) -> None:
    import jax

    from rolljax.model.decoder import Model

    name, shape = next(iter(shapes(piece.tiny).items()))
    num, prompt, answer, greedy = sizes(piece.tiny)
    for dtype in DTYPES:
        model = Model(shape, dtype)  # type: ignore[arg-type]
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            params = random_weights(model, computed=False)
            with piece.attempt({"what": "gap", "shape": name, "dtype": dtype}) as row:
                row |= gap_figures(model, params, num, prompt, answer)
            with piece.attempt({"what": "greedy", "shape": name, "dtype": dtype}) as row:
                row |= greedy_figures(model, params, min(8, num), prompt, greedy)
        del params
        gc.collect()


def sample(model: Any, params: Any, prompts: Any, answer: int, temperature: float) -> tuple[list[Any], Any]:
    """Return the sampler's answers and its engine."""
    from rolljax.sampler.client import Sampler
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.mesh import BATCH_AXES
    from rolljax.trainer.publish import make_publish
    from rolljax.types import SamplingParams

    mesh = one_device_mesh()
    cfg = SamplerConfig(slots=len(prompts), max_context=prompts.shape[1] + answer, steps_per_dispatch=16)
    engine = Engine(model, cfg, mesh, BATCH_AXES)
    sampler = Sampler(engine, make_publish(mesh, model)(params), 0, longest_prompt=0)
    how = SamplingParams(temperature, answer)

    async def everything() -> list[Any]:
        return await asyncio.gather(*(sampler.generate(p, how, (i,)) for i, p in enumerate(prompts)))

    try:
        return asyncio.run(everything()), engine
    finally:
        sampler.close()


def random_prompts(model: Any, num: int, length: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, model.cfg.vocab_size, (num, length), np.int32)


def gap_figures(model: Any, params: Any, num: int, prompt: int, answer: int) -> dict[str, Any]:
    """Compare the log-probs of sampled tokens between sampler and trainer."""
    import numpy as np

    from rolljax.trainer.batch import PackShape, Sample, pack
    from rolljax.trainer.mesh import PlacedBatch

    prompts = random_prompts(model, num, prompt)
    done, _ = sample(model, params, prompts, answer, 1.0)
    samples = []
    for one, completion in zip(prompts, done, strict=True):
        stream = np.concatenate([one, completion.tokens]).astype(np.int32)
        columns = {"mask": np.ones(answer, bool), "sampler_logp": completion.sampler_logp}
        samples.append(Sample(stream, np.arange(prompt, prompt + answer), np.zeros(answer, np.int64), columns))
    trainer = make_trainer(model.cfg, prompt + answer, num, "none")
    packed = pack([[one] for one in samples], PackShape(1, num, prompt + answer), 1.0)
    attention = kernel(model.cfg, prompt + answer) if model.dtype == "bfloat16" else "xla"
    program = trainer.forward_passes.logprob_program(dataclasses.replace(model, attention=attention))
    logps = packed.unpack(program(params, PlacedBatch(trainer.mesh, packed).on_devices))
    trained, sampled = np.concatenate(logps), np.concatenate([c.sampler_logp for c in done])
    gap = trained.astype(np.float64) - sampled
    return {
        "trainer_attention": attention,
        "tokens": len(gap),
        "gap_mean": float(np.abs(gap).mean()),
        "gap_max": float(np.abs(gap).max()),
        "k3": float(np.mean(np.exp(gap) - 1 - gap)),
    }


def greedy_figures(model: Any, params: Any, num: int, prompt: int, answer: int) -> dict[str, Any]:
    """Compare the sampler's greedy tokens with the plain decoder's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rolljax.model.attention import packed

    prompts = random_prompts(model, num, prompt)
    done, _ = sample(model, params, prompts, answer, 0.0)
    streams = np.stack([np.concatenate([p, c.tokens]) for p, c in zip(prompts, done, strict=True)]).astype(np.int32)

    @jax.jit
    def plain(params: Any, tokens_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the plain decoder's choice after each token, and its log-prob minus that of the actual next token."""
        decoder, T = model.bind(params), len(tokens_T)
        same, positions = jnp.ones((1, T), jnp.int32), jnp.arange(T)[None]
        hidden = decoder(tokens_T[None], positions, packed(same, same, positions, "xla")).hidden[0, prompt - 1 : -1]
        logp = jax.nn.log_softmax(decoder.logits(hidden))
        given = jnp.take_along_axis(logp, tokens_T[prompt:, None], axis=1)[:, 0]
        return jnp.argmax(logp, axis=1), logp.max(axis=1) - given

    choices, regrets = zip(*(jax.device_get(plain(params, stream)) for stream in streams), strict=True)
    equal = np.stack(choices) == streams[:, prompt:]
    return {
        "sequences": num,
        "tokens": answer,
        "equal_frac": float(equal.mean()),
        "sequences_equal": int(equal.all(axis=1).sum()),
        "regret_max": float(np.max(regrets)),
    }


if __name__ == "__main__":
    main("parity", body, estimate, is_timed=False)
