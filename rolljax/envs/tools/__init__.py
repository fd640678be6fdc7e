"""Tools for policies: Python functions, MCP servers, a sandbox; and the environment that runs their calls."""

from rolljax.envs.tools.base import (
    JoinedTools,
    JoinedToolSet,
    ToolCall,
    ToolError,
    ToolLimits,
    ToolResult,
    Tools,
    ToolSet,
    ToolSpec,
)
from rolljax.envs.tools.env import ToolEnv
from rolljax.envs.tools.functions import FunctionToolSet, PythonTools
from rolljax.envs.tools.mcp_client import McpTools
from rolljax.envs.tools.parsers import PARSERS
from rolljax.envs.tools.verbs import SandboxTools

__all__ = [
    "PARSERS",
    "FunctionToolSet",
    "JoinedToolSet",
    "JoinedTools",
    "McpTools",
    "PythonTools",
    "SandboxTools",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolLimits",
    "ToolResult",
    "ToolSet",
    "ToolSpec",
    "Tools",
]
