"""Run JetStream's own code with our engine in a separate process, because a failing thread of JetStream's kills it.

    python tests/e2e/jetstream_run.py SCENARIO PLAN.json RESULT.json [JETSTREAM_SOURCE_TREE]

PLAN holds the requests and the stop ids; RESULT the answers. `test_jetstream.py` checks them.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import sys
import threading
import types
from pathlib import Path

import jax

from rolljax.concurrency import distributed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish

MODEL = Model(Qwen3Config(num_layers=3, init_std=0.15))
CONFIG = SamplerConfig(slots=4, max_context=96, prefill_chunk=32)
LONGEST_PROMPT = 64
TIMEOUT_S = 60


def weights(seed, devices):
    params = jax.jit(MODEL.init, static_argnums=0)(seed)
    return make_publish(MeshSpec().build(devices), MODEL)(params)


def make_engine(stop_ids, devices, **options):
    from rolljax.sampler.jetstream.engine import JetStreamEngine

    engine = Engine(MODEL, dataclasses.replace(CONFIG, steps_per_dispatch=1), MeshSpec().build(devices), BATCH_AXES)
    return JetStreamEngine(engine, weights(1, devices), byte_tokenizer(), stop_ids=stop_ids, **options)


class Loop:
    """One event loop that outlives the driver: a thread that cannot deliver to its loop kills the process."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_S)


def request(js, ids, max_tokens, bos=True):
    fields = js.jetstream_pb2.DecodeRequest.DESCRIPTOR.fields_by_name
    without_bos = {"session_cache": "no BOS"} if "session_cache" in fields else {"has_bos": True}
    return js.jetstream_pb2.DecodeRequest(
        token_content=js.jetstream_pb2.DecodeRequest.TokenContent(token_ids=ids),
        max_tokens=max_tokens,
        **({} if bos else without_bos),
    )


async def ids_of(stream):
    return [t async for response in stream for t in response.stream_content.samples[0].token_ids]


def drive(js, plan, prefill_engine, engine):
    """Send all requests at once, twice, through JetStream's orchestrator; swap the weights under load in between."""
    interleaved = prefill_engine is engine
    driver = js.Driver(
        prefill_engines=[prefill_engine],
        generate_engines=[engine],
        prefill_params=[prefill_engine.load_params()],
        generate_params=[engine.load_params()],
        interleaved_mode=interleaved,
        jax_padding=interleaved,
    )
    client, loop, steps = js.orchestrator.LLMOrchestrator(driver=driver), Loop(), []
    generate, new = engine.generate, [(e, weights(2, list(e.mesh.devices.flat))) for e in {prefill_engine, engine}]

    def counted(params, state):
        steps.append(len(steps))
        if len(steps) == swap_at:
            for e, params_of_e in new:
                e.load_params().swap(params_of_e, 1)
        return generate(params, state)

    async def everything():
        streams = [client.Decode(request(js, ids, n, bos)) for ids, n, bos in plan["requests"]]
        return await asyncio.gather(*(ids_of(s) for s in streams))

    engine.generate, swap_at = counted, None
    result = {"first": loop.run(everything()), "steps": len(steps)}
    swap_at = len(steps) + 20
    result["swapped"] = loop.run(everything())
    result["version"] = engine.load_params().version
    result["after"] = loop.run(everything())
    driver.stop()
    return result


def interleaved(js, plan):
    engine = make_engine(plan["stop_ids"], jax.devices()[:1], max_prefill_length=LONGEST_PROMPT)
    return drive(js, plan, engine, engine)


def split(js, plan):
    """Prefill on one device, decode on two others."""
    one, other = (
        make_engine(plan["stop_ids"], devices, max_prefill_length=LONGEST_PROMPT)
        for devices in (jax.devices()[:1], jax.devices()[1:3])
    )
    return drive(js, plan, one, other)


def server(js, plan):
    """Run the gRPC server, and JetStream's benchmark against it."""
    import grpc

    from rolljax.sampler.jetstream.compat import run_server

    reservation, port = distributed.reserve_port()
    engine = make_engine(plan["stop_ids"], jax.devices()[:1])
    running = run_server(engine, port)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = js.jetstream_pb2_grpc.OrchestratorStub(channel)
            live = stub.HealthCheck(js.jetstream_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).is_live
            ids, n, bos = plan["requests"][0]
            tokens = list(stub.Decode(request(js, ids, n, bos), timeout=TIMEOUT_S))
            text = js.jetstream_pb2.DecodeRequest(
                text_content=js.jetstream_pb2.DecodeRequest.TextContent(text=plan["texts"][0]), max_tokens=n
            )
            texts = [r.stream_content.samples[0] for r in stub.Decode(text, timeout=TIMEOUT_S)]
        figures, outputs = benchmark(engine, port, plan)
        listens = listening(port)
    finally:
        running.stop()
        reservation.close()
    return {
        "live": live,
        "tokens": [t for r in tokens for t in r.stream_content.samples[0].token_ids],
        "text": "".join(s.text for s in texts),
        "text_ids": [t for s in texts for t in s.token_ids],
        "listens": listens,
        "benchmark": {o.input_request.prompt: list(map(int, o.generated_token_list)) for o in outputs if o.success},
        "throughput": figures["output_throughput"],
    }


def listening(port):
    """Return the local addresses on which this machine listens at the port, as Linux writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    local = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return [host for host, where in local if int(where, 16) == port]


def benchmark(engine, port, plan):
    """Load JetStream's `benchmarks/benchmark_serving.py` by path: our checkout has a `benchmarks` too."""
    for name, attributes in {"pandas": [], "eval_accuracy": ["eval_accuracy"]}.items():
        stand_in = types.ModuleType(name)
        for a in attributes:
            setattr(stand_in, a, None)
        sys.modules[name] = stand_in  # for what we do not use
    path = importlib.metadata.distribution("google-jetstream").locate_file("benchmarks/benchmark_serving.py")
    spec = importlib.util.spec_from_file_location("jetstream_benchmark", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    asked = [module.InputRequest(prompt=t, prompt_len=len(t), output_len=3 + i) for i, t in enumerate(plan["texts"])]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return asyncio.run(
            module.benchmark(
                api_url=f"127.0.0.1:{port}",
                tokenizer=engine.build_tokenizer(),
                input_requests=asked,
                request_rate=float("inf"),
                disable_tqdm=True,
                session_cache="",
                priority=0,
            )
        )


def main(scenario, plan, result, source=None):
    if source:
        sys.path.insert(0, source)
    from rolljax.sampler.jetstream.compat import load

    js = load()
    with open(plan) as f:
        out = {"interleaved": interleaved, "split": split, "server": server}[scenario](js, json.load(f))
    out["tensorflow"] = "tensorflow" in sys.modules
    with open(result, "w") as f:
        json.dump(out, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
