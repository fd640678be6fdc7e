"""What of DLCoT is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2503.16385",
    name="DLCoT",
    claim="pruned chains of thought teach as well with fewer tokens",
    there="at least 5 % fewer tokens",
    here="41 % fewer tokens; .85 of the students' answers right, with raw chains .90",
    state="partly",
    seeds=3,
    config="dlcot",
    figure="rolljax/recipes/dlcot/dlcot.png",
    why="the difference, -.05, has an interval from -.13 to +.03; homologous traces teach better, on two seeds only",
)
