"""Think-J's recipes from end to end on a few steps: init, pairs of its own traces, DPO, online GRPO, both orders."""

import contextlib
import http.server
import json
import threading

import pytest

import rolljax
from rolljax.chat_models.base import Asking
from rolljax.chat_models.client import EndpointConfig
from rolljax.commands.train import main as train
from rolljax.envs.records import Records
from rolljax.envs.tasks import is_held_out
from rolljax.errors import ConfigError, DataError
from rolljax.eval import evaluate
from rolljax.evaluation import answers
from rolljax.evaluation import report as reports
from rolljax.evaluation.settings import Attempts
from rolljax.recipes.think_j import judge_pairs
from rolljax.recipes.think_j.digit_sums import DigitSums

from ..e2e.conftest import rows

QUIET = {"MeshSpec.data": 1, "Evaluation.tasks": 8}
HOW = Asking(temperature=1.0, max_tok=12, seed=0)


def argv(name, run_dir, settings):
    written = {k: v if str(v).startswith("@") else repr(v) for k, v in (QUIET | settings).items()}
    sets = [a for key, value in written.items() for a in ("--set", f"{key} = {value}")]
    return ["--gin", name, "--run_dir", str(run_dir), *sets]


@pytest.fixture(scope="module")
def init(tmp_path_factory):
    """Train a judge and critic that know the form of their answers."""
    folder = tmp_path_factory.mktemp("think_j") / "init"
    few = {"warm_start/Phase.steps": 16, "warm_start/Phase.prompts_per_step": 48, "warm_start/Phase.eval_every": 0}
    assert train(argv("think_j_init", folder, few)) == 0
    return folder


@pytest.fixture(scope="module")
def made(init, tmp_path_factory):
    """Return pairs of its traces, and the number of requests."""
    to = tmp_path_factory.mktemp("pairs")
    with rolljax.load(init) as model:
        chat = model.chat_model()
        first = judge_pairs.make(DigitSums(), chat, to=to, num=60, how=HOW)
        asked = chat.counts()["requests"]
        texts = (to / "traces.jsonl").read_bytes(), first.pairs.read_text()
        lines = texts[0].splitlines(keepends=True)
        (to / "traces.jsonl").write_bytes(b"".join(lines[:50]) + lines[50][:-9])  # as a writer leaves it that is killed
        again = judge_pairs.make(DigitSums(), chat, to=to, num=60, how=HOW)
        assert chat.counts()["requests"] - asked == 2 * 10
        assert again.counts == first.counts and again.pairs.read_text() == texts[1]
        with pytest.raises(ConfigError, match="which is not asked about"):
            judge_pairs.make(DigitSums(seed=1, num_pairs=8), chat, to=to, num=3, how=HOW)
        with pytest.raises(DataError, match="different pairs"):
            judge_pairs.make(DigitSums(num_pairs=8), chat, to=to / "few", num=9, how=HOW)
    return first, asked


@pytest.mark.slow
def test_pairs_of_a_run_s_own_traces(made):
    found, asked = made
    assert asked == 120 and sum(found.counts.values()) == 60 and 0 < found.num <= 60
    env = DigitSums()
    for line in found.pairs.read_text().splitlines():
        record = json.loads(line)
        better = env.question(record["index"]).better
        assert env.read(record["chosen"]).better == better
        assert (said := env.read(record["rejected"])) is None or said.better != better
        assert not is_held_out(env.task(record["index"]), 0.1)


@pytest.mark.slow
def test_dpo_on_the_pairs_and_its_evaluation_in_both_orders(init, made, tmp_path):
    few = {"dpo/Phase.steps": 2, "dpo/Phase.prompts_per_step": 4, "dpo/Phase.eval_every": 0, "Evaluation.tasks": 1}
    given = {"Recipe.model": str(init / "hf"), "Records.path": str(made[0].pairs)}
    assert train(argv("think_j_offline", tmp_path / "run", few | given)) == 0
    assert all("preference/margin_nat" in row for row in rows(tmp_path / "run"))
    assert Records(path=str(made[0].pairs)).num_records == made[0].num
    found = evaluate(
        run=tmp_path / "run", envs=["digit_sums"], tasks=12, max_answer_tok=12, to=tmp_path / "a", quiet=True
    )
    assert found["digit_sums"].tasks == 24 and found.tables[0]["all pairs"].pairs == 12
    assert "digit_sums, both orders" in found.markdown()
    record = answers.read(tmp_path / "a")
    assert record["results"]["tables"][0]["env"] == "digit_sums"
    compared, text = reports.compare(record, record, Attempts())  # a pair is one task
    assert {r["tasks"] for r in compared} == {12} and "12 tasks" in text


@pytest.mark.slow
def test_the_plan_at_real_scale(init, tmp_path, capsys):
    data = tmp_path / "preference.jsonl"
    lines = [
        {"prompt": f"Say {i}.", "response_1": f"{i}", "response_2": "no", "preference_strength": (-2, 0, 3)[i % 3]}
        for i in range(300)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"Recipe.model": str(init / "hf"), "Preferences.path": str(data)}
    assert train([*argv("think_j_qwen3_8b", tmp_path / "real", settings), "--dry_run"]) == 0
    assert "[Response (a)]" in capsys.readouterr().out


@contextlib.contextmanager
def server(text):
    """Serve an OpenAI-compatible API that gives the same answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 256  # the client opens a connection for each request; five may wait by default

    with Server(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield EndpointConfig(f"http://127.0.0.1:{http_server.server_port}/v1", "same", concurrency=8)
        http_server.shutdown()


def test_a_reward_bench_file_against_a_server_that_always_says_a(tmp_path):
    path = tmp_path / "rewardbench.jsonl"
    subsets = ["alpacaeval-easy", "llmbar-natural", "donotanswer", "math-prm", "hep-go"]
    lines = [
        {"id": i, "prompt": f"q{i}", "chosen": f"x{i}", "rejected": f"y{i}", "subset": subsets[i % 5]}
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    env = f"preferences(path={str(path)!r}, verdict='plain')"
    with server("Both are fine. Therefore, Response (a) is better.") as endpoint:
        found = evaluate(endpoint=endpoint, envs=[env], attempts=Attempts(concurrency=8), quiet=True)
    table = found.tables[0]
    assert [row.name for row in table.rows][-3:] == ["Reasoning", "RewardBench", "all pairs"]
    assert [table["all pairs"].estimates[m].mean for m in ("accuracy", "pair accuracy", "agreement")] == [0.5, 0, 0]


def test_pairs_by_models_behind_servers(tmp_path):
    """The judge always says (a), the critic is another server: a pair exists where the critic obeyed its label."""
    env = DigitSums(brief=False, verdict="plain")

    def make(to, judge, critic):
        return judge_pairs.make(env, judge.open(), critic.open(), to=to, num=20, held_out_frac=0.0)

    with server("Therefore, Response (a) is better.") as says_a, server("Therefore, Response (b) is better.") as says_b:
        found = make(tmp_path / "ab", says_a, says_b)
        # where (a) is better the critic gets the label (b) and says so; where it is not, the critic is right by itself
        assert found.num == 20 and set(found.counts) == {"judge_right", "judge_wrong"}
        assert make(tmp_path / "aa", says_a, says_a).num == 0
