"""What of STAgent is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2512.24957",
    name="STAgent",
    claim="tasks routed by a seed policy's success train faster",
    there="TravelBench",
    here="70 % of the middle band after 20 to 41 steps; on uniform tasks not within 150",
    state="partly",
    seeds=3,
    config="stagent",
    figure="rolljax/recipes/stagent/stagent.png",
    why="of the cascade: at a small travel desk an agent goes from .54 to .68, held out, and RL alone comes as far",
)
