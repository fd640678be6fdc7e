"""What of Think-J is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2505.14268",
    name="Think-J",
    claim="preferences alone train a judge that thinks",
    there="RewardBench .905 (8B)",
    here="from .81 to .94 and .96 of held-out pairs, offline and online; a constant judge .5",
    state="shown",
    seeds=3,
    config="think_j",
    figure="rolljax/recipes/think_j/think_j.png",
)
