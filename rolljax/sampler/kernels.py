"""Attention over KV pages by the kernels that JAX ships, and which path a device is given.

`SamplerConfig.attention` names a path. A named path that cannot run is refused with the reason. 'auto' takes the first
of the device's list that can run: `MEASURED` has the lists that a measurement on that kind of device has made,
`UNMEASURED` those of other devices.

`RaggedPath` (TPU) and `TritonPath` (GPU, decode steps) read pages where they lie: the pool is their cache, carried
through the layers and the decode steps and written in place, so nothing is copied and `close` has nothing to do. `kv`
defines a path. The compiler cannot partition the kernels: they run in a `shard_map` over every mesh axis that
is not manual yet, with the heads split over `tensor`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model.attention import Attend, Window
from rolljax.model.decoder import DecoderConfig, Model
from rolljax.model.implementations import implementation
from rolljax.sampler.kv import FP8, DensePath, PageTable, Path, by_block, by_row, copy_pages, in_pool
from rolljax.sampler.settings import MIN_CHUNK

LANES = 128
"""Width of a TPU's vectors: the last dimension of its arrays is padded to a multiple of this."""
SMEM_BYTES = 2**20
"""Scalar memory of a TPU core; the kernel keeps page tables and lengths in it, and about 4 KB of its own."""
VMEM_BYTES = 64 * 2**20
QUERIES_PER_BLOCK, PAGES_PER_BLOCK, TOKENS_PER_BLOCK = 32, 16, 1024
"""TPU: usual values in JAX's table of tuned sizes (it picks by the devices of this machine, so it cannot be asked)."""
GPU_TOKENS_PER_BLOCK, GPU_SPLITS = 64, 4
"""GPU: keys that a kernel takes at once, and into how many parts at most it splits a row."""
GPU_WARPS, GPU_STAGES = 4, 2
"""GPU: warps of a block, and loads that are under way at once."""


Name = Literal["dense", "ragged", "triton"]
MEASURED: dict[str, tuple[Name, ...]] = {"NVIDIA H100 80GB HBM3": ("triton",), "NVIDIA H200": ("triton",)}
"""Paths of decode steps by `jax.Device.device_kind`, fastest first (docs/scaling.md says how to add an entry)."""
UNMEASURED: dict[str, tuple[Name, ...]] = {"tpu": ("ragged",)}
"""Paths by platform, for devices that are not in `MEASURED`; `DensePath` is its end."""


def why_not(name: Name, platform: str, cfg: DecoderConfig, page_size: int, fp8: bool) -> str:
    """Return why a path cannot run on that platform with those sizes; "" if it can."""
    if name == "ragged":
        return "" if platform == "tpu" else "needs a TPU"
    if name == "dense":
        return ""
    if platform != "gpu":
        return "needs a GPU"
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"needs Pallas for Triton, which JAX {jax.__version__} no longer has"
    if page_size & (page_size - 1) or cfg.head_dim & (cfg.head_dim - 1) or cfg.head_dim < 16:
        return f"takes pages and heads that are powers of two, heads from 16, not {page_size} and {cfg.head_dim}"
    if cfg.window is not None:
        return "has no sliding windows, which this model has"
    return "reads no float8 pages" if fp8 else ""


def paths_for(
    platform: str,
    attention: Literal["auto"] | Name,
    model: Model,
    mesh: Mesh,
    *,
    page_size: int,
    num_pages: int,
    rows: int,
    width: int,
    unroll: bool = False,
    fp8: bool = False,
) -> tuple[Path, Path]:
    """Return the paths of prefill and of decode steps on that platform; both use the same pool.

    Args:
      attention: see `SamplerConfig`.
      num_pages: pages of one batch shard. rows, width: most rows of a page table, and its pages per row.
      unroll: whether decode steps unroll the layers (`DensePath` only). fp8: whether the pool holds float8 numbers.

    Raises:
      ConfigError: the named path cannot run.
    """
    cfg, dtype = model.cfg, model.dtype
    if attention == "auto":
        known = MEASURED.get(mesh.devices.flat[0].device_kind) or UNMEASURED.get(platform, ())
        name = next((path for path in known if not why_not(path, platform, cfg, page_size, fp8)), "dense")
    else:
        name = attention
        if reason := why_not(name, platform, cfg, page_size, fp8):
            remedy = "'auto', or 'dense', which runs anywhere"
            raise ConfigError(reason, setting="SamplerConfig.attention", value=name, remedy=remedy)
    if name == "ragged":
        ragged = RaggedPath(cfg, dtype, page_size, num_pages, mesh, fp8)
        ragged.check(rows, width)
        return ragged, ragged
    dense = DensePath(cfg, dtype, page_size, num_pages, False, as_bits=platform == "cpu", fp8=fp8)
    chunk = (rows, MIN_CHUNK, cfg.num_heads, cfg.head_dim)
    may = attention != "dense" and mesh.size == 1 and page_size % 2 == 0  # cuDNN takes even numbers of keys
    if may and implementation("auto", mesh, chunk, dtype) == "cudnn":
        dense = dataclasses.replace(dense, chunks_by_cudnn=True)
    if name == "triton":
        return dense, TritonPath(cfg, dtype, page_size, num_pages, False, mesh)
    return dense, dataclasses.replace(dense, unroll=unroll)


@dataclasses.dataclass(frozen=True)
class RaggedPath:
    """TPU: JAX's Pallas kernel `ragged_paged_attention`, one call per layer, for prefill and decode steps alike.

    A head size that is no multiple of 128 is padded with zeros to one.
    """

    cfg: DecoderConfig
    dtype: str
    """Float32 or bfloat16."""
    page_size: int
    num_pages: int
    """Number of KV pages of one batch shard."""
    mesh: Mesh
    fp8: bool = False
    """The pool holds float8 numbers (`kv.in_pool`)."""
    head_axis = 2
    cascades = False
    sized = False

    @property
    def pool_dtype(self) -> str:
        return FP8 if self.fp8 else self.dtype

    def check(self, rows: int, width: int) -> None:
        """Raise `ConfigError` unless the kernel takes this model's heads, and page tables `[rows, width]`."""
        tensor, heads = self.mesh.shape.get("tensor", 1), self.cfg.num_kv_heads
        each = 2 * jnp.dtype(self.pool_dtype).itemsize  # bytes of a head's key and value
        words = heads // tensor * each / 4  # of 32 bits: the unit that tiles are made of
        if heads % tensor or (words not in (1, 2, 4) and words % 8):
            least = max(1, 4 // each)
            raise ConfigError(
                f"leaves {heads / tensor:g} of {heads} key/value heads to a device, which the TPU kernel cannot tile",
                setting="MeshSpec.tensor",
                value=tensor,
                remedy=f"leave {least}, {2 * least}, {4 * least} or a multiple of {8 * least} heads to each device"
                + (", or set SamplerConfig.kv_dtype = 'auto'" if self.fp8 else ""),
            )
        tiled = -(-rows // 8) * 8  # rows of a table are padded to 8, pages per row to 128
        fits = (SMEM_BYTES - 4096 - 8 * rows) // (4 * tiled) // LANES * LANES
        if fits >= width:
            return
        size = 1 << (-(-width * self.page_size // fits) - 1).bit_length() if fits > 0 else 0
        raise ConfigError(
            f"makes page tables of {rows} x {width} per batch shard, more than a TPU core's scalar memory holds",
            setting="SamplerConfig.page_size" if size else "SamplerConfig.slots",
            value=self.page_size if size else rows,
            remedy=f"page_size={size}, or fewer slots" if size else "at most 2000 slots per batch shard",
        )

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Return `[L * pages, page, 2 * K, C]`: for each token the keys of head 0, its values, the keys of head 1,
        ..."""
        cfg = self.cfg
        return (cfg.num_layers * num_pages, self.page_size, 2 * cfg.num_kv_heads, -(-cfg.head_dim // LANES) * LANES)

    def copy_pages(self, pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
        return copy_pages(pool, self.cfg.num_layers, source, target)

    def open(self, pool: jax.Array, pages: PageTable, room: int, read: int) -> tuple[PageTable, jax.Array]:
        del room, read
        assert pages.shared is None, "the TPU kernel does not return what a softmax over two calls needs"
        return pages, pool

    def attend(self, reading: PageTable, first: jax.Array | int, count_B: jax.Array) -> Attend:
        # The kernel lines up a row's last query with its last key, so a row whose tokens end in padding is given keys
        # for the padding, too. What those hold does not matter: no query that counts sees them.
        start_B = jnp.where(count_B > 0, reading.length + first, 0)

        def local(
            q_BTHC: jax.Array,
            k_BTKC: jax.Array,
            v_BTKC: jax.Array,
            pool: jax.Array,
            table_BW: jax.Array,
            start_B: jax.Array,
            count_B: jax.Array,
            layer: jax.Array,
            on: jax.Array,
            *,
            size: int | None,
        ) -> tuple[jax.Array, jax.Array]:
            B, T, H, C = q_BTHC.shape
            pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pool.shape[3] - C)))  # noqa: E731
            new = jnp.stack([pad(k_BTKC), pad(v_BTKC)], axis=3).reshape(B * T, *pool.shape[2:])
            page, offset = _write_positions(
                table_BW, start_B, count_B, T, layer * self.num_pages, len(pool), self.page_size
            )
            flat = pool.reshape(-1, *pool.shape[2:])
            row = (page * self.page_size + offset).reshape(-1)
            flat = flat.at[row].set(in_pool(new, self.pool_dtype), mode="drop", unique_indices=True)
            pool = flat.reshape(pool.shape)
            table = jnp.maximum(table_BW, 0) + layer * self.num_pages
            args = pad(q_BTHC).reshape(B * T, H, -1), pool, table, start_B + T
            near = lambda *args: self._kernel(*args, tokens=T, window=size)  # noqa: E731
            full = lambda *args: self._kernel(*args, tokens=T, window=None)  # noqa: E731
            mixed = full(*args) if size is None else jax.lax.cond(on, near, full, *args)
            return mixed.reshape(B, T, H, -1)[..., :C], pool

        def attend(
            q_BTHC: jax.Array,
            k_BTKC: jax.Array,
            v_BTKC: jax.Array,
            cache: Any,
            layer: jax.Array | int,
            window: Window | None = None,
        ) -> tuple[jax.Array, jax.Array]:
            size, on = window or Window(None, False)
            run = _over_heads(self.mesh, functools.partial(local, size=size), pool_axis=self.head_axis)
            unsplit = reading.own, start_B, count_B, jnp.int32(layer), jnp.asarray(on)
            return run(q_BTHC, k_BTKC, v_BTKC, cache, *unsplit)

        return attend

    def close(self, pool: jax.Array, reading: PageTable, cache: jax.Array, count_B: jax.Array) -> jax.Array:
        del pool, reading, count_B
        return cache

    def _kernel(
        self,
        q_NHC: jax.Array,
        pool: jax.Array,
        table_BW: jax.Array,
        length_B: jax.Array,
        *,
        tokens: int,
        window: int | None,
    ) -> jax.Array:
        """Attend with `tokens` queries of each row to its first `length` keys, or to the keys of its last `window`
        tokens; the last query is at the position of the last key."""
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        B, W = table_BW.shape
        return ragged_paged_attention(
            q_NHC if self.fp8 else q_NHC.astype(pool.dtype),
            pool,
            length_B,
            table_BW,
            jnp.arange(B + 1, dtype=jnp.int32) * tokens,
            jnp.full(1, B, jnp.int32),
            sm_scale=self.cfg.head_dim**-0.5,
            sliding_window=window,
            num_kv_pages_per_block=max(1, min(W, PAGES_PER_BLOCK, TOKENS_PER_BLOCK // self.page_size)),
            num_queries_per_block=min(B * tokens, QUERIES_PER_BLOCK),
            vmem_limit_bytes=VMEM_BYTES,
            **({"k_scale": 1.0, "v_scale": 1.0} if self.fp8 else {}),  # with scales it converts what it reads
        ).astype(q_NHC.dtype)


@dataclasses.dataclass(frozen=True)
class TritonPath(DensePath):
    """GPU, decode steps: JAX's Pallas (Triton) kernel for paged attention over the pool of `DensePath`.

    JAX 0.11 and later call this kernel deprecated.
    """

    mesh: Mesh
    interpret: bool = False
    """Run the kernel in Pallas' interpreter, on any device."""
    sized = False

    def open(self, pool: jax.Array, pages: PageTable, room: int, read: int) -> tuple[Any, jax.Array]:
        del room, read
        return pages, pool

    def attend(self, reading: Any, first: jax.Array | int, count_B: jax.Array) -> Attend:
        _, own_B = reading.split_length(self.page_size)
        start_B = jnp.where(count_B > 0, own_B + first, 0)
        shared = None if reading.shared is None else (reading.shared, reading.shared_length(self.page_size))

        def local(
            q_B1HC: jax.Array,
            k_B1KC: jax.Array,
            v_B1KC: jax.Array,
            pool: jax.Array,
            table_BW: jax.Array,
            start_B: jax.Array,
            count_B: jax.Array,
            layer: jax.Array,
            shared: tuple[jax.Array, jax.Array] | None,
        ) -> tuple[jax.Array, jax.Array]:
            B, _, K, C = k_B1KC.shape
            new = jnp.stack([k_B1KC[:, 0], v_B1KC[:, 0]], axis=2).reshape(B, 2 * K, C)
            page, offset = _write_positions(
                table_BW, start_B, count_B, 1, layer * self.num_pages, len(pool), self.page_size
            )
            pool = pool.at[page[:, 0], :, offset[:, 0]].set(new.astype(pool.dtype), mode="drop", unique_indices=True)
            q = q_B1HC.reshape(B, K, -1, C) * C**-0.5
            parts = [self._kernel(q, pool, table_BW, start_B + 1, layer)]
            if shared is not None:
                found = self._kernel(by_block(q, len(shared[0])), pool, *shared, layer)
                parts.append([jax.vmap(lambda x: by_row(x, B))(x) for x in found])
            mixed, total, largest = (jnp.concatenate(x) for x in zip(*parts, strict=True))
            share = jnp.exp(largest - jnp.max(largest, axis=0))  # of each part in the softmax over all of them
            mixed = jnp.sum(mixed * share[..., None], axis=0) / jnp.sum(total * share, axis=0)[..., None]
            return mixed.reshape(q_B1HC.shape).astype(q_B1HC.dtype), pool

        def attend(
            q_BTHC: jax.Array,
            k_BTKC: jax.Array,
            v_BTKC: jax.Array,
            cache: Any,
            layer: jax.Array | int,
            window: Window | None = None,
        ) -> tuple[jax.Array, jax.Array]:
            if window is not None:
                raise NotImplementedError("the GPU kernel has no windows")  # `why_not` has refused the model
            run = _over_heads(self.mesh, local, pool_axis=self.head_axis)
            unsplit = reading.own, start_B, count_B, jnp.int32(layer), shared
            return run(q_BTHC, k_BTKC, v_BTKC, cache, *unsplit)

        return attend

    def close(self, pool: jax.Array, reading: Any, cache: jax.Array, count_B: jax.Array) -> jax.Array:
        del pool, reading, count_B
        return cache

    def _kernel(
        self, q_BKQC: jax.Array, pool: jax.Array, table_BW: jax.Array, length_B: jax.Array, layer: jax.Array
    ) -> Sequence[jax.Array]:
        """Attend with `Q` queries for each key head of a row to the row's first `length` keys.

        Returns:
          For each part `s` of the keys `[s, B, K, Q, C]` the values, weighted by the exponentials of scores less their
          maximum, and `[s, B, K, Q]` the sum of these exponentials, and the maximum.

        JAX's `paged_attention` wants keys and values in two pools, heads first. Its kernel works on one head at a time
        and accepts our pool too: the block specs below select the keys and values of that head inside the pages. A row
        is split into parts that run in parallel.
        """
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton
        from jax.experimental.pallas.ops.gpu import paged_attention as gpu

        (B, K, Q, C), N, P = q_BKQC.shape, len(pool), self.page_size
        G = max(16, 1 << (Q - 1).bit_length())  # queries of one head, padded to what a matrix product takes
        per_block = max(1, GPU_TOKENS_PER_BLOCK // P)
        splits = min(GPU_SPLITS, -(-table_BW.shape[1] // per_block))
        table_BW = jnp.maximum(table_BW, 0) + layer * self.num_pages
        table = jnp.pad(table_BW, ((0, 0), (0, -table_BW.shape[1] % (per_block * splits)))).reshape(B, splits, -1)
        q = jnp.pad(q_BKQC, ((0, 0), (0, 0), (0, G - Q), (0, 0)))
        found = pl.pallas_call(
            functools.partial(
                gpu.paged_attention_kernel,
                num_heads=Q,
                pages_per_compute_block=per_block,
                mask_value=gpu.DEFAULT_MASK_VALUE,
                attn_logits_soft_cap=None,
            ),
            grid=(B, K, splits),
            in_specs=[
                pl.BlockSpec((None, None, G, C), lambda b, k, s: (b, k, 0, 0)),
                pl.BlockSpec((N, None, P, C), lambda b, k, s: (0, 2 * k, 0, 0)),
                None,
                pl.BlockSpec((N, None, P, C), lambda b, k, s: (0, 2 * k + 1, 0, 0)),
                None,
                pl.BlockSpec((None, None, table.shape[2]), lambda b, k, s: (b, s, 0)),
                pl.BlockSpec((None, 1), lambda b, k, s: (b, 0)),
            ],
            out_specs=[
                pl.BlockSpec((None, None, None, G, C), lambda b, k, s: (s, b, k, 0, 0)),
                pl.BlockSpec((None, None, None, G), lambda b, k, s: (s, b, k, 0)),
                pl.BlockSpec((None, None, None, G), lambda b, k, s: (s, b, k, 0)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((splits, B, K, G, C), jnp.float32),
                jax.ShapeDtypeStruct((splits, B, K, G), jnp.float32),
                jax.ShapeDtypeStruct((splits, B, K, G), jnp.float32),
            ],
            interpret=self.interpret,
            compiler_params=triton.CompilerParams(num_warps=GPU_WARPS, num_stages=GPU_STAGES),
            name="paged_attention",
        )(q.astype(pool.dtype), pool, None, pool, None, table, length_B[:, None])
        return [x[:, :, :, :Q] for x in found]


def _write_positions(
    table_BW: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    tokens: int,
    shift: jax.Array,
    num_pages: int,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return page and offset `[B, T]` of each row's next tokens; invalid ones get distinct pages past the pool.

    shift: where the layer's pages start. num_pages: of the pool, all layers. size: tokens per page.
    """
    B, W = table_BW.shape
    at_BT = start_B[:, None] + jnp.arange(tokens)
    page = jnp.take_along_axis(table_BW, jnp.minimum(at_BT // size, W - 1), axis=1) + shift
    holds = jnp.arange(tokens) < count_B[:, None]
    return jnp.where(holds, page, num_pages + jnp.arange(B * tokens).reshape(B, tokens)), at_BT % size


def _over_heads(mesh: Mesh, fn: Callable[..., Any], *, pool_axis: int) -> Callable[..., Any]:
    """Run `fn` on each device for its own heads.

    The arguments of `fn` are queries, keys and values `[B, T, heads, C]`, the pool, and others that are not split; it
    returns the mixed values and the pool.
    """
    outer = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(outer.manual_axes)
    tensor = "tensor" if "tensor" in axes else None
    heads, pool = PartitionSpec(None, None, tensor), PartitionSpec(*[None] * pool_axis, tensor)
    if not axes:
        return fn

    def run(q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, *unsplit: jax.Array) -> Any:
        specs = (heads, heads, heads, pool, *[PartitionSpec()] * len(unsplit))
        return jax.shard_map(
            fn,
            mesh=None if outer.manual_axes else mesh,
            in_specs=specs,
            out_specs=(heads, pool),
            axis_names=axes,
            check_vma=False,
        )(q, k, v, cache, *unsplit)

    return run
