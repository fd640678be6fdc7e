"""What of DLCoT is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2503.16385",
    name="DLCoT",
    claim="pruned chains of thought teach as well with fewer tokens",
    there="at least 5 % fewer tokens",
    here="41 % fewer tokens; .45 of the students' answers right, with raw chains .45",
    state="partly",
    seeds=3,
    config="dlcot",
    figure="rolljax/recipes/dlcot/dlcot.png",
    why="the seeds differ by more than a loss of accuracy would: .29 to .56",
)
