"""`rolljax.chat` with a small model: a chat stays one token stream, tools answer, and hostile text stays text."""

import io
import re

import jax
import numpy as np
import pytest

from rolljax import chat
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.storage.layout import CONFIG, RESOLVED
from rolljax.types import Completion, Sampled, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "hf"
    model = Model(Qwen3Config(), "float32")
    hf.save(folder, model, jax.jit(lambda: model.init(0))(), byte_tokenizer())
    return folder


def talked(monkeypatch, capsys, folder, lines, *argv):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = chat.main([str(folder), "--max_tokens", "4", "--max_context", "128", *argv])
    done = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in done.out)
    return code, done.out, done.err


@pytest.mark.slow  # of programs: alternatives, greedy
def test_turns_probabilities_and_commands(folder, monkeypatch, capsys):
    lines = ["hello", "/probs 2", "again", "/temp 0", "/temp cold", "/nonsense", "/task", "/new", "hello"]
    code, out, err = talked(monkeypatch, capsys, folder, lines, "--system", "be brief \x1b[2J")
    assert code == 0, err
    assert "probability" in out and len(re.findall(r"0\.\d{4}", out)) >= 1
    assert (
        "temperature 0" in out and "/temp takes another value" in out and "/probs [N]" in out and "needs --env" in out
    )
    assert "a new conversation" in out


@pytest.mark.slow
def test_equal_seeds_give_equal_answers_and_the_stream_grows(folder, monkeypatch, capsys):
    prompts, sample = [], chat.ChatSession._generate

    def generate(self, prompt, most):
        prompts.append(prompt)
        return sample(self, prompt, most)

    monkeypatch.setattr(chat.ChatSession, "_generate", generate)
    outs = [talked(monkeypatch, capsys, folder, ["one", "two"])[1] for _ in range(2)]
    assert outs[0] == outs[1] and len(prompts) == 4
    first, second = prompts[:2]
    assert len(second) > len(first) and np.array_equal(second[: len(first)], first)


def test_a_full_context_is_reported(folder, monkeypatch, capsys):
    _, out, _ = talked(monkeypatch, capsys, folder, ["x" * 200])
    assert "context of 128 tokens is full" in out


class Scripted:
    """Replaces a sampler: gives the answers of a calculator's user, as tokens."""

    def __init__(self, talk, answers):
        self.limits, self.chat, self.answers = talk._sampler.limits, talk._chat, iter(answers)

    async def generate(self, prompt, params: SamplingParams, address, *, on_tokens):
        tokens = self.chat.answer_ids(next(self.answers))
        sampled = Sampled.of(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))
        on_tokens(sampled)
        return Completion(sampled, "stop")


def test_the_tools_of_an_environment_answer_calls(folder, monkeypatch, capsys):
    made = chat.ChatSession.__init__

    def scripted(self, *args):
        made(self, *args)
        self._sampler = Scripted(self, ["calc(6*7)", "42", "calc(1+1)", "2", "calc(2+2)", "4"])

    monkeypatch.setattr(chat.ChatSession, "__init__", scripted)
    code, out, err = talked(monkeypatch, capsys, folder, ["6*7?", "and 1+1?", "/task 3"], "--env", "calculator")
    assert code == 0, err
    assert "calc(6*7)" in out and "[tool] 42" in out and "[tool] 2" in out and "[tool] 4" in out
    assert out.index("[tool] 42") < out.index("[tool] 2\n") and "[user] " in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["/nowhere"], "neither a run folder"),
        ([None, "--env", "sokoban"], "has no tools"),
        ([None, "--temperature", "-1"], "--temperature must be 0 to 100"),
        ([None, "--probs", "99"], "--probs must be 0 to 10"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(folder, capsys, argv, says):
    assert chat.main([str(a or folder) for a in argv]) == 2
    assert says in capsys.readouterr().err


def test_the_answer_limit_is_the_runs(tmp_path):
    assert chat.run_answer_tok(str(tmp_path)) == 0
    (tmp_path / CONFIG).write_text("")
    (tmp_path / RESOLVED).write_text('{"max_answer_tok": 6}')
    assert chat.run_answer_tok(str(tmp_path)) == 6
