"""What of ALE and ROME is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2512.24873",
    name="ALE and ROME",
    claim="credit by turns, from starts after an expert's turns, trains long episodes",
    there="Terminal-Bench 2.0 24.72, SWE-bench Verified 57.40",
    here="eight doors: .93 to .95 from the first one, GRPO .00; five commands at a terminal: .73 to .96, GRPO .00",
    state="partly",
    seeds=3,
    config="agent_ipa",
    figure="rolljax/recipes/rome/agent_ipa.png",
    why="IPA is shown on small tasks, at the terminal no better than SFT; the agent at its size is not, "
    "and its data protocols only by their rules",
)
