"""What of USB is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2505.23793",
    name="USB",
    claim="safety and refusals of models, by kind of risk",
    there="SR and RR of models",
    here="",
    state="not shown",
    config="usb/judged",
    why="formulas and tables agree on artificial models; no published model was run, and images are not here",
)
