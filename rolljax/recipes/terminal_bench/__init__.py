"""Tasks in a terminal: our own, and Harbor's folders, of which Terminal-Bench is one."""

ENVIRONMENTS = {"terminal": "rolljax.recipes.terminal_bench.terminal.TerminalTasks"}
PREFIXES = {"harbor": ("rolljax.recipes.terminal_bench.terminal.HarborTasks", "path")}
