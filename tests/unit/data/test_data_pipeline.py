"""Pipelines: what is left when they are killed, what they refuse, what they say; and every stage that asks no model."""

import asyncio
import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rolljax.chat_models.client import EndpointConfig
from rolljax.config import loader
from rolljax.data import attempts, dedup, filters, pipeline, vectors
from rolljax.data.base import with_key
from rolljax.data.pipeline import Pipeline
from rolljax.data.texts import jaccard, shingles
from rolljax.envs.records import Records
from rolljax.errors import ConfigError, DataError, InfraError
from rolljax.recipes.rome import turn_mask
from rolljax.storage.layout import LOCK

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
from rule_server import RuleServer

RECIPE = """
from __gin__ import dynamic_registration
from rolljax.chat_models import client
from rolljax.data import attempts
from rolljax.data import dedup
from rolljax.data import pipeline
from rolljax.recipes.stagent import stagent

pipeline.Pipeline.stages = [@dedup.Exact(), @attempts.SampleAttempts(), @stagent.Learnability()]
pipeline.Pipeline.model = @client.EndpointConfig()
pipeline.Pipeline.split_by = 'route'
pipeline.Pipeline.concurrency = 4
client.EndpointConfig.url = '{url}'
client.EndpointConfig.model = 'rule'
attempts.SampleAttempts.k = 4
"""


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def through(tmp_path, *stages, records, **settings):
    """Run records through stages; return the rows, and the report's ledger of each stage."""
    source = write(tmp_path / "in.jsonl", records)
    found = pipeline.run(Pipeline(stages, **settings), source, tmp_path / "out", fresh=True)
    rows = [row for name in found.files for row in read(found.folder / name)]
    return rows, list(found.stages.values())


def sums(num, seed=0):
    rng = random.Random(seed)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(num)]
    return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def adder(messages, rng):
    """Answer a sum; the larger it is, the more often the answer is wrong."""
    a, b = (int(word.strip("?")) for word in messages[-1]["content"].split() if word.strip("?").isdigit())
    return f"\\boxed{{{a + b + (rng.random() < (a + b) / 200)}}}"


# ---- killed ---------------------------------------------------------------------------------------------------------


def run_killed(kill, recipe, source, out):
    command = [sys.executable, "-m", "tests.killed_pipeline", str(kill), str(recipe), "--in", source, "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def made(out):
    """Return a pipeline's files, without measured times."""
    report = json.loads((out / "report.json").read_text())
    for stage in report["stages"].values():
        stage.pop("seconds"), stage.pop("asked")
    return {p.name: p.read_text() for p in out.glob("*.jsonl")} | {"report": report}


def test_a_pipeline_that_is_killed_goes_on_without_asking_twice(tmp_path):
    """By SIGKILL, in a process of its own, at points all over what it writes; at each the model has answered before, and
    no answer that was written down is asked for again."""
    source = write(tmp_path / "in.jsonl", sums(12) + sums(3))
    with RuleServer(adder) as server:
        recipe = tmp_path / "recipe.gin"
        recipe.write_text(RECIPE.format(url=server.url))
        whole = run_killed(-1, recipe, source, tmp_path / "whole")
        assert whole.returncode == 0, whole.stderr
        points = int(whole.stderr.split("points=")[1])
        assert server.num_asked == len(server.asked) == 48
        wanted = made(tmp_path / "whole")
        assert set(wanted) == {"sft.jsonl", "rl.jsonl", "report"} and points > 100
        out = tmp_path / "killed"
        for kill in (0, 30, 61, 9, 5):
            server.asked.clear()
            kept = len(answers_in(out))
            killed = run_killed(kill, recipe, source, out)
            assert killed.returncode in (-9, 0), killed.stderr
            assert server.num_asked <= 48 - kept
        server.asked.clear()
        kept = len(answers_in(out))
        if not (out / "report.json").is_file():
            assert run_killed(-1, recipe, source, out).returncode == 0
        assert server.num_asked == 48 - kept
        assert made(out) == wanted
        server.asked.clear()
        assert run_killed(-1, recipe, source, out).returncode == 0 and not server.asked


def answers_in(out):
    return [line for p in out.glob("work/*.answers.jsonl") for line in p.read_bytes().splitlines()]


@pytest.mark.sweep
def test_a_pipeline_that_is_killed_at_every_point_ends_the_same(tmp_path):
    source = write(tmp_path / "in.jsonl", sums(3))
    with RuleServer(adder) as server:
        recipe = tmp_path / "recipe.gin"
        recipe.write_text(RECIPE.format(url=server.url))
        whole = run_killed(-1, recipe, source, tmp_path / "whole")
        wanted = made(tmp_path / "whole")
        for kill in range(0, int(whole.stderr.split("points=")[1]), 3):
            out = tmp_path / f"killed_{kill}"
            assert run_killed(kill, recipe, source, out).returncode == -9
            assert run_killed(-1, recipe, source, out).returncode == 0
            assert made(out) == wanted, kill


def test_a_server_that_fails_ends_the_pipeline_and_what_it_said_is_kept(tmp_path):
    source = write(tmp_path / "in.jsonl", sums(6))
    stages = (attempts.SampleAttempts(k=1, temperature=0),)
    down = [False]

    def fail(body):
        return 500 if down[0] and "99" not in body["messages"][0]["content"] else None

    with RuleServer(adder, fail) as server:
        model = EndpointConfig(server.url, "rule", retries=1, backoff_s=0.01)
        recipe = Pipeline(stages, model, concurrency=1)
        down[0] = True
        with pytest.raises(InfraError, match="500"):
            pipeline.run(recipe, source, tmp_path / "out")
        down[0] = False
        pipeline.run(recipe, source, tmp_path / "out")
        assert len(read(tmp_path / "out" / "data.jsonl")) == 6


def test_a_pipeline_runs_inside_of_an_event_loop(tmp_path):
    """As in a cell of a notebook, whose thread has one."""
    source = write(tmp_path / "in.jsonl", sums(6))

    async def cell():
        recipe = Pipeline((attempts.SampleAttempts(k=2),), EndpointConfig(server.url, "rule"), concurrency=2)
        return pipeline.run(recipe, source, tmp_path / "out")

    with RuleServer(adder) as server:
        found = asyncio.run(cell())
    assert found.files == {"data.jsonl": 6} and found.stages["01_sample_attempts"]["asked"]["calls"] == 12


def test_a_server_that_is_none_is_told_of_by_its_setting(tmp_path):
    (tmp_path / "recipe.gin").write_text(RECIPE.format(url="127.0.0.1:8000"))
    with pytest.raises(ConfigError, match="is not the address of a server") as error:
        loader.load([str(tmp_path / "recipe.gin")], root=Pipeline)
    assert error.value.setting == "EndpointConfig.url" and re.search(r"recipe\.gin:\d+$", error.value.where)


def test_another_pipeline_is_not_written_over_one(tmp_path):
    source = write(tmp_path / "in.jsonl", sums(4))
    pipeline.run(Pipeline((dedup.Exact(),)), source, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds another pipeline: settings differ"):
        pipeline.run(Pipeline((filters.Length(),)), source, tmp_path / "out")
    write(tmp_path / "in.jsonl", sums(5))
    with pytest.raises(ConfigError, match="input differ"):
        pipeline.run(Pipeline((dedup.Exact(),)), source, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(ConfigError, match="not the folder of a pipeline"):
        pipeline.run(Pipeline((dedup.Exact(),)), source, tmp_path / "other")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"stages": ()}, "has no stage"),
        ({"stages": (attempts.SampleAttempts(),)}, "stage sample_attempts asks a model"),
        ({"stages": (dedup.Exact(),), "output": "csv"}, "is no format"),
        ({"stages": (dedup.Exact(),), "concurrency": 0}, "at least 1"),
    ],
)
def test_what_cannot_run_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Pipeline(**settings)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet"])
def test_formats_hold_the_same_and_can_be_read_again(tmp_path, form):
    records = [{"prompt": f"ä {i}", "n": i, "tags": ["a", "b"], "of": {"x": 1.5}} for i in range(20)]
    source = write(tmp_path / "in.jsonl", records)
    outs = [tmp_path / "one", tmp_path / "two"]
    for out in outs:
        pipeline.run(Pipeline((dedup.Exact(),), output=form), source, out)
    assert (outs[0] / f"data.{form}").read_bytes() == (outs[1] / f"data.{form}").read_bytes()
    again = tmp_path / "again"
    pipeline.run(Pipeline((filters.Length(),)), str(outs[0] / f"data.{form}"), again)
    assert read(again / "data.jsonl") == records


def test_rows_that_are_no_records_are_named_or_counted(tmp_path):
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as f:
        f.write('{"prompt": "a"}\nnot json\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match=r"in.jsonl.gz, line 2: is not JSON.*\n.*bad_rows"):
        pipeline.run(Pipeline((dedup.Exact(),)), str(tmp_path / "in.jsonl.gz"), tmp_path / "out")
    found = pipeline.run(Pipeline((dedup.Exact(),), bad_rows="skip"), str(tmp_path / "in.jsonl.gz"), tmp_path / "skip")
    assert found.files == {"data.jsonl": 2} and found.stages["01_exact"]["dropped"] == {"bad_row": 1}


def test_the_report_says_what_was_dropped_and_why(tmp_path):
    rows, stages = through(
        tmp_path, dedup.Exact(), filters.Length(max_words=5), records=[*sums(5), *sums(5), {"prompt": "a " * 9}]
    )
    assert len(rows) == 5 and [s["dropped"] for s in stages] == [{"duplicate": 5}, {"too_long": 1}]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "# 11 records in, 5 out" in text and "| 02_length | 6 | 5 | too_long 1 |" in text
    assert "a a a a" in text and (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_records(tmp_path):
    """Of a pipeline in a process of its own: eight times the records, not twice the memory above that of the start."""
    recipe = tmp_path / "recipe.gin"
    recipe.write_text(
        "from __gin__ import dynamic_registration\nfrom rolljax.data import dedup\nfrom rolljax.data import filters\n"
        "from rolljax.data import pipeline\npipeline.Pipeline.stages = [@filters.Length(), @dedup.Exact()]\n"
    )
    peaks = []
    for num in (2_000, 64_000):
        source = write(tmp_path / f"{num}.jsonl", ({"prompt": f"{i} " + "x" * 1000} for i in range(num)))
        code = (
            "from rolljax.data.__main__ import main;"
            f"code = main([{str(recipe)!r}, '--in', {source!r}, '--out', {str(tmp_path / f'out_{num}')!r}]);"
            "print(code, open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        code, peak = done.stdout.split()[-2:]
        assert code == "0", done.stderr
        peaks.append(int(peak) / 1024)
    assert peaks[1] - peaks[0] < 30, peaks  # MiB; the rows are 65 MiB


# ---- stages that ask no model ---------------------------------------------------------------------------------------


def test_minhash_finds_what_all_pairs_find(tmp_path):
    rng = random.Random(1)
    texts = []
    for _ in range(150):
        words = [f"word{rng.randrange(500)}" for _ in range(30)]
        texts.append(" ".join(words))
        for _ in range(rng.randrange(3)):
            near = list(words)
            for _ in range(rng.randrange(1, 4)):
                near[rng.randrange(30)] = f"word{rng.randrange(500)}"
            texts.append(" ".join(near))
    rng.shuffle(texts)
    rows, (ledger,) = through(tmp_path, dedup.MinHash(), records=[{"prompt": t} for t in texts])
    sets = {t: shingles(t, "char", 5) for t in texts}
    found = [r["prompt"] for r in rows]
    dropped = [t for t in texts if t not in found]
    assert ledger["dropped"]["near_duplicate"] == len(dropped) > 50
    before = {t: [k for k in found if texts.index(k) < texts.index(t)] for t in texts}
    assert all(any(jaccard(sets[t], sets[k]) > 0.8 for k in before[t]) for t in dropped)
    missed = [t for t in found if any(jaccard(sets[t], sets[k]) > 0.8 for k in before[t])]
    assert len(missed) <= len(dropped) / 10  # bands find nearly all pairs, not all


def test_k_center_takes_the_farthest():
    points = np.array([[0.0], [1], [2], [10], [11]])
    assert list(vectors.k_center(points, 3)) == [0, 4, 2]
    assert sorted(vectors.k_center(points, 9)) == [0, 1, 2, 3, 4]
    assert list(vectors.k_center(np.zeros((3, 2)), 2)) == [0, 1]


def test_embeddings_of_a_column_and_of_words(tmp_path):
    given = [[1, 0], [0.99, 0.1], [0, 1], [1, 0.01], [-1, 0]]
    records = [{"prompt": str(i), "v": v, "b": "x" if i < 3 else "y"} for i, v in enumerate(given)]
    own = vectors.Embedding(vectors="v")
    rows, _ = through(tmp_path, vectors.EmbeddingDedup(own), records=records)
    assert [r["prompt"] for r in rows] == ["0", "2", "4"]
    rows, _ = through(tmp_path, vectors.EmbeddingDedup(own, bucket="b"), records=records)
    assert [r["prompt"] for r in rows] == ["0", "2", "3", "4"]
    rows, _ = through(tmp_path, vectors.KCenter(own, num=2), records=records)
    assert [r["prompt"] for r in rows] == ["0", "4"]
    texts = ["the cat sat on the mat", "The cat sat on the mat!", "stocks fell sharply on monday", "a b c d e f"]
    rows, _ = through(tmp_path, vectors.EmbeddingDedup(), records=[{"prompt": t} for t in texts])
    assert [r["prompt"] for r in rows] == [texts[0], *texts[2:]]
    source = tmp_path / "infinite.jsonl"
    source.write_text('{"v": [1, 1e999]}\n{"v": "x"}\n')
    with pytest.raises(DataError, match="no list of finite numbers"):
        pipeline.run(Pipeline((vectors.KCenter(own),)), str(source), tmp_path / "out", fresh=True)


def test_records_that_share_words_with_evaluations_are_left_out(tmp_path):
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen".split()
    held = write(tmp_path / "eval.jsonl", [{"question": " ".join(words)}, {"question": "what is it worth now"}])
    records = [
        {"prompt": "Zero: " + ", ".join(words[1:]).upper() + " end"},
        {"prompt": " ".join(words[:12]) + " other " + words[12]},
        {"prompt": "so What is IT worth, now?"},
        {"prompt": "nothing of it"},
    ]
    stage = filters.Decontaminate((held,), against_key="question")
    rows, (ledger,) = through(tmp_path, stage, records=records)
    assert rows == [records[1], records[3]] and ledger["dropped"] == {"contaminated": 2}


@pytest.mark.parametrize(
    "stage, kept",
    [
        (filters.Length(min_words=3, max_chars=60), "abdghij"),
        (filters.KeepScripts(), "abcdefgj"),
        (filters.KeepScripts(scripts=("han", "kana")), "ghi"),
        (filters.Quality(), "abdghi"),
    ],
)
def test_texts_are_filtered(tmp_path, stage, kept):
    texts = {
        "a": "What is the capital of France?",
        "b": "Ein Satz über Äpfel und Öl.",
        "c": "x y",
        "d": "one two three four five six seven",
        "e": "go on and go on and go on and go on and go on and go on and on and on",
        "f": "same line\nsame line\nsame line\nsame line that is long enough for the limit of sixty characters",
        "g": "1 + 1",
        "h": "東京 の 天気 は?",
        "i": "你好 世界 吗",
        "j": "{{{{ a b c }}}} ;;;; ###",
    }
    if isinstance(stage, filters.Quality):
        texts["c"] = "broken \ufffd text here"
    rows, _ = through(tmp_path, stage, records=[{"prompt": t, "name": n} for n, t in texts.items()])
    assert "".join(r["name"] for r in rows) == kept


def test_pass_rates_outside_of_a_band_are_left_out(tmp_path):
    """Specs: of 0, 1/8, 4/8, 7/8, 1 the band [.1, .7] keeps two."""
    records = [
        {"prompt": str(n), "attempts": [{"text": "", "reward": float(i < n)} for i in range(8)]}
        for n in (0, 1, 4, 7, 8)
    ]
    stages = (attempts.Difficulty(), filters.Between("rollouts.mu", 0.1, 0.7))
    rows, ledgers = through(tmp_path, *stages, records=records)
    assert [r["prompt"] for r in rows] == ["1", "4"] and "attempts" not in rows[0]
    assert ledgers[1]["dropped"] == {"too_low": 1, "too_high": 2}


@pytest.mark.parametrize("ones, mu, score", [(8, 1, 0), (4, 0.5, 0.125), (7, 0.875, 0.095703), (1, 0.125, 0.013672)])
def test_rates_of_rewards(ones, mu, score):
    found = attempts.rates([1.0] * ones + [0.0] * (8 - ones))
    assert found.mu == mu and found.score == pytest.approx(score, abs=5e-7)
    assert found.sigma == pytest.approx((mu * (1 - mu)) ** 0.5)


def test_turns_with_errors_and_those_that_did_not_matter_are_context(tmp_path):
    """Specs: error flags (0, 1, 0), relevance (1, 1, 0): only turn 1 is supervised, in `Records` too."""
    turns = [(False, True), (True, True), (False, False)]
    said = []
    for i, (error, relevant) in enumerate(turns):
        said += [{"role": "user", "content": f"u{i}"}]
        said += [{"role": "assistant", "content": f"a{i}", "error": error, "relevant": relevant}]
    nothing = [m | {"relevant": False} if m["role"] == "assistant" else m for m in said]
    rows, (ledger,) = through(tmp_path, turn_mask.TurnMask(), records=[{"messages": said}, {"messages": nothing}])
    assert len(rows) == 1 and ledger["dropped"] == {"no_turn_counts": 1}
    read_by_env = Records(path=str(tmp_path / "out" / "data.jsonl")).record(0)
    assert [a.weight for a in read_by_env.answers] == [1, 0, 0] and [a.text for a in read_by_env.answers] == [
        "a0",
        "a1",
        "a2",
    ]
    failing = [said[0], {"role": "assistant", "content": "run"}, {"role": "tool", "content": "Traceback: no"},
               {"role": "assistant", "content": "again"}]  # fmt: skip
    rows, _ = through(tmp_path, turn_mask.TurnMask(error_pattern="^Traceback"), records=[{"messages": failing}])
    assert [m.get("weight") for m in rows[0]["messages"]] == [None, 0, None, 1]


# ---- the column, and starts that fail -------------------------------------------------------------------------------


def test_one_key_names_the_column_for_all_stages(tmp_path):
    asked = [{"question": f"What is {i} of this?", "prompt": "the same"} for i in (1, 2, 1)]
    stages = (dedup.Exact(), filters.Length(max_chars=100), dedup.MinHash(threshold=0.99))
    rows, _ = through(tmp_path, *stages, records=asked, key="question")
    assert [r["question"] for r in rows] == [asked[0]["question"], asked[1]["question"]]
    rows, _ = through(tmp_path, dedup.Exact(key="prompt"), records=asked, key="question")
    assert len(rows) == 1
    inner = with_key(vectors.EmbeddingDedup(), "question").embedding
    assert inner == vectors.Embedding(key="question")
    tasks = write(tmp_path / "eval.jsonl", [{"question": "What is 2 of this?"}])
    rows, _ = through(tmp_path, filters.Decontaminate((tasks,)), records=asked, key="question")
    assert [r["question"] for r in rows] == [asked[0]["question"]] * 2


def test_a_failed_start_leaves_the_folder_free(tmp_path):
    out, source = tmp_path / "out", write(tmp_path / "in.jsonl", [{"question": "1+1?"}, {"question": "1+2?"}])
    with pytest.raises(DataError, match=r"lacks 'prompt'; it has question\n  fix: .*Pipeline\.key"):
        pipeline.run(Pipeline((dedup.Exact(),)), source, out)
    assert [p.name for p in out.iterdir()] == [LOCK]
    found = pipeline.run(Pipeline((dedup.Exact(),), key="question"), source, out)
    assert found.files == {"data.jsonl": 2}
    with pytest.raises(ConfigError, match="holds another pipeline"):
        pipeline.run(Pipeline((dedup.Exact(), filters.Length()), key="question"), source, out)


def test_answers_of_a_model_are_kept_when_a_start_fails_after_them(tmp_path):
    source = write(tmp_path / "in.jsonl", [*sums(2), {"prompt": "What is 3 + 4?"}])
    with RuleServer(adder) as server:
        stages, model = (attempts.SampleAttempts(k=1),), EndpointConfig(server.url, "rule")
        with pytest.raises(DataError, match="lacks 'answer'"):
            pipeline.run(Pipeline(stages, model, concurrency=1), source, tmp_path / "out")
        with pytest.raises(ConfigError, match="holds another pipeline"):
            pipeline.run(Pipeline(stages, model, concurrency=1, seed=1), source, tmp_path / "out")
