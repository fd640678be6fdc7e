"""What of Reasoning Palette is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2512.17206",
    name="Reasoning Palette",
    claim="latent prefixes make samples differ in strategy, and RL finds strategies that it would not sample",
    there="RLOO 3.09 better (8B); pass@32 from 52.9 to 85.3",
    here="pass@8 from .333 to .844, .594, .781; GRPO .2 without prefixes, at least .95 with either schedule",
    state="partly",
    seeds=3,
    config="palette",
    figure="rolljax/recipes/palette/palette.png",
    why="random vectors of the same norm do as well: pass@8 .812, .667, .802, GRPO 1.000, .942, .946",
)
