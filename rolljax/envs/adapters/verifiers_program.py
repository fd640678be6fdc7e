"""The program that plays tasks of verifiers, started by a Python that has verifiers 0.4 (`verifiers.py` is the other
end). It imports nothing of rolljax.

    python verifiers_program.py CONFIG --tasks N      one line of JSON per task: its prompt
    python verifiers_program.py CONFIG                plays the tasks that arrive on standard input, one line each

CONFIG is JSON: `{"taskset": SETTINGS, "agent": SETTINGS}`, of verifiers' classes.
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

EPISODES = 100
"""Episodes after which verifiers' servers start again: until then it keeps a client for each."""
NUMBERS = itertools.count()


def environment(config: str) -> Any:
    """Return verifiers' environment: the taskset's own, or the one of a single agent. All its agents have the harness
    and the runtime of the settings."""
    from verifiers.v1 import AgentConfig, Env, EnvConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class

    settings = json.loads(config)
    cls = environment_class(settings["taskset"]["id"])
    fields = concrete_type(cls, EnvConfig, origin=Env) or EnvConfig
    roles = [name for name, field in fields.model_fields.items() if isinstance(field.default, AgentConfig)]
    return cls(fields.model_validate({"taskset": settings["taskset"], **dict.fromkeys(roles, settings["agent"])}))


def prompts(env: Any, num: int) -> Iterator[str]:
    """Yield the prompts of the first tasks."""
    for task in env.taskset.take(num):
        prompt = task.data.prompt
        yield prompt if isinstance(prompt, str) else json.dumps([m.model_dump(mode="json") for m in prompt or ()])


async def play(env: Any, tasks: list[Any], order: dict[str, Any]) -> dict[str, Any]:
    """Play one task with the model of the order; return reward, metrics and, if it failed, the error."""
    from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

    index = int(order["messages"][0]["content"].split("\n", 1)[0])
    if index >= len(tasks):
        tasks += list(env.taskset.skip(len(tasks)).take(index + 1 - len(tasks)))
    variable = f"ROLLJAX_KEY_{next(NUMBERS)}"  # one of its own: verifiers keeps a client for each
    os.environ[variable] = order["api_key"]
    client = EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
    policy = ModelContext(model="policy", client=client, sampling=SamplingConfig())
    episode = await env.run_episode(tasks[index], policy)
    del os.environ[variable]
    errors = [e.message for e in (*episode.errors, *(e for t in episode.traces for e in t.errors))]
    if not episode.ok:
        return {"error": "; ".join(errors) or "the episode is not valid"}
    if len(episode.traces) > 1:
        return {"error": "several agents played the task, and one policy can be trained"}
    trace = episode.traces[0]
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "parts": parts, "metrics": metrics}


async def serve(env: Any) -> None:
    """Play what standard input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tasks print does not reach the pool
    tasks: list[Any] = []
    line = "more"
    while line:
        async with env.serving():  # its end closes the clients
            for _ in range(EPISODES):
                line = await asyncio.to_thread(sys.stdin.readline)
                if not line:
                    break
                order = json.loads(line)
                found = await play(env, tasks, order)
                if "error" in found:
                    sys.exit(f"verifiers: {found['error']}")
                print(json.dumps({"id": order["id"], "answer": json.dumps(found)}), file=answers, flush=True)


def main() -> None:
    """Run the program."""
    env = environment(sys.argv[1])
    if "--tasks" in sys.argv:
        for prompt in prompts(env, int(sys.argv[-1])):
            sys.stdout.write(json.dumps(prompt) + "\n")
    else:
        asyncio.run(serve(env))


if __name__ == "__main__":
    main()
