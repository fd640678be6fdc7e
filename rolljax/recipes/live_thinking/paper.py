"""What of LiveThinking is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2510.07685",
    name="LiveThinking",
    claim="a reward for lengths within a band shortens thinking",
    there="152 tokens at 92.3/96.8, 30 times less compute",
    here="48 % of the length, without the band 93 %; accuracy never fell",
    state="partly",
    seeds=3,
    config="live_thinking",
    figure="rolljax/recipes/live_thinking/live_thinking.png",
    why="the band is shown; the distillation of a large reasoner before it is not here",
)
