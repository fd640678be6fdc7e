"""What of RecGPT is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2507.22879",
    name="RecGPT",
    claim="tags fused with retrieval beat either",
    there="HR@30 .3776",
    here="HR@30 .85; collaboration alone .54, tags alone .65 (synthetic users)",
    state="shown",
    seeds=3,
    config="recgpt",
    figure="rolljax/recipes/recgpt/recgpt.png",
)
