"""What of Terminal environments (blog, February 2026) is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="",
    name="Terminal environments (blog, February 2026)",
    claim="graders that a policy cannot fool",
    there="about 40 % of the false positives removed",
    here="no answer of tests/e2e/test_sandbox_hacks.py passes without being right",
    state="partly",
    why="there is no count of false positives before and after, and no figure",
)
