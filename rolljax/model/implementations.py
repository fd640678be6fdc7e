"""Chooses the implementation of attention in training: the requirements of each one, and the choice for a device.

`Recipe.attention` names one. A named implementation that cannot run is refused with the reason. 'auto' takes the first
of the device's list that can run: `MEASURED` has the lists that a measurement on that kind of device has made,
`UNMEASURED` those of other devices.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rolljax.errors import ConfigError
from rolljax.model import splash

Name = Literal["xla", "splash", "cudnn", "tokamax"]
NAMES: tuple[Name, ...] = get_args(Name)
Implementation = Literal["auto", Name]
"""'xla' runs anywhere. 'splash' are JAX's kernels for TPU (`model.splash`; on CPU they are interpreted, for tests).
'cudnn' are NVIDIA's kernels for GPU. 'tokamax' are those of the package tokamax for NVIDIA GPUs from Hopper on (Pallas,
Mosaic GPU). 'auto': the first of the device's list that can run and repeats its bits."""

MEASURED: dict[str, tuple[Name, ...]] = {"NVIDIA H100 80GB HBM3": ("cudnn",), "NVIDIA H200": ("cudnn",)}
"""Implementations by `jax.Device.device_kind`, fastest first.
docs/scaling.md describes how to make an entry from the rows of `benchmarks/accelerator/numerics.py`. An implementation
whose error is above its bound, or that does not repeat its bits, may not be listed (cuDNN repeats them with
`trainer.mesh.gradient_options`)."""
UNMEASURED: dict[str, tuple[Name, ...]] = {"tpu": ("splash", "xla"), "gpu": ("xla",), "cpu": ("xla",)}
"""Implementations by platform, for devices that are not in `MEASURED`."""


class Case(NamedTuple):
    """Attention to compute, as far as implementations care."""

    device: Any
    """One of the devices that compute the attention."""
    dtype: Any
    part: int
    """Queries of a row on one device."""
    head_dim: int
    """Numbers of a head."""

    @property
    def capability(self) -> float:
        """Compute capability of a GPU: 9.0 is Hopper. 0 for other devices."""
        return float(getattr(self.device, "compute_capability", 0))


def why_not(name: Name, case: Case) -> str:
    """Return why an implementation cannot compute a case; "" if it can."""
    return {"xla": lambda _: "", "splash": _no_splash, "cudnn": _no_cudnn, "tokamax": _no_tokamax}[name](case)


def implementation(how: Implementation, mesh: Mesh | None, shape_BTHC: tuple[int, ...], dtype: Any) -> Name:
    """Return the function that attends to full rows of queries `[B, T, H, C]`.

    Without a mesh 'auto' is XLA: the compiler cannot split kernels over devices.

    Raises:
      ConfigError: the named implementation cannot run.
    """
    case = _case(mesh, shape_BTHC, dtype)
    if how != "auto":
        if reason := why_not(how, case):
            remedy = "'auto', or 'xla', which runs anywhere"
            raise ConfigError(reason, setting="Recipe.attention", value=how, remedy=remedy)
        return how
    if mesh is None:
        return "xla"
    return next(name for name in (*_list_of(case.device), "xla") if not why_not(name, case))


def parts(mesh: Mesh | None) -> int:
    """Return the number of parts into which the mesh splits each row."""
    return mesh.shape.get("context", 1) if mesh else 1


def cudnn(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, mask_BTS: jax.Array, *, causal: bool) -> jax.Array:
    """Attend by cuDNN. The mask becomes an additive one, `[B, 1, T, S]` in the queries' dtype. causal: no query sees a
    later key, so that cuDNN leaves out that half."""
    return jax.nn.dot_product_attention(
        q_BTHC, k_BSKC, v_BSKC, mask=mask_BTS[:, None], is_causal=causal, implementation="cudnn"
    )


def tokamax(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, mask_BTS: jax.Array, *, causal: bool) -> jax.Array:
    """Attend by tokamax's kernels. They read the full mask, one byte per pair of tokens. causal: as in `cudnn`."""
    from tokamax import dot_product_attention

    return dot_product_attention(
        q_BTHC, k_BSKC, v_BSKC, mask=mask_BTS[:, None], is_causal=causal, implementation="mosaic"
    )


def _case(mesh: Mesh | None, shape_BTHC: tuple[int, ...], dtype: Any) -> Case:
    device = mesh.devices.flat[0] if mesh else jax.devices()[0]
    return Case(device, jnp.dtype(dtype), shape_BTHC[1] // parts(mesh), shape_BTHC[3])


def _list_of(device: Any) -> tuple[Name, ...]:
    return MEASURED.get(device.device_kind) or UNMEASURED.get(device.platform, ())


def _no_splash(case: Case) -> str:
    if case.device.platform == "gpu":
        return "needs a TPU"
    if case.part % splash.LANES:
        return f"takes parts of rows in multiples of {splash.LANES} tokens, not {case.part}"
    return ""


def _no_cudnn(case: Case) -> str:
    largest = 256 if case.capability >= 9 else 128
    if case.device.platform != "gpu":
        return "needs a GPU"
    if case.dtype != jnp.bfloat16:
        return f"computes in bfloat16, not {case.dtype}"
    if case.part % 2 or case.head_dim % 8 or case.head_dim > largest:
        return (
            f"takes heads of 8, 16, ... {largest} numbers and rows in even parts, not {case.head_dim} and {case.part}"
        )
    like = jax.ShapeDtypeStruct((1, case.part, 1, case.head_dim), case.dtype)
    mask = jax.ShapeDtypeStruct((1, case.part, case.part), bool)
    try:  # border: JAX knows whether there is a cuDNN, and what its version takes
        jax.eval_shape(lambda q, mask: jax.vjp(lambda q: cudnn(q, q, q, mask, causal=True), q)[1](q), like, mask)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"is refused by JAX {jax.__version__}: {error}"
    return ""


def _no_tokamax(case: Case) -> str:
    if case.device.platform != "gpu" or case.capability < 9:
        return "needs an NVIDIA GPU of compute capability 9.0 (Hopper) or later"
    if case.dtype != jnp.bfloat16:
        return f"computes gradients in bfloat16, not {case.dtype}"
    if importlib.util.find_spec("tokamax") is None:
        return "needs the package tokamax, which is not installed (it wants Python 3.12 and JAX 0.11)"
    return ""
