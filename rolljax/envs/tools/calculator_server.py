"""The calculator as an MCP server: `python -m rolljax.envs.tools.calculator_server [--http PORT]`."""

from __future__ import annotations

import argparse
from typing import Any

from rolljax.envs.tools import calculator
from rolljax.envs.tools.base import ToolError


def server() -> Any:
    """Return an `MCPServer` of the SDK with the one tool."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError as ToldError

    made = MCPServer("calculator", log_level="CRITICAL")

    @made.tool(description=calculator.calc.__doc__, structured_output=False)
    def calc(expression: str) -> str:
        try:
            return calculator.calc(expression)
        except ToolError as e:
            raise ToldError(str(e)) from e

    return made


def main() -> None:
    """Serve the calculator over MCP; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", type=int, metavar="PORT", help="serve http://127.0.0.1:PORT/mcp (default: stdio)")
    port = parser.parse_args().http
    if port is None:
        server().run("stdio")
    else:
        server().run("streamable-http", host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
