"""curves.png: reward and health of a run over its steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (
    ("reward", ("reward/mean", "heldout/reward_mean")),
    ("entropy, nats", ("policy/entropy_nat",)),
    ("sampler against trainer, nats", ("mismatch/abs_max_nat",)),
    ("seconds per step", ("time/step_s", "time/rollout_s", "time/update_s")),
)


def draw(rows: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]], *, times: bool = True) -> bytes:
    """Draw the panels as a PNG. times: see `figure`."""
    return png(figure(rows, heldout, times=times))


def png(drawn: Figure) -> bytes:
    """Return a figure as a PNG."""
    image = io.BytesIO()
    drawn.savefig(image, format="png", dpi=110)
    return image.getvalue()


def figure(rows: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]], *, times: bool = True) -> Figure:
    """Draw the panels; lines separate phases, dots are held-out evaluations. The figure has no window and changes no
    setting of matplotlib, so any thread can draw it and other figures are unaffected.

    Args:
      times: include the panel of seconds; without it the pictures of equal runs are equal.
    """
    from matplotlib.figure import Figure

    panels = PANELS if times else [panel for panel in PANELS if not panel[0].startswith("seconds")]
    shape, size = ((2, 2), (11, 6)) if times else ((1, len(panels)), (13, 3.5))
    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots(*shape)
    borders = [r["step"] for r, after in zip(rows, rows[1:], strict=False) if r.get("phase") != after.get("phase")]
    for axis, (title, names) in zip(axes.flat, panels, strict=True):
        for name in names:
            # in a supervised phase the reward is that of the reference answers: not a result, so not drawn
            points = [
                (r["step"], r[name]) for r in rows if name in r and (name != "reward/mean" or "tput/sample_tok_s" in r)
            ]
            if not points:
                continue
            style = {"marker": "o", "markersize": 4, "linewidth": 1} if name.startswith("heldout") else {"linewidth": 1}
            axis.plot(*zip(*points, strict=True), label=name, **style)
        if title == "reward":
            axis.plot(
                [e["step"] for e in heldout],
                [e["mean"] for e in heldout],
                "k*",
                markersize=11,
                label="held out, phase borders",
            )
            axis.set_ylim(-0.03, 1.03 if max((e["mean"] for e in heldout), default=0) <= 1 else None)
        if (title.startswith("sampler") or title.startswith("seconds")) and axis.lines:
            axis.set_yscale("log")
        for step in borders:
            axis.axvline(step, color="0.6", linewidth=1, linestyle=":")
        axis.set(title=title, xlabel="step")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    phases = list(dict.fromkeys(r.get("phase", "") for r in rows))
    drawn.suptitle("  |  ".join(phases), fontsize=10)
    return drawn
