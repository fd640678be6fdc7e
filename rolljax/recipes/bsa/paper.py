"""What of Beyond Safe Answers is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2505.19690",
    name="Beyond Safe Answers",
    claim="safe answers often rest on unsafe reasoning",
    there="the best model 38.0 % (first version), 54.57 % (later)",
    here="",
    state="not shown",
    config="bsa/judged",
    why="formulas and the mitigation study run on artificial models only; no published model was judged",
)
