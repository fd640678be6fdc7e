"""Times the copy of the trainer's float32 weights to the sampler's bfloat16: seconds and GB/s, on one device.

The rate counts the fewest bytes that the copy moves: it reads the float32 weights and writes the bfloat16 weights.
"""

from __future__ import annotations

from typing import Any

from common import Peaks, Piece, main, memory_peak_gib, one_device_mesh, random_weights, shapes, timed

COMPILE_S = 20.0
"""Taken for a shape's programs, with random weights."""


def estimate(tiny: bool, peaks: Peaks) -> float:
    return 15.0 + COMPILE_S * len(shapes(tiny))


def body(piece: Piece) -> None:
    for name, shape in shapes(piece.tiny).items():
        with piece.attempt({"what": "publish", "shape": name}) as row:
            row |= publish_figures(shape, piece.peaks)


def publish_figures(shape: Any, peaks: Peaks | None) -> dict[str, Any]:
    """Publish over the sampler's weights, as every step does; and compare what arrives, bit by bit."""
    import jax

    from rolljax.model.decoder import Model
    from rolljax.trainer.publish import checksums, differing, lies_apart, make_publish

    model, mesh = Model(shape, "bfloat16"), one_device_mesh()
    params, publish = random_weights(model, computed=False), make_publish(mesh, model)
    weights = publish(params)
    wanted = model.computed if not lies_apart(mesh) else lambda params: model.apart(model.computed(params))
    wrong = differing(checksums(jax.jit(wanted)(params)), checksums(weights))

    def again() -> Any:
        nonlocal weights
        weights = publish(params, weights)
        return weights

    found = timed(again, repeats=5, least_s=0.2)
    moved = sum(x.nbytes for tree in (params, weights) for x in jax.tree.leaves(tree))
    figures = {
        "weights_gb": sum(x.nbytes for x in jax.tree.leaves(weights)) / 1e9,
        "arrays_differing": len(wrong),
        "seconds": found.seconds,
        "spread": found.spread,
        "gb_s": moved / 1e9 / found.seconds,
        "first_s": found.first_s,
        "memory_peak_gib": memory_peak_gib(),
    }
    return figures | ({"of_peak": moved / found.seconds / peaks.hbm_bytes_s} if peaks else {})


if __name__ == "__main__":
    main("publish", body, estimate)
