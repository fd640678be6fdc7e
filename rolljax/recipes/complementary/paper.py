"""What of Complementary RL is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2603.17621",
    name="Complementary RL",
    claim="an agent and its memory of experience learn together",
    there="10 % better; .82 and .78 of two tasks, before .75",
    here="with an experience .9 of doors opened after 18, 24, 34 rounds, without a bank at most .53 in 27 to 50",
    state="partly",
    seeds=3,
    config="complementary/actor",
    figure="rolljax/recipes/complementary/bank.png",
    why="without an experience the actor is no better than without a bank (.32 both); nor where success is rare, in "
    "five seeds, with a bank that is given or the extractor's own",
)
