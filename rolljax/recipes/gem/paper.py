"""What of GEM is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2510.01051",
    name="GEM",
    claim="returns of turns with a discount, normalised over the batch",
    there="baselines on 24 environments",
    here="2.92 turns for a number of 10 with a discount of .9, 3.46 without",
    state="partly",
    seeds=3,
    config="gem",
    figure="docs/algorithms_bench.png",
    why="one game, as a table of logits; four algorithms on eight environments are a benchmark that was not run",
)
