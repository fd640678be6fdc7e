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
    why="routing helps on tasks of known difficulty; an agent at the travel desk learns, but no better for it",
)
