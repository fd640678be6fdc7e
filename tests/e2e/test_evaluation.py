"""Evaluations of real models: here, behind rolljax's own server, behind a server that fails; kept, continued, compared."""

import collections
import http.server
import json
import os
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import rolljax
from rolljax import cli, serve
from rolljax import eval as eval_verb
from rolljax.chat_models.client import EndpointConfig
from rolljax.commands.export import export as export_run
from rolljax.commands.export import main as export
from rolljax.console.progress import ProgressBar
from rolljax.envs.adapters.reasoning_gym import ReasoningGym
from rolljax.envs.pool import PoolConfig
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError, InfraError
from rolljax.evaluation import answers, models
from rolljax.evaluation.endpoint import EndpointModel
from rolljax.evaluation.run import evaluate
from rolljax.evaluation.settings import Attempts, Benchmark
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.rollout.episodes import RolloutConfig
from rolljax.run.folder import RunFolder
from rolljax.run.initial_weights import start_params
from rolljax.run.preflight import resolve
from rolljax.run.progress import RunProgress
from rolljax.run.trainer import make_trainer
from rolljax.sampler.client import Sampler
from rolljax.serving.server import ServerLimits
from rolljax.types import Trajectory
from tests.misbehaving import faults_in_turn, misbehaving

from .conftest import QUICKSTART
from .serving import KEY, Running

DATA = Path(__file__).parents[1] / "data"
THREADS = PoolConfig(where="thread")
SHAPE = Qwen3Config(vocab_size=264, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=64)


def of_characters(prompt, answer, record):
    """Return a reward that depends on every character of an answer."""
    return (sum(map(ord, answer + prompt)) % 7 + 1) / 8


def writing(**changes):
    """Return tasks whose reward depends on every character of an answer."""
    spec = Questions(str(DATA / "word_problems.jsonl"), reward=of_characters, solved_at=0.5, domain="writing")
    return Benchmark(spec, **{"num_tasks": 4, "max_answer_tok": 8, "pool": THREADS} | changes)


def sums(**changes):
    spec = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2})
    return Benchmark(spec, **{"num_tasks": 3, "max_answer_tok": 4, "pool": THREADS} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a tiny model as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "tiny"
    model = Model(SHAPE)
    hf.save(path, model, model.init(0), byte_tokenizer())
    return path


@pytest.fixture(scope="module")
def local(folder):
    recipe = models.folder_recipe(str(folder), writing().env, max_context=256, max_answer_tok=8)
    with models.of_folder(recipe) as model:
        yield model


def texts(to):
    return {(t.key.prompt_index, t.key.sibling): [turn.text for turn in t.turns] for t in answers.read_answers(to)}


# ---- here -----------------------------------------------------------------------------------------------------------


def test_two_environments_several_attempts_one_table(local, tmp_path):
    found = evaluate(local, [writing(), sums()], Attempts(3, seed=5), to=tmp_path / "a")
    assert [row.name for row in found.rows] == ["writing", "chain_sum", "all tasks", "mean of environments"]
    row = found["writing"]
    assert (row.tasks, row.answers, row.failed) == (4, 12, 0) and 0 < row.tok <= 8
    assert list(row.estimates) == ["reward", "avg@3", "pass@2", "pass@3"]
    assert (
        list(found["chain_sum"].estimates)[-1] == "maj@3"
    )  # its answers can be counted, those of `of_characters` cannot
    assert row.estimates["pass@3"].method == "wilson" and row.estimates["pass@2"].method == "bootstrap"
    lines = (tmp_path / "a" / "answers.jsonl").read_text().splitlines()
    kept = [Trajectory.from_json(json.loads(line)) for line in lines]
    assert len(kept) == 21 and len({t.key for t in kept}) == 21
    mean = np.mean([t.reward for t in kept if t.task.env == "writing"])
    assert row.estimates["reward"].mean == pytest.approx(mean) and mean > 0
    weights = [found[name].estimates["reward"].mean for name in ("writing", "chain_sum")]
    assert found["mean of environments"].estimates["reward"].mean == pytest.approx(np.mean(weights))
    assert found["all tasks"].estimates["reward"].mean == pytest.approx(np.average(weights, weights=[4, 3]))
    table = (tmp_path / "a" / "table.md").read_text()
    assert table == found.markdown() and table.count("\n|") == 6 and "Wilson" in table and "bootstrap" in table
    assert answers.read(tmp_path / "a")["results"] == json.loads(json.dumps(found.to_json()))


def test_an_interrupted_evaluation_resumes_to_the_same_answers(local, tmp_path):
    """Killed after five answers, in the middle of the sixth's line; then with more attempts."""
    whole = evaluate(local, [writing()], Attempts(2), to=tmp_path / "whole")
    evaluate(local, [writing()], Attempts(2), to=tmp_path / "cut")
    path = tmp_path / "cut" / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:100])
    setup = {"schema": 1, "setup": answers.read(tmp_path / "cut")["setup"]}
    (tmp_path / "cut" / "evaluation.json").write_text(json.dumps(setup))
    seen = []
    again = evaluate(
        local, [writing()], Attempts(2), to=tmp_path / "cut", show=lambda s: seen.append(s.answers + s.failed)
    )
    assert seen[0] == 5 and seen[-1] == 8
    assert path.read_bytes().splitlines(keepends=True)[:5] == lines[:5]
    assert texts(tmp_path / "cut") == texts(tmp_path / "whole") and again == whole
    more = evaluate(local, [writing()], Attempts(3), to=tmp_path / "cut")
    assert more["writing"].answers == 12 and texts(tmp_path / "cut").items() > texts(tmp_path / "whole").items()
    for changed, setting in ((Attempts(3, temperature=0.5), "attempts.temperature"), (Attempts(2), "attempts.num")):
        with pytest.raises(ConfigError) as e:
            evaluate(local, [writing()], changed, to=tmp_path / "cut")
        assert e.value.setting == setting and "--fresh" in str(e.value)
    held = answers.AnswerLog(tmp_path / "cut", answers.read(tmp_path / "cut")["setup"])
    with pytest.raises(ConfigError, match="another process"):
        evaluate(local, [writing()], Attempts(3), to=tmp_path / "cut")
    held.close()
    fresh = evaluate(local, [writing()], Attempts(1), to=tmp_path / "cut", fresh=True)
    assert fresh["writing"].answers == 4
    (tmp_path / "cut" / "thesis.txt").write_text("years")
    (tmp_path / "cut" / "evaluation.json").unlink()
    with pytest.raises(ConfigError, match="not the folder of an evaluation"):
        evaluate(local, [writing()], to=tmp_path / "cut")


def test_an_evaluation_continues_when_its_progress_output_is_closed(local, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        monkeypatch.setattr("sys.stderr", gone)
        with ProgressBar("tiny", at_once=True) as bar:
            found = evaluate(local, [writing(num_tasks=1)], show=lambda s: s.show(bar, "tiny"), warn=bar.say)
        monkeypatch.undo()
        gone.buffer.raw.close()
    os.write(1, b"this is read\n")
    assert found["writing"].answers == 1 and capfd.readouterr().out == "this is read\n"


def test_equal_environment_names_are_refused(local):
    with pytest.raises(ConfigError, match="two environments"):
        evaluate(local, [writing(), writing(num_tasks=2)])


def test_two_evaluations_are_compared(local, tmp_path, capsys):
    for name, temperature in (("a", 0.0), ("b", 1.0)):
        evaluate(local, [writing(), sums()], Attempts(temperature=temperature), to=tmp_path / name)
    capsys.readouterr()
    pair = ["--compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert eval_verb.main(pair) == 0
    table = capsys.readouterr().out
    assert "| writing" in table and "| all tasks" in table and "Paired bootstrap over 7 tasks" in table
    assert eval_verb.main([*pair, "--json"]) == 0
    found = {(r["env"], r["metric"]): r for r in json.loads(capsys.readouterr().out)}
    record = found["writing", "reward"]
    of = [{t.task.id: t.reward for t in answers.read_answers(tmp_path / n) if t.task.env == "writing"} for n in "ab"]
    assert record["mean"] == pytest.approx(np.mean([of[1][i] - of[0][i] for i in of[0]]))
    assert record["low"] <= record["mean"] <= record["high"] and 0 < record["p"] <= 1 and record["tasks"] == 4
    assert eval_verb.main(["--compare", str(tmp_path / "a"), str(tmp_path)]) == 6


# ---- behind a server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(folder):
    """Serve the folder with rolljax's own server."""
    engine, params, version, model = serve.load(model=folder, max_context=256, slots=8)
    sampler = Sampler(engine, params, version, vocabulary=model.vocabulary, longest_prompt=0)
    running = Running(sampler, model, ServerLimits((KEY,)))
    yield running
    running.close()
    sampler.close()


def test_a_server_gives_the_numbers_of_this_process(local, served, tmp_path, monkeypatch):
    greedy, both = Attempts(temperature=0.0), [writing(), sums()]
    here = evaluate(local, both, greedy, to=tmp_path / "here")
    cfg = EndpointConfig(f"{served.url}/v1", request={"return_token_ids": True, "logprobs": True})
    with EndpointModel(cfg, KEY) as model:
        assert model.name.startswith("tiny at ")
        there = evaluate(model, both, greedy, to=tmp_path / "there")
    assert texts(tmp_path / "there") == texts(tmp_path / "here")
    assert [(r.name, r.estimates, r.tok) for r in there.rows] == [(r.name, r.estimates, r.tok) for r in here.rows]
    assert there["writing"].estimates["reward"].mean > 0
    assert there.counts == {"requests": 7, "answers": 7}
    streams = [
        {t.key: [x.tolist() for x in t.stream()[:2]] for t in answers.read_answers(tmp_path / n)}
        for n in ("here", "there")
    ]
    assert streams[0] == streams[1]
    monkeypatch.setenv("WRONG_KEY", "wrong")
    argv = ["--endpoint", f"{served.url}/v1", "--model_name", "tiny", "--env", "rg:chain_sum", "--tasks", "2"]
    assert eval_verb.main([*argv, "--api_key_env", "WRONG_KEY"]) == 2


class Faulty(http.server.BaseHTTPRequestHandler):
    """Answers "4", and fails on the way to it as the list `plan` of its server says, one entry for each request."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        plan = self.server.plan
        kind = plan.pop(0) if plan else "answer"
        if kind == "slow":
            time.sleep(1.0)  # longer than the client waits
        message = {"role": "assistant", "content": "4"}
        reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        body = {
            "garbage": b"<html>busy</html>",
            "empty": b'{"choices": []}',
            "number": json.dumps({"choices": [{"message": {"content": 4}}]}).encode(),
        }.get(str(kind), json.dumps(reply).encode())
        if kind == "cut":
            self.close_connection = True
            return
        self.send_response(kind if isinstance(kind, int) else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def faulty():
    """Start a server that follows a plan of faults."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    server.daemon_threads, server.plan = True, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def behind(server, **changes):
    cfg = EndpointConfig(f"http://127.0.0.1:{server.server_port}/v1", "m", backoff_s=0.0, concurrency=1, **changes)
    return EndpointModel(cfg)


def test_faults_of_a_server_are_asked_again_and_counted(faulty):
    """Faults of each kind, two of each, cause not one wrong answer more than without them."""
    with behind(faulty) as model:
        right = evaluate(model, [sums(num_tasks=6)], Attempts(2))
    kinds = [500, 503, 429, 408, "garbage", "empty", "number", "cut"]
    faulty.plan += [k for kind in kinds for k in (kind, kind)]
    faulty.plan += ["slow"]
    with behind(faulty, retries=20, timeout_s=0.5) as model:
        found = evaluate(model, [sums(num_tasks=6)], Attempts(2))
    assert found.rows == right.rows and not found.failed and not faulty.plan
    wanted = {"status_500": 2, "status_503": 2, "status_429": 2, "status_408": 2, "garbage": 6, "connection": 2}
    assert found.counts == {**wanted, "timeout": 1, "answers": 12, "requests": 29}
    assert "2 status_503" in found.markdown() and "asked again" in found.markdown()


def test_whatever_a_server_sends_before_its_answer_changes_no_number(faulty):
    """More than a hundred consecutive faults: each request is repeated."""
    with behind(faulty) as model:
        right = evaluate(model, [sums(num_tasks=6)])
    with misbehaving() as address:
        cfg = EndpointConfig(f"{address}/in_turn/v1", "m", retries=1000, backoff_s=0.0, concurrency=1)
        with EndpointModel(cfg) as model:
            found = evaluate(model, [sums(num_tasks=6)])
    assert found.rows == right.rows and not found.failed
    assert found.counts["requests"] - found.counts["answers"] == len(faults_in_turn()) > 100


def test_an_attempt_that_stays_without_an_answer_is_no_wrong_one(faulty, tmp_path):
    """The failed attempt is in no number, and is repeated when the evaluation resumes."""
    benchmark = sums(num_tasks=4, rollout=RolloutConfig(retries=1))
    with behind(faulty) as model:
        right = evaluate(model, [benchmark], to=tmp_path / "right")
    first = Attempts(concurrency=1)
    faulty.plan += ["answer", *[503] * 4]  # 2 episodes of 2 requests
    with behind(faulty, retries=1) as model:
        found = evaluate(model, [benchmark], first, to=tmp_path / "a")
    row = found["chain_sum"]
    assert (row.answers, row.failed, found.failed) == (3, 1, 1) and "1 attempt(s) failed" in found.markdown()
    lost = [t for t in answers.read_answers(tmp_path / "a") if t.lost]
    assert [(t.fault.kind, t.fault.stage, t.attempts) for t in lost] == [("infra", "endpoint", 2)]
    assert row.estimates["pass@1"].num == 3
    with behind(faulty) as model:
        again = evaluate(model, [benchmark], first, to=tmp_path / "a")
    assert again.counts["requests"] == 1 and again.rows == right.rows and not again.failed
    faulty.plan += [503] * 1000
    with behind(faulty, retries=0) as model, pytest.raises(InfraError, match="every attempt failed"):
        evaluate(model, [benchmark])


def test_an_error_of_every_request_ends_the_evaluation(faulty):
    faulty.plan += [404] * 10
    with behind(faulty) as model, pytest.raises(ConfigError, match="no such model or route"):
        evaluate(model, [sums()])
    assert len(faulty.plan) == 9


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make a run folder with the checkpoints of steps 2, 4 and 6, each with other weights, as training does."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "tiny-run")
    settings = ["MeshSpec.data = 1", "Evaluation.tasks = 6", "SamplerConfig.slots = 8", "Qwen3Config.num_layers = 1"]
    settings += ["SamplerConfig.prefill_chunk = 128", "Recipe.max_answer_tok = 4"]
    config = cli.load_recipe([QUICKSTART], settings)
    folder.prepare(config, fresh=False)
    resolved = resolve(config.value)
    start = start_params(resolved)
    for step, reward in ((2, 0.25), (4, 0.75), (6, None)):
        params = jax.tree.map(lambda x: x * (1 + step / 7), start)  # noqa: B023
        heldout = [{"phase": "start", "step": 0, "mean": 0.125, "n": 6}]
        progress = RunProgress(total_steps=step, step=step, version=step, weights_reward=reward, heldout_reward=heldout)
        row = {"step": step, "phase": "warm_start", "reward/mean": 0.5}
        folder.write_row(row)
        state = make_trainer(resolved, 0, {}).states.init(params)
        folder.checkpoints.save(folder.checkpoints.next_name(progress), state, progress)
    return folder.path


def weights(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def best(run, tmp_path_factory):
    """Export the checkpoint with the highest held-out reward."""
    return export_run(tmp_path_factory.mktemp("hf") / "best", run=run, step="best")


@pytest.mark.slow
def test_any_step_that_is_kept_is_exported_and_averaged(run, best, tmp_path, capsys):
    for name, how in (("newest", []), ("two", ["--step", "2"]), ("mean", ["--average", "2,4,6"])):
        assert export(["--run", str(run), "--to", str(tmp_path / name), *how]) == 0
    newest, two, mean = (weights(tmp_path / name) for name in ("newest", "two", "mean"))
    for tensor, four in weights(best).items():
        parts = np.stack([x[tensor].astype(np.float64) for x in (two, {tensor: four}, newest)])
        np.testing.assert_array_equal(mean[tensor], (parts.sum(0) / 3).astype(np.float32))
        assert np.abs(parts[0] / parts[1] - 9 / 11).max() < 1e-6 and np.abs(parts[2] / parts[1] - 13 / 11).max() < 1e-6
    capsys.readouterr()
    for how, said in (
        (["--step", "3"], "kept 2, 4, 6"), (["--average", "2"], "two or more different"),
        (["--average", "2,2"], "two or more different"), (["--average", "2,5"], "kept 2, 4, 6"),
        (["--average", "2,x"], "whole numbers"), (["--step", "x"], "neither a step nor 'best'"),
        (["--average", "2,4", "--adapter"], "mean of products"),
    ):  # fmt: skip
        assert export(["--run", str(run), "--to", str(tmp_path / "no"), *how]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "no").exists()
    assert export(["--model", str(best), "--to", str(tmp_path / "no"), "--step", "2"]) == 2


def test_the_card_is_one_that_the_hub_reads(best):
    from huggingface_hub import ModelCard

    card = ModelCard.load(best / "README.md")
    assert card.data.library_name == "transformers" and "rolljax" in card.data.tags
    assert card.data.eval_results[0].metric_value == 0.125
    for part in (
        "spell_backward",
        "after step 4",
        "| start | 0 | 0.1250 | 6 |",
        "```gin",
        "curves.png",
        "| warm_start |",
    ):
        assert part in card.text, part
    assert (best / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_kept_step_is_evaluated(run, best, capsys):
    argv = ["--run", str(run), "--temperature", "0", "--json"]
    assert eval_verb.main([*argv, "--step", "best"]) == 0
    of_step = json.loads(capsys.readouterr().out)
    assert of_step["title"] == "tiny-run step 4" and of_step["rows"][0]["tasks"] == 6
    of_folder = ["--model", str(best), "--gin", str(run / "config.gin"), "--temperature", "0"]
    assert eval_verb.main([*of_folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == of_step["rows"]
    assert eval_verb.main([*of_folder, "--step", "2"]) == 2 and "--step" in capsys.readouterr().err


def test_a_kept_step_is_served(run, capsys):
    """Each step's own weights answer when that step is requested; the weights of all steps differ."""
    found = {}
    for step in ("best", 2, None):
        _, params, version, _ = serve.load(run=run, step=step)
        found[version] = float(jax.tree.reduce(lambda total, x: total + abs(x).sum(), params, 0.0))
    assert list(found) == [4, 2, 6] and len(set(found.values())) == 3
    with rolljax.load(run, step=2) as model:
        assert model.version == 2
    with pytest.raises(ConfigError, match="kept 2, 4, 6"):
        rolljax.load(run, step=3)
    assert serve.main(["--model", str(run), "--step", "2"]) == 2 and "--step" in capsys.readouterr().err


def test_held_out_tasks_stay_held_out_under_their_name():
    recipe = cli.load_recipe([QUICKSTART], []).value
    envs = ["rg:spell_backward", ReasoningGym("chain_sum")]
    own, other = eval_verb.benchmarks_of(recipe, envs, {"num_tasks": 5})
    assert own.held_out_frac == recipe.evaluation.held_out_frac and other.held_out_frac == 1
    assert own.num_tasks == other.num_tasks == 5 and own.max_answer_tok == recipe.max_answer_tok
    assert collections.Counter(t.env for t in [*own.tasks(), *other.tasks()]) == {"spell_backward": 5, "chain_sum": 5}
