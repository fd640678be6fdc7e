"""Judges against a server that misbehaves in every way we know of: the right reward, or none."""

import asyncio

import pytest

from rolljax.chat_models.client import Endpoint, EndpointConfig, the_only_model
from rolljax.envs.adapters.rock import Rock
from rolljax.envs.tools.mcp_client import McpTools
from rolljax.errors import ConfigError, InfraError
from rolljax.types import Message
from tests.misbehaving import BEHAVIOURS, misbehaving
from tests.misbehaving_judges import DEADLINE_S, FATAL, JUDGES, Stalls, expected, names_of, rewards


@pytest.fixture(scope="module")
def address():
    with misbehaving() as address:
        yield address


@pytest.mark.parametrize("form", JUDGES)
def test_no_behaviour_of_a_server_is_a_wrong_reward(address, form):
    names = names_of(form)
    found, counts = rewards(form, address, names)
    assert found == expected(form, names) and len(names) > 150
    assert counts["cut"] == 3 and not counts["timeout"]
    for name in FATAL:
        assert rewards(form, address, [name])[0] == {name: None}


def test_a_deadline_fires_while_headers_or_a_body_are_read(address):
    names = names_of("score", slow=True)
    found, counts = rewards("score", address, names, DEADLINE_S)
    assert found == expected("score", names) and counts["timeout"] == counts["requests"] == len(names) > 6


def test_bytes_after_an_answer_are_not_the_next_answer(address):
    async def run():
        endpoint = Endpoint(EndpointConfig(f"{address}/v1", "m", concurrency=1, retries=0))
        asked = [Message("user", f"do {name}") for name in ("answers_twice", "plain", "longer_than_said", "plain")]
        found = []
        for message in asked:
            try:
                found.append((await endpoint.chat([message], {})).text)
            except InfraError:
                found.append(None)
        await endpoint.close()
        return found

    right = '{"score": 3}'
    assert asyncio.run(run()) == [right, right, None, right]


HARD = ("gzip_bomb", "gzip_cut", "drips_its_body", "drips_its_headers", "hangs_behind_headers", "error_without_end", "json_deep",
        "html", "charset_unknown", "infinity", "plain")  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_a_list_of_models_that_is_none_is_a_wrong_setting(address, name):
    with pytest.raises(ConfigError, match="does not list its models"):
        the_only_model(
            EndpointConfig(f"{address}/do={name}/v1", timeout_s=DEADLINE_S if BEHAVIOURS[name].slow else 30.0)
        )


@pytest.mark.parametrize("name", HARD)
def test_an_environment_of_such_a_server_fails_by_the_infrastructure(address, name):
    spec = Rock(address, env_id=f"do {name}", timeout_s=DEADLINE_S if BEHAVIOURS[name].slow else 30.0)
    with pytest.raises(InfraError):
        spec.make().reset(spec.task(0))


@pytest.mark.parametrize("name", ["gzip_bomb", "gzip_cut", "brotli", "body_without_end"])
def test_tools_of_such_a_server_fail_by_the_infrastructure(address, name):
    with pytest.raises(InfraError):
        McpTools(url=f"{address}/do={name}/mcp").open()


@pytest.mark.slow
@pytest.mark.parametrize("form", JUDGES)
def test_large_bodies_do_not_stop_the_event_loop(address, form):
    """The bound is ten times what was measured; `benchmarks/endpoint_faults.py` prints the figures."""
    names, stalls = names_of(form, heavy=True), Stalls()
    found, _ = rewards(form, address, names, stalls=stalls)
    assert found == expected(form, names) and len(names) > 8
    assert stalls.cpu_s < 2.0
