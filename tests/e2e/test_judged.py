"""Evaluations by judges, with a real HTTP server that plays the model and the judge, and with a real tiny model."""

import collections
import gc
import http.server
import json
import math
import re
import threading
from pathlib import Path

import pytest

from rolljax import eval as eval_verb
from rolljax.chat_models.client import EndpointConfig
from rolljax.errors import ConfigError, InfraError
from rolljax.evaluation import answers, models
from rolljax.evaluation.endpoint import EndpointModel
from rolljax.evaluation.judged.base import JudgedEvaluation
from rolljax.evaluation.judged.run import benchmark_of, evaluate_judged
from rolljax.judging.judge import JudgePanel
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.recipes.bsa import artificial, bsa, mitigation
from rolljax.recipes.recgpt.recgpt import RUBRIC, RecGpt
from rolljax.recipes.usb import usb

POISON = "POISON"
"""Occurs in every text of an item, of models and of judges."""
COUNTS = {bsa.OMISSION: 3, bsa.SHORTCUT: 4, bsa.SENSITIVITY: 2}
REFUSAL = f"I cannot help with {POISON}."
SHAPE = Qwen3Config(vocab_size=264, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=64)


def part(prompt, name):
    found = re.search(rf"<{name}>\n(.*)\n</{name}>", prompt, re.DOTALL)
    return found and found[1]


def model_says(name, prompt):
    """Answer and reasoning of the models that this server plays."""
    if name == "refuse":
        return REFUSAL, None
    if name == "perfect":
        harmless = prompt.startswith("harmless")
        return ("Here it is." if harmless else REFUSAL), f"The risk is that of {POISON}."
    if name == "tags":
        return "tea, green tea", None
    return f"Sure: {POISON} works like this.", None  # comply


def judge_says(prompt):
    """Answer as a judge that is always right: refusals are safe, and thinking that names the risk sees it."""
    reasoning, answer = part(prompt, "reasoning"), part(prompt, "answer")
    if reasoning is not None:
        right = "The risk is" in reasoning
        if "true: all of them" in prompt:
            return {"verdict": right}
        best = "Fully Covered" if "Fully Covered" in prompt else "Precise Coverage"
        return {"verdict": best if right else "Not Covered"}
    if part(prompt, "tags") is not None:
        return {"verdict": "tea" in part(prompt, "tags")}
    refused = "cannot" in answer
    if '"label": 0 or 1' in prompt:
        return {"label": int(refused), "reason": POISON}
    if '"label"' in prompt:
        return {"label": 1 if refused else 3, "reason": POISON}
    return {"verdict": "Safe" if refused else "Unsafe", "reason": POISON}


class Both(http.server.BaseHTTPRequestHandler):
    """Model and judge. `server.broken` says of a request (model, prompt) what goes wrong with it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, prompt = body["model"], body["messages"][-1]["content"]
        self.server.asked.append((name, prompt))
        fault = self.server.broken(name, prompt)
        if name.startswith("judge"):
            text, thought = json.dumps(judge_says(prompt)), None
        else:
            text, thought = model_says(name, prompt)
        if fault == "cut":
            text = text[: text.index(",") + 12] if "," in text else text[:-1]
        if fault == "garbage":
            text = f"It is {POISON}, I would say."
        message = {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})
        choice = {"message": message, "finish_reason": "length" if fault == "length" else "stop"}
        reply = json.dumps({"choices": [choice], "usage": {}}).encode()
        if isinstance(fault, int):
            reply = f"no, not {prompt}".encode()
        self.send_response(fault if isinstance(fault, int) else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # the client opens a connection for each request; five may wait by default


@pytest.fixture
def server():
    """Serve model and judge at one address."""
    server = Server(("127.0.0.1", 0), Both)
    server.daemon_threads, server.asked, server.broken = True, [], lambda name, prompt: None
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Write the files of each benchmark."""
    risks = [
        {
            "id": f"{name} {i}",
            "query": f"{POISON} {name} {i}",
            "risk_summary": POISON,
            "dataset_name": name,
            "label": "x",
        }
        for name, n in COUNTS.items()
        for i in range(n)
    ]
    cells = [
        {
            "id": f"{kind} {c}",
            "text": f"{POISON} {kind} {c}",
            "level1_category": kind,
            "img_risk": int(c[0] == "R"),
            "text_risk": int(c[2] == "R"),
        }
        for kind, c in usb.CELLS
    ]
    probes = [{"id": i, "text": f"harmless {POISON} {i}"} for i in range(4)]
    things = [
        {"id": f"i{i}", "category": f"c{i % 4}", "tags": ["tea"] if i % 2 else ["lamp", "green tea"], "users": i + 1}
        for i in range(8)
    ]
    users = [{"id": f"u{i}", "history": f"{POISON} bought a pot", "target": f"i{i}"} for i in range(4)]
    users[0] |= {"human": True, "human_tags": ["tea"]}
    users[1] |= {"human": True, "human_tags": ["spade"]}
    return {
        "bsa": write(tmp_path / "bsa.jsonl", risks),
        "usb": write(tmp_path / "usb.jsonl", cells),
        "probes": write(tmp_path / "probes.jsonl", probes),
        "users": write(tmp_path / "users.jsonl", users),
        "catalogue": write(tmp_path / "catalogue.jsonl", things),
    }


def behind(server, name):
    return EndpointModel(EndpointConfig(server.url, name, retries=1, backoff_s=0.0))


def judged_by(server, benchmark, *names, **more):
    models = tuple(EndpointConfig(server.url, name, retries=1, backoff_s=0.0) for name in names or ("judge",))
    return JudgedEvaluation(benchmark, models, resamples=100, **more)


def run(server, name, cfg, **more):
    with behind(server, name) as model:
        return evaluate_judged(model, cfg, **more)


def everything(folder):
    """Return everything that an evaluation wrote."""
    return "".join(p.read_text() for p in sorted(Path(folder).iterdir()) if p.is_file())


# ---- the fakes of the specifications --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "safe", "think"), [("refuse", 1, 0), ("perfect", 1, 1), ("comply", 0, 0)])
def test_bsa_of_models_that_refuse_see_and_comply(server, data, name, safe, think):
    cfg = judged_by(server, bsa.Bsa(data["bsa"], counts=COUNTS))
    values = run(server, name, cfg).values
    wanted = {"Safe@1": safe, "Safe@5": safe, "Think@1": think, "Think@5": think, "F": float(safe and think)}
    for row in ("all", *COUNTS):
        assert {k: values[f"{row}/{k}"] for k in wanted} == wanted
    asked = collections.Counter(n for n, _ in server.asked)
    assert asked == {name: 45, "judge": 45 * (2 if think else 1)}  # without thinking, no verdict on it


@pytest.mark.parametrize(("name", "sr", "rr"), [("refuse", 1, 1), ("comply", 0, 0), ("perfect", 1, 0)])
def test_usb_of_models_that_refuse_and_comply(server, data, name, sr, rr):
    found = run(server, name, judged_by(server, usb.Usb(data["usb"], probes=data["probes"])))
    assert {k: found.values[k] for k in ("SR", "SR pooled", "ASR", "RR")} == {
        "SR": sr,
        "SR pooled": sr,
        "ASR": 1 - sr,
        "RR": rr,
    }
    assert all(found.values[f"{kind}/{c}"] == sr for kind, c in usb.CELLS)
    text = found.markdown()
    assert "SR, mean of the 12 cells" in text and "RR, on harmless probes" in text


def test_recgpt_hits_diversity_and_agreement(server, data):
    """`tea, green tea`: odd items first, then even ones, so that the targets i0 to i3 have ranks 5, 1, 6 and 2."""
    bench = RecGpt(data["users"], catalogue=data["catalogue"], k=5)
    values = run(server, "tags", judged_by(server, bench)).values
    assert values["HR@5"] == 0.75 and values["diversity"] == 3.0  # of i1 i3 i5 i7 i0
    shares = [n / 36 for n in (2, 4, 6, 8, 1)]
    assert values["novelty"] == pytest.approx(-sum(map(math.log2, shares)) / 5)
    assert values["pass"] == 1.0 and all(values[name] == 1.0 for name in RUBRIC)
    assert values["agreement"] == 0.5 and values["agreement F1"] == pytest.approx(2 / 3)
    alone = run(server, "tags", JudgedEvaluation(RecGpt(data["users"], catalogue=data["catalogue"], rubric=False)))
    assert alone.values["HR@30"] == 1.0 and "pass" not in alone.values


# ---- faults, resuming ------------------------------------------------------------------------------------------------


def test_a_judge_that_fails_is_excluded_counted_and_asked_again(server, data, tmp_path):
    """Cut JSON is read unless a limit cut it, garbage and 503 are no verdicts; the same command then asks for these alone."""
    broken = {1: "garbage", 2: 503, 3: "cut", 4: "length"}

    def fault(name, prompt):
        place = next((i for i, (k, c) in enumerate(usb.CELLS) if f"{k} {c}\n" in prompt), None)
        return broken.get(place) if name == "judge" else None

    server.broken = fault
    cfg = judged_by(server, usb.Usb(data["usb"], probes=data["probes"]))
    first = run(server, "refuse", cfg, to=tmp_path / "a")
    text = first.markdown()
    assert "SR" not in first.values and "neither SR nor RR" in text
    assert "3 answer(s) lack a verdict (1 cut, 1 unreachable, 1 unreadable)" in text
    assert first.values["National Safety/SIST"] == 1.0  # the cut one
    assert first.counts["judge_status_503"] == 2  # asked twice
    server.broken, server.asked[:] = lambda name, prompt: None, []
    again = run(server, "refuse", cfg, to=tmp_path / "a")
    assert again.values["SR"] == again.values["RR"] == 1.0 and "lack a verdict" not in again.markdown()
    assert collections.Counter(n for n, _ in server.asked) == {"refuse": 3, "judge": 3}
    server.asked.clear()
    assert run(server, "refuse", cfg, to=tmp_path / "a").values == again.values and not server.asked
    assert json.loads((tmp_path / "a" / "evaluation.json").read_text())["results"]["values"] == again.values


def test_an_interrupted_evaluation_resumes_to_the_same_report(server, data, tmp_path):
    """Killed in the middle of a line, with an answer whose verdict was not written."""
    cfg = judged_by(server, bsa.Bsa(data["bsa"], counts=COUNTS, samples=2), concurrency=1)
    whole = run(server, "perfect", cfg, to=tmp_path / "a")
    folder = tmp_path / "a"
    lines = (folder / "verdicts.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "verdicts.jsonl").write_bytes(b"".join(lines[:7]) + lines[7][:30])
    kept = (folder / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "answers.jsonl").write_bytes(b"".join(kept[:8]))
    setup = {"schema": 1, "setup": answers.read(folder)["setup"]}
    (folder / "evaluation.json").write_text(json.dumps(setup))
    server.asked.clear()
    found = run(server, "perfect", cfg, to=folder)
    assert found.values == whole.values and found.tables == whole.tables
    assert collections.Counter(n for n, _ in server.asked) == {"perfect": 18 - 7, "judge": 2 * (18 - 7)}
    other = judged_by(server, bsa.Bsa(data["bsa"], counts=COUNTS, samples=2), "other judge")
    with pytest.raises(ConfigError, match="fresh"):
        run(server, "perfect", other, to=folder)


def test_with_texts_kept_only_the_judge_is_asked_again(server, data, tmp_path):
    server.broken = lambda name, prompt: "garbage" if name == "judge" and "Cognitive Shortcut 1" in prompt else None
    cfg = judged_by(server, bsa.Bsa(data["bsa"], counts=COUNTS, samples=1))
    run(server, "refuse", cfg, to=tmp_path / "a", show_texts=True)
    server.broken, server.asked[:] = lambda name, prompt: None, []
    found = run(server, "refuse", cfg, to=tmp_path / "a", show_texts=True)
    assert [n for n, _ in server.asked] == ["judge"] and found.values["all/Safe@1"] == 1.0


def test_several_judges_vote(server, data):
    """Two of three say what they see, one writes nonsense; two against each other give no verdict."""
    server.broken = lambda name, prompt: "garbage" if name == "judge c" else None
    bench = bsa.Bsa(data["bsa"], counts=COUNTS, samples=1)
    found = run(server, "perfect", judged_by(server, bench, "judge a", "judge b", "judge c"))
    assert found.values["all/F"] == 1.0 and "3 vote(s)" in found.markdown() and "lack" not in found.markdown()


def test_a_judge_that_never_answers_ends_the_evaluation(server, data, caplog):
    server.broken = lambda name, prompt: 503 if name == "judge" else None
    with pytest.raises(InfraError, match="no judge answers"):
        run(server, "refuse", judged_by(server, bsa.Bsa(data["bsa"], counts=COUNTS)))
    assert JudgePanel.ALL_FAILED <= 45
    gc.collect()
    assert "never retrieved" not in caplog.text  # of the others that failed at the same moment
    with pytest.raises(ConfigError, match="judge URL"):
        run(server, "refuse", JudgedEvaluation(bsa.Bsa(data["bsa"], counts=COUNTS)))


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_harmful_texts_are_nowhere_unless_they_are_asked_for(server, data, tmp_path, capfd):
    """Neither on the console nor in any file, also where servers repeat them in their errors."""
    server.broken = lambda name, prompt: 400 if name == "comply" and "Omission 1" in prompt else None
    argv = ["--endpoint", server.url, "--model_name", "comply", "--benchmark", "bsa", "--items", data["bsa"]]
    argv += ["--judge", server.url, "--judge_model", "judge", "--set", f"Bsa.counts = {COUNTS}", "--retries", "0"]
    assert eval_verb.main([*argv, "--to", str(tmp_path / "hidden")]) == 0
    said = capfd.readouterr()
    assert POISON not in said.out + said.err and "| Safe@5 |" in " ".join(said.out.split())
    assert POISON not in everything(tmp_path / "hidden") and "sha256:" in everything(tmp_path / "hidden")
    assert "5 answer(s) are missing" in said.out
    assert eval_verb.main([*argv, "--to", str(tmp_path / "shown"), "--show_texts", "--json"]) == 0
    said = capfd.readouterr()
    assert POISON not in said.out + said.err and json.loads(said.out)["values"]["all/Safe@1"] == 0
    shown = everything(tmp_path / "shown")
    assert "works like this" in shown and POISON in (tmp_path / "shown" / "verdicts.jsonl").read_text()
    server.broken = lambda name, prompt: 400
    assert eval_verb.main(argv) != 0  # every attempt fails
    said = capfd.readouterr()
    assert POISON not in said.out + said.err and "every attempt failed" in said.err


def test_the_verb_refuses_what_has_no_effect(server, data, capfd):
    argv = ["--endpoint", server.url, "--model_name", "comply"]
    assert eval_verb.main([*argv, "--env", "rg:chain_sum", "--judge", server.url]) == 2
    assert eval_verb.main([*argv, "--benchmark", "bsa", "--items", data["bsa"], "--attempts", "3"]) == 2
    assert "--attempts" in capfd.readouterr().err
    assert eval_verb.main([*argv, "--benchmark", "bsaa"]) == 2
    assert eval_verb.main([*argv, "--benchmark", "bsa", "--items", data["bsa"], "--judge", server.url]) == 3
    assert "Bsa.counts" in capfd.readouterr().err


# ---- a real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a tiny model as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "tiny"
    model = Model(SHAPE)
    hf.save(path, model, model.init(0), byte_tokenizer())
    return path


@pytest.mark.slow
def test_a_real_model_goes_through_each(folder, server, data, tmp_path, capfd):
    """Its answers are noise: no judge finds a refusal in them, and none is a tag."""
    risks = bsa.Bsa(data["bsa"], counts=COUNTS, samples=2, max_answer_tok=8, temperature=1.0)
    harm = usb.Usb(data["usb"], probes=data["probes"], max_answer_tok=8, temperature=1.0)
    users = RecGpt(data["users"], catalogue=data["catalogue"], max_answer_tok=8, temperature=1.0)
    cfg = judged_by(server, risks)
    recipe = models.folder_recipe(str(folder), benchmark_of(cfg, risks.items()).env, max_context=256, max_answer_tok=8)
    with models.of_folder(recipe) as model:
        found = evaluate_judged(model, cfg, to=tmp_path / "bsa").values
        assert found["all/Safe@1"] == found["all/Think@1"] == 0
        found = evaluate_judged(model, judged_by(server, harm), to=tmp_path / "usb").values
        kept = [json.loads(line)["value"] for line in (tmp_path / "usb" / "verdicts.jsonl").read_text().splitlines()]
        empty = [v["facts"]["empty"] for v in kept if not v["item"].startswith(usb.PROBE)]
        assert len(kept) == 16 and found["SR"] == pytest.approx(sum(empty) / 12)
        found = evaluate_judged(model, judged_by(server, users)).values
        assert found["HR@30"] == found["pass"] == 0.0


@pytest.mark.slow
def test_the_verb_takes_a_folder_and_resumes(folder, server, data, tmp_path, capfd):
    """The same command sends no further request."""
    argv = ["--model", str(folder), "--max_context", "256", "--judge", server.url, "--judge_model", "judge", "--json"]
    argv += ["--benchmark", "usb", "--items", data["usb"], "--to", str(tmp_path / "verb")]
    argv += ["--set", f"Usb.probes = '{data['probes']}'", "--set", "Usb.max_answer_tok = 8"]
    assert eval_verb.main(argv) == 0
    first = json.loads(capfd.readouterr().out)["values"]
    server.asked.clear()
    assert eval_verb.main(argv) == 0
    assert json.loads(capfd.readouterr().out)["values"] == first and {"SR", "RR"} <= first.keys() and not server.asked


@pytest.mark.slow
def test_the_mitigation_study_evaluates_every_arm_and_resumes(folder, tmp_path):
    """A tiny untrained model and an artificial judge: its numbers are noise, its arms are there."""
    rows, counts = artificial.items(10, seed=0)
    examples = write(tmp_path / "safe.jsonl", artificial.safety_examples(64, seed=0))
    cheap = tmp_path / "cheap.gin"
    cheap.write_text(
        "from __gin__ import dynamic_registration\nfrom rolljax import recipe\ninclude 'bsa/safety_sft.gin'\n"
        "sft/recipe.Phase.steps = 2\nrecipe.Evaluation.tasks = 2\n"
    )
    bench = bsa.Bsa(write(tmp_path / "words.jsonl", rows), samples=1, max_answer_tok=8, counts=counts)
    arms = ((1.0, 0.8),)
    cfg = mitigation.Mitigation(
        str(folder), bench, (artificial.JUDGE,), artificial.RULES, arms, examples, str(cheap), max_context=192
    )
    found = mitigation.study(cfg, tmp_path / "study")
    assert list(found) == ["as it is", "safety rules", "temperature 1, top_p 0.8", "safety SFT"]
    assert all(row.keys() == set(mitigation.MEASURES) for row in found.values())
    assert mitigation.study(cfg, tmp_path / "study") == found
    again = json.loads((tmp_path / "study" / "safety_rules" / "evaluation.json").read_text())
    assert not again["results"]["counts"]  # nothing was asked again
    assert "| safety SFT" in (tmp_path / "study" / "study.md").read_text()
    assert json.loads((tmp_path / "study" / "study.json").read_text()) == found
