"""The training service, through the public `tinker` package as it is: what is computed, kept, refused, and survives."""

import asyncio
import inspect
import json
import re
import threading

import httpx2
import numpy as np
import pytest
import tinker
import torch
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer

from .training_service import KEY, OTHER_KEY, TrainingService, datum, logprobs

pytestmark = pytest.mark.filterwarnings("ignore")
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
TEXT = list(b"The quick brown fox jumps over the lazy dog, and the dog does not mind at all.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a small base model."""
    folder, model = tmp_path_factory.mktemp("base") / "model", Model(Qwen3Config(init_std=0.1))
    hf.save(folder, model, model.init(0), byte_tokenizer())
    return folder


@pytest.fixture(scope="module")
def service(folder, tmp_path_factory):
    """Return a service with room for two adapters, so that most tests move some in and out."""
    options = ("--max_context", "192", "--adapters", "2", "--rank", "8", "--slots", "16", "--state_steps", "3")
    running = TrainingService(folder, tmp_path_factory.mktemp("service") / "kept", *options)
    yield running
    assert running.stop() == 0, running.log()
    assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def client(service):
    return service.client()


# ---- what is computed -----------------------------------------------------------------------------------------------


def peft_model(folder, adapter):
    """Return transformers' model of the base with an exported adapter, trainable."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


def torch_loss(loss, logp, sample, config):
    """Return the loss that Tinker's documentation writes for one datum."""
    inputs = {name: torch.tensor(np.array(x.data), dtype=torch.float32) for name, x in sample.loss_fn_inputs.items()}
    if loss == "cross_entropy":
        return -(logp * inputs["weights"]).sum()
    ratio = torch.exp(logp - inputs["logprobs"])
    clipped = torch.clamp(ratio, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    advantages = inputs["advantages"]
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.min(ratio * advantages, clipped * advantages).sum()
    if loss == "cispo":
        return -(clipped.detach() * logp * advantages).sum()
    return -(logp * advantages - 0.5 * config["beta"] * (logp - inputs["logprobs"]) ** 2).sum()


def exported(policy, client, name, into):
    """Export a policy by the API and download its files."""
    path = policy.save_weights_external(name).result().path
    into.mkdir()
    for file, url in client.create_rest_client().get_external_weights_urls(path).result().urls.items():
        (into / file).write_bytes(httpx2.get(url).raise_for_status().content)
    return into


CONFIGS = {"ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "dro": {"beta": 0.07}}


def test_every_loss_trains_what_torch_and_peft_train(service, client, folder, tmp_path, one_torch_thread):
    """Three steps, each of all five losses in calls of their own, against transformers, PEFT and torch's AdamW."""
    policy = service.policy(client, rank=4)
    data = {loss: [datum(TEXT[: 9 + 7 * i], loss), datum(TEXT[i:40], loss)] for i, loss in enumerate(LOSSES)}
    policy.forward_backward(data["cross_entropy"], "cross_entropy")
    policy.optim_step(types.AdamParams(learning_rate=0.02)).result()  # B is not zero any more
    theirs = peft_model(folder, exported(policy, client, "start", tmp_path / "start"))
    policy.load_state(policy.save_state("start").result().path).result()  # without Adam's moments
    trained = [p for p in theirs.parameters() if p.requires_grad]
    rule = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.05)
    for _ in range(3):
        found = {loss: policy.forward_backward(data[loss], loss, CONFIGS.get(loss)) for loss in LOSSES}
        step = policy.optim_step(types.AdamParams(learning_rate=0.01, weight_decay=0.05, grad_clip_norm=20.0))
        rule.zero_grad()
        for loss, future in found.items():
            result, total = future.result(), 0.0
            for sample, ours in zip(data[loss], logprobs(result), strict=True):
                ids = torch.tensor([sample.model_input.to_ints()])
                targets = torch.tensor(np.array(sample.loss_fn_inputs["target_tokens"].data))
                logp = torch.log_softmax(theirs(ids).logits[0], -1)[torch.arange(len(targets)), targets]
                np.testing.assert_allclose(ours, logp.detach(), atol=3e-5)
                total = total + torch_loss(loss, logp, sample, CONFIGS.get(loss, {}))
            total.backward()
            assert result.metrics["loss:sum"] == pytest.approx(float(total), rel=1e-4, abs=1e-3)
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 20.0))
        assert step.result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        rule.step()
    ours = peft_model(folder, exported(policy, client, "end", tmp_path / "end"))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), atol=2e-4, err_msg=name)


def test_samples_have_the_log_probs_that_training_computes(service, client):
    policy = service.policy(client, rank=8, seed=3)
    for _ in range(2):
        policy.forward_backward([datum(TEXT)], "cross_entropy")
        policy.optim_step(types.AdamParams(learning_rate=0.02)).result()
    sampler = policy.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TEXT[:11])
    params = types.SamplingParams(max_tokens=20, seed=7)
    answer = sampler.sample(prompt, 3, params, include_prompt_logprobs=True, topk_sample_logprobs=3).result()
    assert len({tuple(s.tokens) for s in answer.sequences}) == 3
    for sequence in answer.sequences:
        tokens = TEXT[:11] + list(sequence.tokens)
        ours = logprobs(policy.forward([datum(tokens)], "cross_entropy").result())[0]
        np.testing.assert_allclose(sequence.logprobs, ours[10:], atol=1e-5)
        np.testing.assert_allclose(answer.prompt_logprobs[1:], ours[:10], atol=1e-5)
        likely = sequence.topk_logprobs_np
        assert likely.token_ids.shape == (len(sequence.tokens), 3) and (np.diff(likely.logprobs, axis=1) <= 0).all()
    again = sampler.sample(prompt, 3, params).result()
    assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]
    scored = sampler.compute_logprobs(prompt).result()
    assert scored[0] is None and scored[1:] == pytest.approx(answer.prompt_logprobs[1:], abs=1e-6)
    base = client.create_sampling_client(base_model=service.model)
    assert base.compute_logprobs(prompt).result()[1:] != pytest.approx(scored[1:], abs=1e-2)


def test_more_policies_than_slots_are_trained_and_sampled_as_if_alone(service, client):
    """Three policies take turns in two slots; each ends as one that has the service to itself."""
    rates, texts = (0.01, 0.02, 0.005), (TEXT[:30], TEXT[20:70], TEXT[5:25])

    def steps(policy, k, num):
        calls = []
        for _ in range(num):
            calls.append(policy.forward_backward([datum(texts[k]), datum(texts[k][3:])], "cross_entropy"))
            calls.append(policy.optim_step(types.AdamParams(learning_rate=rates[k])))
        return calls

    together = [service.policy(client, rank=2 + k, seed=k) for k in range(3)]
    futures = [steps(policy, k, 4) for k, policy in enumerate(together)]
    losses = [[f.result().metrics.get("loss:sum") for f in each[::2]] for each in futures]
    greedy = types.SamplingParams(max_tokens=12, temperature=0.0)
    samplers = [policy.save_weights_and_get_sampling_client() for policy in together]
    pending = [s.sample(types.ModelInput.from_ints(TEXT[:9]), 2, greedy) for s in samplers]
    answers = [p.result().sequences[0] for p in pending]
    for k in range(3):
        alone = service.policy(client, rank=2 + k, seed=k)
        assert [f.result().metrics.get("loss:sum") for f in steps(alone, k, 4)[::2]] == pytest.approx(
            losses[k], rel=1e-5
        )
        sampler = alone.save_weights_and_get_sampling_client()
        found = sampler.sample(types.ModelInput.from_ints(TEXT[:9]), 1, greedy).result().sequences[0]
        assert found.tokens == answers[k].tokens
        np.testing.assert_allclose(found.logprobs, answers[k].logprobs, atol=1e-5)


def test_a_loss_of_the_client_and_several_targets(service, client):
    policy = service.policy(client)
    pair = [datum(TEXT[:20]), datum(TEXT[20:44])]

    def preference(data, logps):
        loss = -torch.nn.functional.logsigmoid(logps[0].sum() - logps[1].sum())
        return loss, {"margin": float(logps[0].sum() - logps[1].sum())}

    margins = []
    for _ in range(4):
        margins.append(policy.forward_backward_custom(pair, preference).result().metrics["margin"])
        policy.optim_step(types.AdamParams(learning_rate=0.003)).result()
    assert margins == sorted(margins) and margins[-1] > margins[0] + 1, margins
    targets = np.array([[1, 2, 3], [4, 5, 6]])
    both = types.Datum(
        model_input=types.ModelInput.from_ints([65, 66]),
        loss_fn_inputs={"target_tokens": targets, "weights": np.full((2, 3), 0.5, np.float32)},
    )
    found = policy.forward([both, datum([65, 66, 6])], "cross_entropy").result()
    several, one = logprobs(found)
    assert several.shape == (2, 3) and one.shape == (2,) and several[1, 2] == pytest.approx(one[1], abs=1e-5)


# ---- the whole surface ----------------------------------------------------------------------------------------------

ABSENT = {
    "copy_weights": "no projects|TINKER_PROJECT_ID", "assign_session_project": "no projects", "export_session_trace": "no traces",
    "get_audit_log": "no audit log", "get_billing_usage": "no billing", "search_sessions": "no search",
    "get_current_checkpoint_storage_usage": "no billing", "whoami": "plain API key",
}  # fmt: skip
"""Public methods of the package that this service does not serve, and what they say."""


def public_methods():
    """Yield class, name of every public method of the package's clients."""
    for cls in (
        tinker.ServiceClient,
        tinker.TrainingClient,
        tinker.SamplingClient,
        tinker.RestClient,
        tinker.AdminClient,
    ):
        for name in dir(cls):
            if not name.startswith("_") and callable(getattr(cls, name)):
                yield cls, name


def test_every_public_method_is_served_or_says_why_not(service):
    client = service.client()
    policy = service.policy(client)
    rest, admin = client.create_rest_client(), tinker.AdminClient(base_url=service.url, api_key=KEY)
    sampler = policy.save_weights_and_get_sampling_client().result()
    own = {type(c): c for c in (client, policy, sampler, rest, admin)}
    state, number = policy.save_state("surface").result().path, iter(range(10**6))
    run, session = policy.model_id, policy.model_id.partition(":")[0]
    sampler_path = policy.save_weights_for_sampler("surface").result().path
    external = policy.save_weights_external("surface").result().path

    def fresh():
        """Return the address of a checkpoint that may be deleted."""
        return policy.save_state(f"surface{next(number)}").result().path

    def values(name):
        path = {
            "delete_checkpoint_from_tinker_path": fresh,
            "get_external_weights_urls": lambda: external,
        }.get(name.removesuffix("_async"), lambda: state)
        return {
            "base_model": service.model, "rank": 2, "path": state, "tinker_path": path(), "data": [datum(TEXT[:9])],
            "loss_fn": (lambda data, logps: (logps[0].sum(), {})) if "custom" in name else "cross_entropy",
            "optim_params": types.AdamParams(), "prompt": types.ModelInput.from_ints([1, 2, 3]), "num_samples": 1,
            "sampling_params": types.SamplingParams(max_tokens=2), "training_run_id": run, "session_id": session,
            "checkpoint_id": fresh().partition(f"{run}/")[2], "sampler_id": sampler._sampling_session_id,
            "name": f"surface{next(number)}", "ttl_seconds": 7200, "project_id": "p", "destination_project_id": "p",
            "queue_state": tinker.lib.public_interfaces.sampling_client.QueueState.ACTIVE, "queue_state_reason": None,
            "starting_on": "2026-01-01", "ending_before": "2026-02-01", "handle": sampler.get_sampler_handle(),
            "fn": lambda logprobs, weights: ((logprobs * weights).sum(), {}), "input_ranks": {"logprobs": 1, "weights": 1},
            "request": types.SessionSearchRequest(), "holder": client.holder, "status": "success",
            "model_path": sampler_path,
        }  # fmt: skip

    def called(cls, name):
        method, given = getattr(own[cls], name), values(name)
        names = [p.name for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        if cls is tinker.RestClient and name.startswith("copy_weights"):
            names.append("destination_project_id")
        wanted = {n: given[n] for n in names}
        if cls is tinker.SamplingClient and name == "create" or name.startswith("create_sampling_client"):
            wanted["model_path"] = sampler_path
        if name.startswith("from_sampler_handle"):
            wanted["api_key"] = KEY
        for of, setting in (("optim_step", "optim_params"), ("create_lora_training_client", "rank")):
            if name.startswith(of):
                wanted[setting] = given[setting]

        if inspect.iscoroutinefunction(method):
            return asyncio.run(asyncio.wait_for(method(**wanted), 60))
        result = method(**wanted)
        return result.result(60) if callable(getattr(result, "result", None)) else result

    failed, num = {}, 0
    last = [(cls, name) for cls, name in public_methods() if name == "close"]
    for cls, name in [*(m for m in public_methods() if m not in last), *last]:
        num += 1
        try:
            called(cls, name)
        except Exception as e:
            failed[f"{cls.__name__}.{name}"] = f"{type(e).__name__}: {e}"
    for name, error in failed.items():
        plain = name.partition(".")[2].removesuffix("_async")
        assert plain in ABSENT and re.search(ABSENT[plain], error), f"{name}: {error}"
    assert num - len(failed) >= 84, f"{num - len(failed)} of {num} methods"


def test_checkpoints_are_listed_published_and_removed(service, client):
    policy, rest = service.policy(client, user_metadata={"who": "test"}), client.create_rest_client()
    policy.forward_backward([datum(TEXT)], "cross_entropy")
    policy.optim_step(types.AdamParams(learning_rate=0.01)).result()
    path = policy.save_state("kept", user_metadata={"step": "1"}, ttl_seconds=3600).result().path
    with pytest.raises(tinker.RequestFailedError, match="kept is there already; choose another name, or overwrite"):
        policy.save_state("kept").result()
    policy.save_state("kept", overwrite=True).result()
    policy.save_weights_for_sampler("shown").result()
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.base_model == service.model and run.lora_rank == 4 and run.user_metadata == {"who": "test"}
    assert (
        run.last_checkpoint.tinker_path == path and run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/shown"
    )
    found = rest.list_checkpoints(policy.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.checkpoint_type, c.size_bytes > 1000) for c in found] == [
        ("weights/kept", "training", True),
        ("sampler_weights/shown", "sampler", True),
    ]
    theirs = service.client(OTHER_KEY)
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        theirs.create_training_client_from_state(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    copy = theirs.create_training_client_from_state_with_optimizer(path).result()
    a, b = (logprobs(p.forward([datum(TEXT)], "cross_entropy").result())[0] for p in (policy, copy))
    np.testing.assert_allclose(a, b, atol=1e-6)
    for p in (policy, copy):  # the moments too: the next steps are equal
        p.forward_backward([datum(TEXT[:40])], "cross_entropy")
        p.optim_step(types.AdamParams(learning_rate=0.01)).result()
    a, b = (logprobs(p.forward([datum(TEXT)], "cross_entropy").result())[0] for p in (policy, copy))
    np.testing.assert_allclose(a, b, atol=1e-5)
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [c.checkpoint_id for c in rest.list_checkpoints(policy.model_id).result().checkpoints] == [
        "sampler_weights/shown"
    ]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        policy.load_state(path).result()


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_mistakes_are_named_and_nothing_else_stops(service, client):
    policy = service.policy(client)
    tokens = types.ModelInput.from_ints([1, 2, 3])

    def one(**inputs):
        return [types.Datum(model_input=tokens, loss_fn_inputs=inputs)]

    three = [1, 2, 3]
    wrong = [
        ("gspo", one(target_tokens=[1, 2, 3]), None, "loss_fn: 'gspo' is not offered. Offered are cross_entropy"),
        ("ppo", one(target_tokens=three), None, r"data\[0\]\.loss_fn_inputs: ppo needs logprobs"),
        ("cross_entropy", one(weights=[1.0] * 3), None, "target_tokens is missing"),
        ("cross_entropy", one(target_tokens=[1, 2]), None, "one row for each of the 3 tokens"),
        ("cross_entropy", one(target_tokens=[1, 2, 9999]), None, "ids must lie between 0 and 263"),
        ("cross_entropy", one(target_tokens=three, advantages=[1.0] * 3), None, "cross_entropy takes no advantages"),
        ("cross_entropy", one(target_tokens=three, weights=[1.0, float("nan"), 1.0]), None, "not finite"),
        ("ppo", [datum(TEXT, "ppo")], {"clip": 1.0}, "loss_fn_config.clip: is not known; known are clip_low_threshold"),
        ("cross_entropy", [datum(range(250))], None, "must have 1 to 192 tokens, got 249"),
    ]
    for loss, data, config, message in wrong:
        with pytest.raises((tinker.BadRequestError, RuntimeError)) as caught:
            service.policy(client).forward_backward(data, loss, config).result()
        assert re.search(message, f"{caught.value} {caught.value.__cause__}"), caught.value
    for settings, message in (
        ({"rank": 9}, "this server takes 1 to 8 .its --rank., not 9"),
        ({"train_mlp": False, "train_attn": False}, "names no map"),
    ):
        with pytest.raises(tinker.BadRequestError, match=message):
            service.policy(client, **settings)
    with pytest.raises(tinker.BadRequestError, match="this server has"):
        client.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.AuthenticationError, match="no valid key"):
        service.client("tml-wrong")
    with pytest.raises(tinker.NotFoundError, match="there is no session"):
        service.client(OTHER_KEY).create_rest_client().get_session(policy.model_id.partition(":")[0]).result()
    sampler = policy.save_weights_and_get_sampling_client()
    for params, message in (
        (types.SamplingParams(max_tokens=0), "max_tokens: must be at least 1"),
        (types.SamplingParams(stop=[1, 2, 3, 4, 5]), "at most 4"),
        (types.SamplingParams(top_p=0.0), "top_p in"),
    ):
        with pytest.raises(tinker.BadRequestError, match=message):
            sampler.sample(tokens, 1, params).result()
    sampled = sampler.sample(tokens, 1, types.SamplingParams(max_tokens=5, stop=[], temperature=0.5, top_k=4)).result()
    assert len(sampled.sequences[0].tokens) == 5
    assert policy.forward_backward([datum(TEXT)], "cross_entropy").result().metrics


def test_a_gradient_that_is_not_finite_is_dropped(service, client):
    policy = service.policy(client)
    far = datum(TEXT, "importance_sampling")
    far.loss_fn_inputs["logprobs"] = types.TensorData.from_numpy(np.full(len(TEXT) - 1, -3e4, np.float32))
    policy.forward_backward([far], "importance_sampling").result()
    with pytest.raises(tinker.RequestFailedError, match="not finite: this step changed nothing"):
        policy.optim_step(types.AdamParams()).result()
    before = logprobs(policy.forward([datum(TEXT)], "cross_entropy").result())[0]
    assert np.isfinite(before).all()
    policy.forward_backward([datum(TEXT)], "cross_entropy")
    policy.optim_step(types.AdamParams(learning_rate=0.01)).result()
    after = logprobs(policy.forward([datum(TEXT)], "cross_entropy").result())[0]
    assert after.mean() > before.mean()


def bodies(num):
    """Yield paths and bodies that are wrong in many ways, and some that are right but for one thing."""
    rng = np.random.default_rng(0)
    paths = ("forward_backward", "optim_step", "create_model", "asample", "retrieve_future", "save_weights", "get_info",
             "create_session", "load_weights", "create_sampling_session", "session_heartbeat", "unload_model",
             "save_weights_for_sampler", "weights_info", "cancel_future", "join_sampling_session")  # fmt: skip
    good = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    one = good.data.add()
    one.model_input.add().encoded_text.tokens = np.arange(9, dtype=np.int32).tobytes()
    for name in ("target_tokens", "logprobs", "advantages"):
        tensor = one.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = (
            np.zeros(9, np.int64 if name[0] == "t" else np.float32).tobytes(),
            2 if name[0] == "t" else 1,
        )
        tensor.shape.append(9)
    proto = good.SerializeToString()
    texts = ["", "null", "[]", "{", "{}", '{"model_id": 1}', '{"request_id": "x"}', "[" * 3000, '{"session_id": "\\ud800"}',
             '{"model_id": "a", "seq_id": 1, "adam_params": {"learning_rate": NaN}}', '{"request_id": "../../etc:1"}',
             '{"sampling_session_id": "..", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}',
             '{"model_id": null, "path": "tinker://a/weights/../x", "optimizer": true}', "\xff\xfe", '{"tinker_path": 3}']  # fmt: skip
    for _ in range(num):
        path = paths[rng.integers(len(paths))]
        if path == "forward_backward":
            body = bytearray(proto[: rng.integers(len(proto) + 1)])
            for _ in range(rng.integers(4)):
                if body:
                    body[rng.integers(len(body))] = rng.integers(256)
            packed = rng.random() < 0.2
            data = zstandard.ZstdCompressor().compress(bytes(body)) if packed else bytes(body)
            yield path, data, {"Content-Encoding": "zstd"} if packed or rng.random() < 0.1 else {}
        else:
            yield path, texts[rng.integers(len(texts))].encode("utf-8", "surrogatepass"), {}


@pytest.mark.parametrize("num", [300, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_no_body_makes_the_server_fail(service, num):
    statuses = set()
    with httpx2.Client(base_url=f"{service.url}/api/v1/", headers={"X-API-Key": KEY}, timeout=60) as http:
        for path, body, headers in bodies(num):
            reply = http.post(path, content=body, headers=headers)
            assert reply.status_code < 500, (path, body, reply.text)
            assert reply.status_code == 200 or reply.json()["detail"], (path, body)
            statuses.add(reply.status_code)
        bomb = zstandard.ZstdCompressor().compress(bytes(80 * 2**20))
        reply = http.post("forward_backward", content=bomb, headers={"Content-Encoding": "zstd"})
        assert reply.status_code == 413 and "without its compression" in reply.json()["detail"]
        assert http.get("sessions/x/trace_export").status_code == 404
        assert http.get("healthz").json() == {"status": "ok"}
    assert statuses >= {400, 404}
    assert json.loads(httpx2.get(f"{service.url}/api/v1/healthz", timeout=60).text)["detail"]


# ---- what survives --------------------------------------------------------------------------------------------------


def run_steps(policy, first, last, between=lambda step: None):
    """Train steps; return the loss of each. between: called before each step's results are awaited."""
    losses = []
    for step in range(first, last):
        calls = [
            policy.forward_backward([datum(TEXT[step : step + 30])], "cross_entropy"),
            policy.forward_backward([datum(TEXT[: 20 + step], "ppo")], "ppo"),
        ]
        done = policy.optim_step(types.AdamParams(learning_rate=0.01))
        between(step)
        losses += [call.result().metrics["loss:sum"] for call in calls] + [done.result().metrics["grad_norm"]]
    return losses


STEPS = 8
CLOSE = 1e-4
"""Which calls share a batch depends on when they arrive, and Adam makes rounding grow: after eight steps log-probs differ
by 1e-5. A step that is lost or taken twice moves them by .4 on average."""


@pytest.fixture(scope="module")
def undisturbed(service, client):
    """Return losses and norms of a training, and log-probs after it."""
    policy = service.policy(client, seed=5)
    return run_steps(policy, 0, STEPS), logprobs(policy.forward([datum(TEXT)], "cross_entropy").result())[0]


def check_kills(service, undisturbed, moments):
    """Kill the service before the results of these steps are there, and start it again: the client, which waits for
    futures that were acknowledged before, notices nothing but the time."""
    policy = service.policy(seed=5)
    sampler = policy.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(TEXT[:5]), types.SamplingParams(max_tokens=8, seed=1)
    before = sampler.sample(prompt, 1, params).result().sequences[0].tokens

    def score(of):
        return logprobs(of.forward([datum(TEXT)], "cross_entropy").result())[0]

    def kill(step):
        if step == 3:
            marked.append((policy.save_state("mark").result().path, score(policy)))
        if step == 4:
            with pytest.raises(tinker.RequestFailedError, match="mark is there already"):
                policy.save_state("mark").result()
        if step in moments:
            service.kill()
            service.start()

    marked = []
    losses, logps = undisturbed
    np.testing.assert_allclose(run_steps(policy, 0, STEPS, kill), losses, rtol=CLOSE)
    np.testing.assert_allclose(score(policy), logps, atol=CLOSE)
    [(path, then)] = marked
    copy = service.client().create_training_client_from_state(path).result()
    np.testing.assert_allclose(score(copy), then, atol=1e-5)
    assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == before


@pytest.mark.parametrize("moments", [{4}, pytest.param({0, 7}, marks=pytest.mark.slow)])
def test_a_killed_service_goes_on_where_it_was(folder, undisturbed, tmp_path, moments):
    service = TrainingService(folder, tmp_path / "kept", "--max_context", "192", "--state_steps", "3", "--rank", "8")
    try:
        check_kills(service, undisturbed, moments)
    finally:
        service.kill()


@pytest.mark.sweep
@pytest.mark.parametrize("moment", range(20))
def test_a_service_killed_at_any_time_loses_no_step(folder, undisturbed, tmp_path, moment):
    """Killed at intervals, so that it happens while it computes, writes, or waits."""
    service = TrainingService(folder, tmp_path / "kept", "--max_context", "192", "--state_steps", "2", "--rank", "8")
    done = threading.Event()

    def kill():
        for _ in range(1 + moment % 3):
            if done.wait(0.3 + 0.37 * moment):
                return
            service.kill()
            service.start()

    policy = service.policy(seed=5)
    killing = threading.Thread(target=kill)
    killing.start()
    try:
        losses, logps = undisturbed
        np.testing.assert_allclose(run_steps(policy, 0, STEPS), losses, rtol=CLOSE)
        done.set()
        killing.join()
        found = logprobs(policy.forward([datum(TEXT)], "cross_entropy").result())[0]
        np.testing.assert_allclose(found, logps, atol=CLOSE)
    finally:
        done.set()
        killing.join()
        service.kill()
