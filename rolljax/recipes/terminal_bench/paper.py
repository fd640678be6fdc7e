"""What of Terminal environments (blog, February 2026) is shown here."""

from __future__ import annotations

from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="",
    name="Terminal environments (blog, February 2026)",
    claim="tasks that are cleaned first, and graders that a policy cannot fool",
    there="about 40 % of early generated tasks were false positives",
    here="of 40 tasks 10, 10 and 13 false positives before playing them, 4, 1 and 4 after; no right task lost",
    state="partly",
    seeds=3,
    config="terminal_bench/cli_agent",
    why="the faults were planted, no model judged the tasks, and there is no picture",
)
