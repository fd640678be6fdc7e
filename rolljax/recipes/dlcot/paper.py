"""What of DLCoT is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2503.16385",
    name="DLCoT",
    claim="pruned chains of thought teach as well with fewer tokens",
    there="at least 5 % fewer tokens",
    here="41 % fewer tokens; .83 of the students' answers right, with raw chains .87",
    state="partly",
    seeds=5,
    config="dlcot",
    figure="rolljax/recipes/dlcot/dlcot.png",
    why="the difference has an interval from -.08 to +.01; traces of the own method teach .55, others .04",
)
