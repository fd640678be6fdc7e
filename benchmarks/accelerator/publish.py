"""From the trainer's float32 weights to the sampler's bfloat16: seconds and GB/s, on one device.

Bytes are those that the copy must move at least: the float32 weights are read, the bfloat16 weights written.
"""

from __future__ import annotations

import gc

from common import Peaks, Piece, main, memory_peak_gib, one_device_mesh, random_weights, shapes, timed

COMPILE_S = 20.0
"""Taken for a shape's programs, with random weights."""


def estimate(tiny: bool, peaks: Peaks) -> float:
    return 15.0 + COMPILE_S * len(shapes(tiny))


def body(piece: Piece) -> None:
    import jax

    from rolljax.model.decoder import Model
    from rolljax.trainer.publish import checksums, differing, make_publish

    mesh = one_device_mesh()
    for name, shape in shapes(piece.tiny).items():
        with piece.attempt({"what": "publish", "shape": name}) as row:
            model = Model(shape, "bfloat16")
            params = random_weights(model, computed=False)
            publish = make_publish(mesh, model)
            weights = publish(params)
            wanted = jax.jit(model.computed)(params)
            row["differing"] = differing(checksums(wanted), checksums(weights))
            del wanted

            def again() -> object:
                nonlocal weights
                weights = publish(params, weights)
                return weights

            time = timed(again, repeats=5, least_s=0.2)
            moved = sum(x.nbytes for tree in (params, weights) for x in jax.tree.leaves(tree))
            row |= {
                "weights_gb": sum(x.nbytes for x in jax.tree.leaves(weights)) / 1e9,
                "seconds": time.seconds,
                "spread": time.spread,
                "gb_s": moved / 1e9 / time.seconds,
                "first_s": time.first_s,
                "memory_peak_gib": memory_peak_gib(),
            }
            if piece.peaks:
                row["of_peak"] = moved / time.seconds / piece.peaks.hbm_bytes_s
        params = weights = None
        gc.collect()


if __name__ == "__main__":
    main("publish", body, estimate)
