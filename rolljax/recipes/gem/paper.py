"""What of GEM is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2510.01051",
    name="GEM",
    claim="returns of turns with a discount, normalised over the batch",
    there="baselines on 24 environments",
    here="eight environments: all of PPO, GRPO, REINFORCE and ReBN learn four (guess a number: .39 to .89 and more)",
    state="partly",
    seeds=3,
    config="gem",
    figure="rolljax/recipes/gem/gem.png",
    why="ReBN is no better than the others; with a discount of .9 a table of logits takes 2.92 turns instead of 3.46",
)
