"""Every kernel against XLA in float32: attention forward and backward, paged decode, vocabulary blocks, experts.

A row says what was computed, by which implementation, in which dtype. `error` is the largest difference from plain XLA
in float32 at the highest precision, as a share of the largest number there, over outputs and gradients; `bound` is the
largest that is `ok`. `repeatable`: a second call gives the same bits, which exact resume needs. `cannot` is the reason
why an implementation does not run here. Inputs are random, and the same for all implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from common import Peaks, Piece, main, one_device_mesh, same_bits

BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest error, as a share."""
TENSOR_CORES = 5e-3
"""Largest error in float32 where matrix products are computed by an accelerator, which rounds what goes in."""
KINDS = ("packed", "shared prompts", "window")
COMPILE_S = 4.0
"""Taken for one program."""


def estimate(tiny: bool, peaks: Peaks) -> float:
    """Return seconds; every implementation of attention is counted as if it ran."""
    programs = 2 * len(KINDS) * 4 + 6 + 6 + 8
    return 0.3 * programs if tiny else 20 + COMPILE_S * programs


def body(piece: Piece) -> None:
    paged_errors(piece)
    prefill_errors(piece)
    vocabulary_errors(piece)
    expert_errors(piece)
    attention_errors(piece)


# ---- comparing ------------------------------------------------------------------------------------------------------


def error_of(found: Any, wanted: Any) -> float:
    """Return the largest difference of two pytrees of arrays, each array's as a share of its largest number."""
    import jax
    import jax.numpy as jnp

    def one(a: Any, b: Any) -> float:
        b = b.astype(jnp.float32)
        return float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30))

    errors = jax.tree.leaves(jax.tree.map(one, found, wanted))
    return float("nan") if any(error != error for error in errors) else max(errors)


def judge(piece: Piece, row: dict[str, Any], found: Any, wanted: Any) -> None:
    """Put the error, its bound and whether it is within it into a row."""
    bound = BOUNDS[row["dtype"]]
    if row["dtype"] == "float32" and piece.platform != "cpu":
        bound = TENSOR_CORES
    error = error_of(found, wanted)
    row |= {"error": error, "bound": bound, "ok": error <= bound}


def with_gradients(f: Callable[..., Any], weight: Any) -> Callable[..., Any]:
    """Return a jitted function of the same arguments: the output of `f`, and gradients of its weighted sum."""
    import jax
    import jax.numpy as jnp

    from rolljax.trainer.mesh import gradient_options

    def loss(*args: Any) -> tuple[Any, Any]:
        out = f(*args)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    def both(*args: Any) -> tuple[Any, Any]:
        (_, out), grads = jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)(*args)
        return out, grads

    return jax.jit(both, compiler_options=gradient_options(one_device_mesh()))


def exact(f: Callable[..., Any], *args: Any) -> Any:
    """Return `f` of the arguments in float32, at the highest precision of matrix products."""
    import jax
    import jax.numpy as jnp

    with jax.default_matmul_precision("highest"):
        return f(*[x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args])


# ---- attention in packed rows ---------------------------------------------------------------------------------------


def packed_rows(length: int, siblings: int) -> tuple[Any, Any, Any, Any]:
    """Return segments, branches, positions `[1, T]`, and which tokens are real: groups of a prompt and its siblings."""
    import jax.numpy as jnp
    import numpy as np

    segment, branch, position = np.zeros((3, 1, length), np.int32)
    at, number, rng = 0, 0, np.random.default_rng(0)
    while at < length * 7 // 8:  # the rest is padding
        number += 1
        prompt = int(rng.integers(length // 16, length // 8))
        for b, size in enumerate([prompt, *rng.integers(length // 64, length // 16, siblings)]):
            span = slice(at, min(at + int(size), length))
            segment[0, span], branch[0, span] = number, b
            position[0, span] = np.arange(span.stop - span.start) + (prompt if b else 0)
            at = span.stop
    return jnp.asarray(segment), jnp.asarray(branch), jnp.asarray(position), jnp.asarray(segment > 0)


def heads_of(length: int, heads: int, kv_heads: int, size: int, dtype: str) -> list[Any]:
    import jax

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, length, n, size) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def attention_errors(piece: Piece) -> None:
    import jax.numpy as jnp

    from rolljax.errors import ConfigError
    from rolljax.model import attention
    from rolljax.model.axes import on_mesh
    from rolljax.model.implementations import NAMES, implementation

    length, heads, kv_heads, size = (256, 4, 2, 16) if piece.tiny else (2048, 16, 8, 128)
    whole, piece_bytes, mesh = attention.SCORE_BYTES, attention.PIECE_BYTES, one_device_mesh()
    attention.PIECE_BYTES = 4 * heads * length * (length // 14)  # 15 pieces, the last one not full
    for kind in KINDS[1:] if piece.tiny else KINDS:
        segment, branch, position, real = packed_rows(length, 1 if kind == "packed" else 4)
        window = attention.Window(length // 32, True) if kind == "window" else None
        tokens = attention.TokenPositions.of(position, segment, branch)
        mask, weight = attention.visible(tokens, tokens, window), real[..., None, None]
        for dtype in BOUNDS:
            qkv = heads_of(length, heads, kv_heads, size, dtype)
            reference = with_gradients(lambda q, k, v, mask=mask: attention.attention(q, k, v, mask), weight)
            out, grads = exact(reference, *qkv)
            for name in (*NAMES, "xla in pieces"):
                row = {"what": "attention", "kind": kind, "implementation": name, "dtype": dtype}
                how = "xla" if name == "xla in pieces" else name
                if name == "splash" and piece.platform == "cpu":
                    piece.record(
                        row | {"cannot": "is interpreted on CPU, which tests/unit/model/test_attention.py does"}
                    )
                    continue
                try:
                    implementation(how, mesh, qkv[0].shape, dtype)
                except ConfigError as reason:
                    piece.record(row | {"cannot": reason.message})
                    continue
                attention.SCORE_BYTES = 0 if name != how else whole

                def mixed(q: Any, k: Any, v: Any, how: Any = how, window: Any = window, rows: Any = tokens) -> Any:
                    attend = attention.packed(rows.segment_ids, rows.branch_ids, rows.positions, how)
                    return attend(q, k, v, None, 0, window)[0]

                with piece.attempt(row) as row, on_mesh(mesh):
                    program = with_gradients(mixed, weight)
                    found, found_grads = program(*qkv)
                    judge(piece, row, (found * weight, found_grads), (jnp.where(weight, out, 0), grads))
                    row["repeatable"] = same_bits((found, found_grads), *(program(*qkv) for _ in range(2)))
            attention.SCORE_BYTES = whole
    attention.PIECE_BYTES = piece_bytes


# ---- paged decode ---------------------------------------------------------------------------------------------------


def decoder(tiny: bool, dtype: str) -> Any:
    """Return a model of one layer, of which only the heads count."""
    from rolljax.model.decoder import Model
    from rolljax.model.families.qwen3 import Qwen3Config

    heads, kv_heads, size = (4, 2, 16) if tiny else (16, 8, 128)
    return Model(Qwen3Config(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=size), dtype)


def paths(piece: Piece, row: dict[str, Any], model: Any, rows: int, width: int, page: int) -> Any:
    """Yield a row and the paths of prefill and decode by name; record the paths that cannot run."""
    from rolljax.errors import ConfigError
    from rolljax.sampler.kernels import Name, paths_for

    mesh, sizes = one_device_mesh(), {"num_pages": rows * width, "rows": rows, "width": width, "page_size": page}
    for name in get_args(Name):
        named = row | {"implementation": name}
        try:
            yield named, *paths_for(piece.platform, name, model, mesh, **sizes)
        except ConfigError as reason:
            piece.record(named | {"cannot": reason.message})


def paged_errors(piece: Piece) -> None:
    """Check one decode step of rows of several lengths, over pages that a prefill has written."""
    import jax
    import jax.numpy as jnp

    from rolljax.model import attention
    from rolljax.sampler.kv import PageTable

    rows, width, page = (3, 4, 16) if piece.tiny else (8, 64, 16)
    context = width * page - 1
    length = jnp.linspace(1, context, rows).astype(jnp.int32)
    table = jax.random.permutation(jax.random.key(1), rows * width).reshape(rows, width).astype(jnp.int32)
    for dtype in BOUNDS:
        model = decoder(piece.tiny, dtype)
        cfg = model.cfg
        shape = lambda n, heads, cfg=cfg: (rows, n, heads, cfg.head_dim)  # noqa: E731
        keys = jax.random.split(jax.random.key(2), 4)
        k, v = (jax.random.normal(key, shape(context, cfg.num_kv_heads), dtype) for key in keys[:2])
        q = jax.random.normal(keys[2], shape(context, cfg.num_heads), dtype)
        new = [jax.random.normal(keys[3], shape(1, n), dtype) for n in (cfg.num_heads, *[cfg.num_kv_heads] * 2)]
        seen = (jnp.arange(context + 1) < length[:, None]) | (jnp.arange(context + 1) == context)
        both = [jnp.concatenate([old, one], 1) for old, one in zip((k, v), new[1:], strict=True)]
        wanted = exact(jax.jit(attention.attention), new[0], *both, seen[:, None])
        for row, prefill, decode in paths(piece, {"what": "paged decode", "dtype": dtype}, model, rows, width, page):

            @jax.jit
            def step(q: Any, k: Any, v: Any, new: Any, prefill: Any = prefill, decode: Any = decode) -> Any:
                pool = jnp.zeros(prefill.pool_shape(rows * width), prefill.pool_dtype)
                reading, cache = prefill.open(pool, PageTable(table, jnp.zeros(rows, jnp.int32)), context, 0)
                _, cache = prefill.attend(reading, 0, length)(q, k, v, cache, 0)
                pool = prefill.close(pool, reading, cache, length)
                ones = jnp.ones(rows, jnp.int32)
                reading, cache = decode.open(pool, PageTable(table, length), 1, width)
                return decode.attend(reading, 0, ones)(*new, cache, 0)[0]

            with piece.attempt(row) as row:
                judge(piece, row, step(q, k, v, new), wanted)


def prefill_errors(piece: Piece) -> None:
    """Check a prefill in two chunks; the second reads pages that the first has written. 'dense' prefills by XLA,
    'triton' by cuDNN where 'auto' takes it."""
    import jax
    import jax.numpy as jnp

    from rolljax.model import attention
    from rolljax.sampler.kv import PageTable

    rows, width, page = (2, 4, 16) if piece.tiny else (4, 32, 16)
    context = width * page
    half = context // 2
    table = jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
    for dtype in BOUNDS:
        model = decoder(piece.tiny, dtype)
        heads = (model.cfg.num_heads, *[model.cfg.num_kv_heads] * 2)
        keys = jax.random.split(jax.random.key(5), 3)
        qkv = [
            jax.random.normal(key, (rows, context, n, model.cfg.head_dim), dtype)
            for key, n in zip(keys, heads, strict=True)
        ]
        causal = jnp.broadcast_to(jnp.tri(context, dtype=bool), (rows, context, context))
        wanted = exact(jax.jit(attention.attention), *qkv, causal)
        for row, prefill, _ in paths(piece, {"what": "paged prefill", "dtype": dtype}, model, rows, width, page):

            @jax.jit
            def chunks(qkv: Any, prefill: Any = prefill) -> Any:
                pool = jnp.zeros(prefill.pool_shape(rows * width), prefill.pool_dtype)
                mixed, count = [], jnp.full(rows, half, jnp.int32)
                for start, read in ((0, 0), (half, width // 2)):
                    reading, cache = prefill.open(pool, PageTable(table, jnp.full(rows, start, jnp.int32)), half, read)
                    part = [x[:, start : start + half] for x in qkv]
                    out, cache = prefill.attend(reading, 0, count)(*part, cache, 0)
                    pool = prefill.close(pool, reading, cache, count)
                    mixed.append(out)
                return jnp.concatenate(mixed, 1)

            with piece.attempt(row) as row:
                found = chunks(qkv)
                judge(piece, row, found, wanted)
                row["repeatable"] = same_bits(found, chunks(qkv))


# ---- vocabulary and experts -----------------------------------------------------------------------------------------


def vocabulary_errors(piece: Piece) -> None:
    """Check log-probs and entropies without all logits at once: values, and gradients of hidden states and head."""
    import jax
    import jax.numpy as jnp

    from rolljax.trainer.vocab import token_logp

    tokens, hidden, vocabulary = (24, 16, 1024) if piece.tiny else (1024, 1024, 32_768)
    keys = jax.random.split(jax.random.key(3), 3)
    targets = jax.random.randint(keys[0], (tokens,), 0, vocabulary)
    scale = hidden**-0.5

    def plain(x: Any, head: Any) -> Any:
        logp = jax.nn.log_softmax(x @ head.T)
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        return jnp.stack([jnp.take_along_axis(logp, targets[:, None], 1)[:, 0], entropy])

    for dtype in BOUNDS:
        x = jax.random.normal(keys[1], (tokens, hidden), dtype)
        head = (jax.random.normal(keys[2], (vocabulary, hidden)) * scale).astype(dtype)
        weight = jnp.linspace(-1, 1, 2 * tokens).reshape(2, tokens)
        wanted = exact(with_gradients(plain, weight), x, head)
        for blocks in (4,) if piece.tiny else (1, 4, 32):
            row = {"what": "vocabulary", "implementation": f"{blocks} blocks", "dtype": dtype}
            size = 4 * tokens * vocabulary // blocks

            def chunked(x: Any, head: Any, size: int = size) -> Any:
                return jnp.stack(token_logp(x, head, targets, entropy_grad=True, block_bytes=size))

            with piece.attempt(row) as row:
                judge(piece, row, with_gradients(chunked, weight)(x, head), wanted)


def expert_errors(piece: Piece) -> None:
    """Check a mixture of experts: output, and gradients of tokens, weights of the choices, and experts."""
    import jax
    import jax.numpy as jnp

    from rolljax.model import moe

    tokens, hidden, ffn, num, each = (16, 8, 12, 4, 2) if piece.tiny else (2048, 512, 256, 32, 4)
    keys = jax.random.split(jax.random.key(4), 6)
    chosen = jax.random.uniform(keys[0], (1, tokens, num)).argsort(-1)[..., :each]

    def plain(x: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
        share = jnp.sum(jax.nn.one_hot(chosen, num, dtype=x.dtype) * weights[..., None], 2)
        return jnp.einsum("btef,efd,bte->btd", h, down, share)

    def sparse(x: Any, weights: Any, *experts: Any) -> Any:
        return moe.mixed(x, chosen, weights, moe.ExpertWeights(*experts))

    for dtype in BOUNDS:
        shapes = [(1, tokens, hidden), (1, tokens, each), (num, hidden, ffn), (num, hidden, ffn), (num, ffn, hidden)]
        scales = (1.0, 1.0, hidden**-0.5, hidden**-0.5, ffn**-0.5)
        args = [
            (jax.random.normal(key, shape) * scale).astype(dtype)
            for key, shape, scale in zip(keys[1:], shapes, scales, strict=True)
        ]
        weight = jnp.linspace(-1, 1, tokens)[None, :, None]
        wanted = exact(with_gradients(plain, weight), *args)
        implementation = "megablox" if piece.platform == "tpu" else "ragged_dot"
        row = {"what": "experts", "implementation": implementation, "dtype": dtype}
        with piece.attempt(row) as row:
            judge(piece, row, with_gradients(sparse, weight)(*args), wanted)


if __name__ == "__main__":
    main("numerics", body, estimate, is_timed=False)
