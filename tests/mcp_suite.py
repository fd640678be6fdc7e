"""What MCP's conformance suite asks of a server (`TOOLS`) and of a client: `python -m tests.mcp_suite URL` calls each tool."""

import sys

from rolljax.envs.tools.base import DEFAULT_LIMITS, ToolSpec
from rolljax.envs.tools.functions import FunctionToolSet
from rolljax.envs.tools.mcp_client import McpTools

DIALECT = ToolSpec(
    "json_schema_2020_12_tool",
    "Tool with JSON Schema 2020-12 features",
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
        },
        "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
        "additionalProperties": False,
    },
)


def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


def test_error_handling() -> str:
    """Fail."""
    raise ValueError("This tool intentionally returns an error for testing")


class SuiteTools(FunctionToolSet):
    """The tools that the suite calls, and one whose schema it reads."""

    def list(self):
        return (*super().list(), DIALECT)


TOOLS = SuiteTools((test_simple_text, test_error_handling))

if __name__ == "__main__":
    tools = McpTools(url=sys.argv[-1], shared=False).open()
    for spec in tools.list():
        result = tools.call(spec.name, dict.fromkeys(spec.parameters, 2), DEFAULT_LIMITS)
        assert not result.is_error, result
    tools.close()
