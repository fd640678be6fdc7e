"""Models whose published chat template rewrites earlier turns are trained over several turns, and base models at all."""

import dataclasses
import io
import json
import sys

import numpy as np
import pytest
import torch

import rolljax
from rolljax import serve
from rolljax.chat import main as chat
from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.errors import ConfigError, InfraError
from rolljax.eval import evaluate
from rolljax.evaluation.settings import Attempts
from rolljax.model.tokenizer import Chat, load_tokenizer
from rolljax.model.training_templates import plain_template, training_template
from rolljax.recipe import Evaluation, Phase, Recipe
from rolljax.rollout.agents.program import AgentProgram
from rolljax.run.preflight import recipe_chat
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.types import Message, Task
from tests.families import FAMILIES
from tests.originals import published
from tests.spellers import qwen

from .test_local_model import SIZES, served

QWEN3 = published()["qwen3"]
OBSERVED = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
CLIENT = """
import json, sys
import openai

TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}]
for line in sys.stdin:
    task = json.loads(line)
    talk = list(task["messages"])
    with openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
        for _ in range(3):
            reply = client.chat.completions.create(
                model="policy", messages=talk, tools=TOOLS,
                extra_body={"chat_template_kwargs": {"enable_thinking": task["messages"][0]["content"] != "say 0"}},
            )
            text = reply.choices[0].message.content
            talk += [{"role": "assistant", "content": text}, {"role": "tool", "tool_call_id": "1", "content": "5"}]
    print(json.dumps({"id": task["id"], "answer": text}), flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Looks(EnvSpec):
    """Two turns: whatever the first answer is, a tool answers it; the second is worth something if it is a number."""

    max_turns: int = 2
    role: str = "tool"
    runs = "inline"

    @property
    def name(self):
        return "looks"

    def task(self, index):
        return Task(self.name, index, str(index))

    def make(self):
        return Look(self.max_turns, self.role)


class Look(PureEnv):
    def __init__(self, turns, role):
        self.left, self.role = turns, role

    def reset(self, task):
        self.digit = str(int(task.content) % 5)
        return (Message("user", f"say {self.digit}"),)

    def step(self, action):
        self.left -= 1
        if self.left:
            return StepResult((Message(self.role, "5"),), 0.0, False)
        return StepResult((), float(len(action) % 2), True)

    def reference_answer(self):
        return "look" if self.left > 1 else self.digit


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Save random weights of `transformers`, once with Qwen3's published template and once with none."""
    found = {}
    for name, template in (("qwen3", QWEN3), ("base", None)):
        found[name] = folder = tmp_path_factory.mktemp(name) / "model"
        tokenizer = qwen()
        tokenizer.chat_template = template
        made = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": False}
        model = FAMILIES["qwen3"].make(max_position_embeddings=2048, **made)
        with torch.no_grad():  # so that answers end after a few tokens
            model.lm_head.weight *= 0.05
            model.lm_head.weight[tokenizer.eos_token_id] *= 120
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found


def phase(name, algorithm, steps, **settings):
    return Phase(name, algorithm, steps, prompts_per_step=4, optimizer=AdamW(lr=3e-3), **settings)


def recipe_of(folder, env, *phases, **settings):
    return Recipe(
        env,
        phases,
        model=str(folder),
        max_answer_tok=12,
        sampler=SamplerConfig(slots=8, max_context=settings.pop("max_context", 200), prefill_chunk=64),
        mesh=MeshSpec(data=1),
        evaluation=Evaluation(tasks=4),
        **settings,
    )


def trajectories(run, step):
    return [json.loads(line) for line in (run.path / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    recipe = recipe_of(folders["qwen3"], Looks(), phase("rl", Grpo(), 1, group_size=4))
    return rolljax.train(recipe, run_dir=tmp_path_factory.mktemp("run") / "run", progress=False)


def test_qwen3_is_trained_over_two_turns(trained, folders):
    original = load_tokenizer(folders["qwen3"])
    assert original.chat_template == QWEN3
    chat = Chat(original).for_streams()
    longer = [t for t in trajectories(trained, 1) if len(t["turns"]) == 2]
    assert len(longer) > 4
    for t in longer:
        first, second = t["turns"]
        initial_messages = [{"role": "user", "content": f"say {int(t['task']['content']) % 5}"}]
        want = original.apply_chat_template(initial_messages, add_generation_prompt=True, return_dict=False)
        assert first["prompt_ids"] == want, "as transformers writes one turn"
        assert first["tokens"][-1] in chat.stop_ids and not second["restart"]
        told = original.decode(second["prompt_ids"], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert told == OBSERVED, "and the stream keeps what was sampled"
    rl = [json.loads(line) for line in (trained.path / "metrics.jsonl").read_text().splitlines()][-1]
    assert rl["groups/trained_n"] and rl["mismatch/abs_max_nat"] <= 1e-5


def test_what_a_run_leaves_has_the_template_that_it_was_trained_with(trained, folders, tmp_path):
    wanted = training_template(QWEN3)
    assert (trained.path / "chat_template.jinja").read_text() == wanted
    assert load_tokenizer(trained.path / "hf").chat_template == wanted
    assert load_tokenizer(rolljax.export(trained, tmp_path / "out")).chat_template == wanted
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folders["qwen3"] / "tokenizer.json").read_bytes()
    for step in (None, 1):
        with rolljax.load(trained, step=step) as model:
            assert model.tokenizer.chat_template == wanted
    with rolljax.load(folders["qwen3"]) as model:
        assert model.tokenizer.chat_template == QWEN3, "a folder keeps its own"
    recipe = trained.config.value
    assert recipe_chat(recipe, trained.path).tokenizer.chat_template == wanted
    other = recipe_chat(dataclasses.replace(recipe, chat_template="plain"), trained.path)
    assert other.tokenizer.chat_template == plain_template(begins=False)


def test_a_run_does_not_resume_with_another_template(trained, folders):
    kept = trained.path / "chat_template.jinja"
    text = kept.read_text()
    kept.write_text(text + " ")
    try:
        with pytest.raises(ConfigError, match="another template now"):
            recipe = recipe_of(folders["qwen3"], Looks(), phase("rl", Grpo(), 1, group_size=4))
            rolljax.train(recipe, run_dir=trained.path, progress=False)
    finally:
        kept.write_text(text)


@pytest.mark.sweep
def test_qwen3_is_trained_behind_an_openai_client_without_restarts(folders, tmp_path):
    (tmp_path / "client.py").write_text(CLIENT)
    program = AgentProgram(
        (sys.executable, str(tmp_path / "client.py")),
        sandbox="none", reuse=True, concurrency=1, max_calls=3, max_restarts=0,
    )  # fmt: skip
    recipe = recipe_of(
        folders["qwen3"], Looks(1), phase("rl", Grpo(), 1, group_size=2), agent=program, max_context=1200
    )
    run = rolljax.train(recipe, run_dir=tmp_path / "run", progress=False)
    played = trajectories(run, 1)
    assert len(played) == 8 and all(len(t["turns"]) == 3 and t["status"] != "failed" for t in played)
    decode = load_tokenizer(folders["qwen3"]).decode
    for t in played:
        thinks = int(t["task"]["content"]) % 5 != 0
        for turn in t["turns"][1:]:
            assert not turn["restart"]
            told = decode(turn["prompt_ids"], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            told = told.removeprefix("<|im_end|>") + ("<|thought|>" if thinks else "")
            assert told == OBSERVED + ("<|thought|>" if thinks else "<think>\n\n</think>\n\n")
    row = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["groups/trained_n"] and row["mismatch/abs_max_nat"] <= 5e-5


def test_an_unknown_template_that_rewrites_is_refused_before_anything_is_allocated(folders, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(QWEN3 + "{# mine #}")
    program = AgentProgram((sys.executable, "client.py"), sandbox="none")
    for settings in ({"env": Looks()}, {"env": Looks(1), "agent": program}):
        recipe = recipe_of(
            folders["qwen3"],
            settings.pop("env"),
            phase("rl", Grpo(), 1, group_size=2),
            chat_template=str(path),
            **settings,
        )
        with pytest.raises(ConfigError, match="(?s)rewrites earlier turns.*Recipe.chat_template"):
            rolljax.train(recipe, run_dir=tmp_path / "run", progress=False)
    path.write_text(training_template(QWEN3))
    assert recipe_of(folders["qwen3"], Looks(), phase("rl", Sft(), 1), chat_template=str(path)).chat_template


def test_roles_that_a_template_does_not_take_are_refused_before_anything_is_allocated(folders, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    recipe = recipe_of(folders["qwen3"], Looks(), phase("sft", Sft(), 1), chat_template=str(path))
    with pytest.raises(ConfigError, match="(?s)answers with .roles: tool.*no such role"):
        rolljax.train(recipe, run_dir=tmp_path / "run", progress=False)


# ---- base models


@pytest.mark.slow
def test_a_base_model_is_trained_served_evaluated_and_chatted_with(folders, tmp_path, monkeypatch, capsys):
    base = folders["base"]
    with pytest.raises(ConfigError, match="(?s)has no chat template.*Recipe.chat_template.*'plain'"):
        rolljax.train(recipe_of(base, Looks(), phase("sft", Sft(), 1)), run_dir=tmp_path / "run", progress=False)
    recipe = recipe_of(base, Looks(), phase("sft", Sft(), 2), chat_template="plain")
    run = rolljax.train(recipe, run_dir=tmp_path / "run", progress=False)
    first, second = trajectories(run, 1)[0]["turns"]
    tokenizer = load_tokenizer(base)
    assert tokenizer.chat_template is None
    said = tokenizer.decode(first["prompt_ids"]), first["text"], tokenizer.decode(second["prompt_ids"]), second["text"]
    assert said[0].startswith("say ") and said[1:3] == ("look", "5") and said[3] == said[0][-1]
    assert first["tokens"][-1] == second["tokens"][-1] == tokenizer.eos_token_id
    assert load_tokenizer(run.path / "hf").chat_template == plain_template(begins=False)
    greedy = {}
    for name, source, how in (("run", run, {}), ("hf", run.path / "hf", {}), ("ckpt", run, {"step": 2})):
        with rolljax.load(source, **how) as model:
            greedy[name] = model.generate([{"role": "user", "content": "say 1"}], temperature=0, max_tokens=8)[
                0
            ].tokens.tolist()
            assert greedy[name] == model.generate("say 1", raw=True, temperature=0, max_tokens=8)[0].tokens.tolist()
    assert greedy["run"] == greedy["hf"] == greedy["ckpt"]
    report = rolljax.evaluate(run, tasks=2)
    assert report.failed == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("say 1\nsay 2\n"))
    assert chat([str(base), "--chat_template", "plain", "--max_tokens", "4", "--max_context", "64"]) == 0
    assert chat([str(base)]) != 0 and "--chat_template" in capsys.readouterr().err
    served = serve.load(model=base, chat_template="plain", slots=8, max_context=64)[3]
    assert served.chat.prompt_ids([Message("user", "say 1")]).tolist() == tokenizer("say 1")["input_ids"]
    assert np.array_equal(served.stop_ids, [tokenizer.eos_token_id])


@pytest.mark.slow
def test_chat_keeps_a_conversation_under_a_published_template(folders, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("say 1\nsay 2\nsay 3\n"))
    assert chat([str(folders["qwen3"]), "--max_tokens", "4", "--max_context", "128"]) == 0
    assert "rewrites" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_base_model_behind_a_server_is_evaluated_as_it_is_here(folders):
    """Through `/v1/completions`: its server knows no chat template."""
    base, how = folders["base"], {"envs": [Looks(1)], "tasks": 4, "max_answer_tok": 8, "quiet": True}
    greedy = {"attempts": Attempts(temperature=0.0)}
    here = evaluate(model=base, chat_template="plain", max_context=192, **how, **greedy)
    with served(base, SIZES) as config:
        asked = dataclasses.replace(config, completions=True, request={"return_token_ids": True, "logprobs": 1})
        there = evaluate(endpoint=asked, **how, **greedy)
        with pytest.raises(InfraError, match="no chat template"):
            evaluate(endpoint=config, **how, **greedy)
    told = [
        [(t.task.index, t.turns[0].text, t.turns[0].tokens.tolist()) for t in r.trajectories] for r in (here, there)
    ]
    assert sorted(told[0]) == sorted(told[1]) and len(told[0]) == 4
    assert here.failed == there.failed == 0
