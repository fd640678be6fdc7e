"""What of LiveThinking is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2510.07685",
    name="LiveThinking",
    claim="rejection tuning and RL with a band of lengths make a small model right, helpful and brief",
    there="right/helpful/tokens: teacher 89/75/341, base 67/57/396, tuned 81/77, RL only 88/90/152, both 92/97/152",
    here="teacher .99/.47/81, base .91/.33/84, tuned .95/.91/74, RL only .93/.92/46, both .92/.98/47",
    state="partly",
    seeds=3,
    config="live_thinking",
    figure="rolljax/recipes/live_thinking/live_thinking.png",
    why="tuning makes answers helpful and RL brief; that both make more of them right than RL alone is not seen",
)
