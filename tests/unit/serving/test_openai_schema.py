"""Answers and events against the schema that OpenAI publishes. No registry of packages has it: `OPENAI_OPENAPI` names the
file `openapi.json` of github.com/openai/openai-openapi, and without it the test is skipped."""

import json
import os
import random

import jsonschema
import pytest
import referencing
from referencing.jsonschema import DRAFT202012

from tests.unit.serving.test_apis import API, ASKED, PIECES, streamed, whole

SCHEMAS = {
    "chat": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "completions": ("CreateCompletionResponse", ""),
    "responses": ("Response", "ResponseStreamEvent"),
}
"""Names of the schemas of a whole answer and of an event of a stream, by API. Events of completions have none: theirs, and
OpenAI's, are whole answers whose finish reason is null until the last one."""


def of_today(schema):
    """Return a schema with `null` among its types where it is `nullable`, which later versions of OpenAPI do not know."""
    if isinstance(schema, list):
        return [of_today(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: of_today(part) for key, part in schema.items()}
    return {"anyOf": [schema, {"type": "null"}]} if schema.pop("nullable", False) is True else schema


@pytest.fixture(scope="module")
def validator():
    """Return a function to the validator of a schema of this name."""
    path = os.environ.get("OPENAI_OPENAPI", "")
    if not path:
        pytest.skip("OPENAI_OPENAPI does not name OpenAI's openapi.json")
    with open(path) as f:
        published = referencing.Resource(of_today(json.load(f)), DRAFT202012)
    registry = referencing.Registry().with_resource("urn:openai", published)

    def of(name):
        return jsonschema.Draft202012Validator({"$ref": f"urn:openai#/components/schemas/{name}"}, registry=registry)

    return of


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_and_events_are_valid(validator, served, name):
    of_whole, of_event = (validator(schema) if schema else None for schema in SCHEMAS[name])
    rng, job = random.Random(0), API[name].read((ASKED | {"completions": {"prompt": "go"}})[name], served)
    for _ in range(50):
        tokens = served.chat.answer_ids("".join(rng.choices(PIECES, k=rng.randint(0, 8)))).tolist()
        reason, cuts = rng.choice(["stop", "length"]), sorted(rng.choices(range(len(tokens) + 1), k=3))
        _, body, _ = whole(API[name], job, served, tokens, reason)
        of_whole.validate(body)
        events = [event for event in streamed(API[name], job, served, tokens, cuts, reason) if event is not None]
        for event in events if of_event else ():
            of_event.validate(event)
        assert events
