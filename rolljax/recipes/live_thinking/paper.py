"""What of LiveThinking is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2510.07685",
    name="LiveThinking",
    claim="rejection tuning and RL with a band of lengths make a small model right, helpful and brief",
    there="correct/helpful/tokens: teacher 89/75/341, base 67/57/396, tuned 81/77, RL only 88/90/152, both 92/97/152",
    here="teacher .99/.44/80, base .91/.30/84, tuned .93/.89/73, RL only .94/.92/44, both .96/.98/48",
    state="partly",
    seeds=2,
    config="live_thinking",
    figure="rolljax/recipes/live_thinking/live_thinking.png",
    why="that tuning before RL makes more answers right than RL alone is within the seeds' differences",
)
