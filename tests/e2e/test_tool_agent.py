"""An agent that is written for an official client, with tools, is trained: its calls arrive parsed, whole and streamed, and its
conversations keep what was sampled."""

import dataclasses
import itertools
import json
import sys

import pytest
import torch

import rolljax
from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.model.tokenizer import load_tokenizer
from rolljax.recipe import Evaluation, Phase, Recipe
from rolljax.rollout.agents.program import AgentProgram
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.types import Message, Task
from tests.families import FAMILIES
from tests.originals import published
from tests.spellers import qwen

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 5}}\n</tool_call>'
CHAT = """
import json, sys
import openai

AT = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": AT}} for name in ("look", "wait")]


def streamed(client, **request):
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(stream=True, **request):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
        content += delta.content or ""
        calls += [c.model_dump(exclude_none=True) for c in delta.tool_calls or []]
    return {"role": "assistant", "content": content or None, "tool_calls": calls} if calls else \\
        {"role": "assistant", "content": content}, reason


def whole(client, **request):
    choice = client.chat.completions.create(**request).choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


for line in sys.stdin:
    task = json.loads(line)
    talk, asks, made = list(task["messages"]), (whole, streamed)[int(task["messages"][0]["content"][3:]) % 2], 0
    with openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
        for _ in range(3):
            message, reason = asks(client, model="policy", messages=talk, tools=TOOLS)
            talk.append(message)
            assert (reason == "tool_calls") == bool(message.get("tool_calls")) or reason == "length", (reason, message)
            for call in message.get("tool_calls") or []:
                assert call["type"] == "function" and call["function"]["name"] in ("look", "wait"), call
                at = json.loads(call["function"]["arguments"])["at"]
                talk.append({"role": "tool", "tool_call_id": call["id"], "content": str(at)})
                made += 1
            if not message.get("tool_calls"):
                talk.append({"role": "user", "content": "and?"})
    print(json.dumps({"id": task["id"], "answer": str(made)}), flush=True)
"""
RESPONSES = """
import json, sys
import openai

AT = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": name, "parameters": AT, "strict": False} for name in ("look", "wait")]

for line in sys.stdin:
    task = json.loads(line)
    talk, streams, made = list(task["messages"]), int(task["messages"][0]["content"][3:]) % 2, 0
    with openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
        for _ in range(3):
            request = {"model": "policy", "input": talk, "tools": TOOLS, "store": False}
            if streams:
                with client.responses.stream(**request) as stream:
                    events = list(stream)
                reply = events[-1].response
                assert reply.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
            else:
                reply = client.responses.create(**request)
            fields = {"id", "type", "role", "content", "call_id", "name", "arguments", "status"}
            talk += [item.model_dump(exclude_none=True, include=fields) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            for call in calls:
                assert call.name in ("look", "wait"), call
                at = json.loads(call.arguments)["at"]
                talk.append({"type": "function_call_output", "call_id": call.call_id, "output": str(at)})
                made += 1
            if not calls:
                talk.append({"role": "user", "content": "and?"})
    print(json.dumps({"id": task["id"], "answer": str(made)}), flush=True)
"""
MESSAGES = """
import json, sys
import anthropic

AT = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOLS = [{"name": name, "input_schema": AT} for name in ("look", "wait")]

for line in sys.stdin:
    task = json.loads(line)
    talk, streams, made = list(task["messages"]), int(task["messages"][0]["content"][3:]) % 2, 0
    url = task["base_url"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=task["api_key"], max_retries=0) as client:
        for _ in range(3):
            request = {"model": "policy", "messages": talk, "tools": TOOLS}
            asked = client.messages.count_tokens(**request).input_tokens
            request["max_tokens"] = 12
            if streams:
                with client.messages.stream(**request) as stream:
                    text = "".join(stream.text_stream)
                    reply = stream.get_final_message()
                assert text == "".join(b.text for b in reply.content if b.type == "text")
            else:
                reply = client.messages.create(**request)
            assert asked == reply.usage.input_tokens + reply.usage.cache_read_input_tokens, (asked, reply.usage)
            talk.append({"role": "assistant", "content": reply.content})
            calls = [b for b in reply.content if b.type == "tool_use"]
            assert (reply.stop_reason == "tool_use") == bool(calls) or reply.stop_reason == "max_tokens", reply
            results = [
                {"type": "tool_result", "tool_use_id": b.id, "content": str(b.input["at"])} for b in calls
            ]
            made += len(calls)
            talk.append({"role": "user", "content": results or "and?"})
    print(json.dumps({"id": task["id"], "answer": str(made)}), flush=True)
"""
AGENTS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}


@dataclasses.dataclass(frozen=True)
class Looks(EnvSpec):
    """The answer of an agent is the number of its calls, which are worth a third each."""

    runs = "inline"

    @property
    def name(self):
        return "looks"

    def task(self, index):
        return Task(self.name, index, f"go {index}")

    def make(self):
        return Look()


class Look(PureEnv):
    def reset(self, task):
        return (Message("user", task.content),)

    def step(self, action):
        return StepResult((), int(action) / 3 if action.isdecimal() else 0.0, True)

    def reference_answer(self):
        return "3"


def make_caller(folder):
    """Save a model that makes the call in six answers of ten: what it says next depends on its last token alone."""
    tokenizer = qwen()
    tokenizer.add_tokens([CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")])
    tokenizer.chat_template = published()["qwen3"]
    torch.manual_seed(0)
    made = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": False}
    model = FAMILIES["qwen3"].make(max_position_embeddings=2048, **made)
    words = tokenizer("\n" + CALL)["input_ids"] + [tokenizer.eos_token_id]
    assert len(words) == 5
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head.zero_()
        for i, (word, after) in enumerate(itertools.pairwise(words)):
            one = embedding[word] / embedding[word].norm()
            head[after] += one * (10 if i == 0 else 20) / one.numel() ** 0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("api", AGENTS)
def test_an_agent_with_tools_is_trained(tmp_path, api):
    if api == "messages":
        pytest.importorskip("anthropic")
    (tmp_path / "agent.py").write_text(AGENTS[api])
    make_caller(tmp_path / "model")
    program = AgentProgram(
        (sys.executable, str(tmp_path / "agent.py")),
        sandbox="none", reuse=True, concurrency=2, max_calls=3, max_restarts=0,
    )  # fmt: skip
    recipe = Recipe(
        Looks(),
        (Phase("rl", Grpo(), 1, prompts_per_step=4, group_size=4, optimizer=AdamW(lr=1e-2)),),
        model=str(tmp_path / "model"),
        max_answer_tok=12,
        sampler=SamplerConfig(slots=8, max_context=1200, prefill_chunk=64),
        mesh=MeshSpec(data=1),
        evaluation=Evaluation(tasks=4),
        agent=program,
    )
    run = rolljax.train(recipe, run_dir=tmp_path / "run", progress=False)
    played = [json.loads(line) for line in (run.path / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    decode = load_tokenizer(tmp_path / "model").decode
    assert len(played) == 16
    for t in played:
        assert t["status"] != "failed" and len(t["turns"]) == 3 and not any(u["restart"] for u in t["turns"])
    called = [t for t in played if decode(t["turns"][0]["tokens"]) == CALL + "<|im_end|>"]
    assert len(called) > 4
    for t in called:
        told = decode(t["turns"][1]["prompt_ids"], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert told == "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert {int(t["task"]["content"][3:]) % 2 for t in called} == {0, 1}, "whole and streamed"
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert max(row["mismatch/abs_max_nat"] for row in rows) <= 5e-5
    assert any(row["groups/trained_n"] for row in rows)
