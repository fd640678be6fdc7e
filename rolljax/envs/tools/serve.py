"""Any tools as an MCP server: `python -m rolljax.envs.tools.serve calculator`.

NAME is one of `NAMES`, or the import path of `Tools`, of a `ToolSet`, or of a function.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import socket
import sys
from collections.abc import Sequence
from typing import Any

from rolljax.envs.tools.base import DEFAULT_LIMITS, ToolLimits, Tools, ToolSet, plain
from rolljax.envs.tools.functions import FunctionToolSet
from rolljax.errors import ConfigError, RolljaxError

NAMES = {"calculator": "rolljax.envs.tools.calculator.TOOLS"}
"""Short name -> import path."""


def mcp_server(tools: ToolSet, name: str = "rolljax", limits: ToolLimits = DEFAULT_LIMITS) -> Any:
    """Return a `Server` of the MCP SDK over a tool set. Its `.streamable_http_app()` can be mounted into another web
    app.

    Calls run in threads, so that a hanging call does not block others; no result is larger than `limits.kept_bytes`.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("needs the MCP SDK", setting="mcp_server", remedy="pip install 'rolljax[tools]'")
    import anyio
    import mcp_types as types
    from mcp.server.lowlevel import Server

    async def listed(_: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=spec.name,
                    description=spec.description or None,
                    input_schema=dict(spec.input_schema),
                    annotations=types.ToolAnnotations.model_validate(spec.annotations) if spec.annotations else None,
                )
                for spec in tools.list()
            ]
        )

    threads = anyio.CapacityLimiter(limits.concurrency)

    async def called(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        def call() -> types.CallToolResult:
            result = tools.call(params.name, params.arguments or {}, limits)
            return types.CallToolResult(
                content=[types.TextContent(type="text", text=result.text)],
                structured_content=_object(result.structured),
                is_error=result.is_error,
            )

        return await anyio.to_thread.run_sync(call, limiter=threads, abandon_on_cancel=True)

    return Server(name, on_list_tools=listed, on_call_tool=called)


def _object(value: Any) -> dict[str, Any] | None:
    """Return a structured result that clients of any protocol version accept; None for other values."""
    try:
        return plain(value) if isinstance(value, dict) else None
    except ValueError:
        return None


def tools_of(name: str) -> ToolSet:
    """Return the tool set of a name or an import path."""
    path = NAMES.get(name, name)
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        remedy = f"one of {', '.join(NAMES)}, or module.attribute"
        raise ConfigError(f"cannot be imported: {e}", setting="NAME", value=name, remedy=remedy) from e
    if isinstance(found, Tools):
        return found.open()
    return found if isinstance(found, ToolSet) else FunctionToolSet([found])


async def _stdio(server: Any) -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def _http(server: Any, port: int) -> None:
    import uvicorn

    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        bound.listen(128)
        sys.stdout.write(f"http://127.0.0.1:{bound.getsockname()[1]}/mcp\n")
        sys.stdout.flush()
        app = server.streamable_http_app()
        await uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on")).serve(sockets=[bound])


def main(argv: Sequence[str] | None = None) -> int:
    """Serve named tools over MCP; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.envs.tools.serve", description=__doc__)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--http", type=int, metavar="PORT", help="on 127.0.0.1 (0: any free port); default: stdio")
    args = parser.parse_args(argv)
    try:
        tools = tools_of(args.name)
        server = mcp_server(tools, args.name)
    except RolljaxError as e:
        sys.stderr.write(f"{e}\n")
        return e.exit_code
    try:
        asyncio.run(_stdio(server) if args.http is None else _http(server, args.http))
    except KeyboardInterrupt:
        pass
    finally:
        tools.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
