"""What of InstructGPT and of over-optimised reward models is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2203.02155",
    name="InstructGPT",
    claim="PPO on a reward model does what people want; too far, its score rises and the real reward falls",
    there="1.3B preferred to GPT-3 of 175B; Gao et al. show the fall",
    here="real reward .41 to .81, on the reward itself .88; weak model: .41 to .24, score .72 to 1.98",
    state="shown",
    seeds=3,
    config="reward_model_ppo",
    figure="rolljax/recipes/reward_model_ppo/reward_model_ppo.png",
)
