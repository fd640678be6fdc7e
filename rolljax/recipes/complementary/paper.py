"""What of Complementary RL is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2603.17621",
    name="Complementary RL",
    claim="an agent and its memory of experience learn together",
    there="10 % better; .82 and .78 of two tasks, before .75",
    here="held out, without an experience, at step 100: .33 with a bank that is all right, .84 without a bank",
    state="not shown",
    seeds=2,
    config="complementary/actor",
    why="no learned bank helped, and one effect contradicts the paper",
)
