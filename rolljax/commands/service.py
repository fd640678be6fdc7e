"""Serve Tinker's training API: `python -m rolljax.service --model HF_DIR --folder FOLDER --port P`.

Clients set `TINKER_BASE_URL` and use the public `tinker` package as it is. The folder holds everything: start the same
command again after a crash, and clients continue. docs/service.md lists what is offered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rolljax import cli, serve
from rolljax.concurrency import signals
from rolljax.errors import EXIT_INTERRUPTED, ConfigError, needed

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rolljax.concurrency.waits import Watchdog
    from rolljax.model.decoder import Dtype, Model, Params
    from rolljax.model.lora import LoraSlots, SlottedAdapters
    from rolljax.service.server import TrainingService
    from rolljax.service.training import TrainingWorker

KEEP_ALIVE_S = 75
CONNECTIONS = 4096


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.service", description="Serve Tinker's training API.")
    parser.add_argument("--model", required=True, help="local Hugging Face folder of the base model")
    parser.add_argument("--name", help="name of the base model for clients (default: the folder as it is given)")
    parser.add_argument("--folder", default="service", help="where everything is kept (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    parser.add_argument(
        "--api_key", help=f"keys of tenants, with commas; each begins with tml- (default: ${serve.API_KEY}; none: open)"
    )
    parser.add_argument("--session_s", type=float, default=900.0, help="a silent client's time (default: %(default)s)")
    parser.add_argument("--max_models", type=int, default=64, help="loaded models of one key (default: %(default)s)")
    parser.add_argument("--max_samples", type=int, default=1024, help="open sample requests (default: %(default)s)")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--rank", type=int, default=32, help="highest rank of an adapter (default: %(default)s)")
    sizes.add_argument("--adapters", type=int, default=8, help="adapters on the devices at once (default: %(default)s)")
    sizes.add_argument("--state_steps", type=int, default=8, help="steps between written states (default: %(default)s)")
    sizes.add_argument("--max_context", type=int, help=f"tokens of a sequence (default: at most {serve.MAX_CONTEXT})")
    sizes.add_argument("--slots", type=int, default=64, help="answers sampled at the same time (default: %(default)s)")
    sizes.add_argument("--tensor", type=int, default=1, help="devices a layer is split over (default: %(default)s)")
    sizes.add_argument("--int8_base", action="store_true", help="keep the frozen weights as int8")
    sizes.add_argument("--dtype", choices=serve.DTYPES, help="default: float32 on CPU, else bfloat16")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()

    def run() -> int:
        check_arguments(args)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(serve.listen(args.host, args.port))
            keys = serve.open_keys(args.api_key, listener, "tml-")
            from rolljax.storage.layout import SERVICE
            from rolljax.storage.lock import locked

            stack.enter_context(locked(Path(args.folder), SERVICE, "a service's folder", "--folder"))
            serve.allow_open_files(2 * CONNECTIONS)
            asyncio.run(serve_forever(args, keys, listener))
        return 0

    return cli.run_verb(run)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for arguments that are wrong before anything is loaded."""
    serve.check_source(None, args.model, None, None)
    ranges = {"port": (0, 65535)} | dict.fromkeys(
        ("max_models", "max_samples", "rank", "adapters", "state_steps", "slots", "tensor"), (1, 2**20)
    )
    for name, (low, high) in ranges.items():
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"must be {low} to {high}", setting=f"--{name}", value=getattr(args, name))
    if not 1 <= args.session_s < float("inf"):
        raise ConfigError("must be a number from 1", setting="--session_s", value=args.session_s)
    for key in serve.read_keys(args.api_key):
        if not key.startswith("tml-"):
            raise ConfigError(
                "begins with something else than tml-, which the tinker package asks for",
                setting="--api_key",
                value=f"{key[:3]}...",
                remedy="tml-SOMETHING",
            )


async def serve_forever(args: argparse.Namespace, keys: tuple[str, ...], listener: socket.socket) -> None:
    """Load the model and serve until SIGTERM or SIGINT."""
    from rolljax.concurrency.waits import Watchdog
    from rolljax.serving.http_server import Bounds, make_server

    with needed("tinker", "the training service", install="rolljax[service]"):
        from rolljax.service import server as api

    watchdog = Watchdog()
    watchdog.start()
    try:
        async with open_service(args, keys, watchdog) as service:
            bounds = Bounds(CONNECTIONS, api.BODY_S, api.BODY_BYTES)
            refuse = lambda status, message: bytes(api.refusal(status, message).body)  # noqa: E731
            server = make_server(service.app, bounds, refuse, keep_alive_s=KEEP_ALIVE_S, closing_s=serve.CLOSING_S)
            stop = asyncio.Event()
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            signals.in_loop(stop.set)
            print(hello(service, serve.url(listener), keys), flush=True)
            await asyncio.wait((asyncio.ensure_future(stop.wait()), serving), return_when=asyncio.FIRST_COMPLETED)
            signals.in_loop(os._exit, EXIT_INTERRUPTED)
            server.should_exit = True
            await serving
    finally:
        watchdog.close()


def hello(service: TrainingService, url: str, keys: tuple[str, ...]) -> str:
    """Return the line that says how to reach the service."""
    key = "one of its keys" if keys else "tml-any"
    return f"training service for {service.base.name} at {url}; clients: TINKER_BASE_URL={url} TINKER_API_KEY={key}"


@contextlib.asynccontextmanager
async def open_service(
    args: argparse.Namespace, keys: tuple[str, ...], watchdog: Watchdog
) -> AsyncIterator[TrainingService]:
    """Open the service that command-line arguments describe (`rolljax.service`).

    Raises:
      ConfigError: the folder belongs to another base model. CheckpointError: weights that cannot be read.
    """
    import jax

    from rolljax.model import hf
    from rolljax.model.decoder import Model
    from rolljax.model.lora import LoraSlots
    from rolljax.model.tokenizer import Chat, load_tokenizer
    from rolljax.run.preflight import micro_tok
    from rolljax.sampler.client import Sampler
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.service.sampling import AdapterPlaces, Samples
    from rolljax.service.server import TrainingService
    from rolljax.service.store import ServiceStore
    from rolljax.service.training import BaseModel, TrainingWorker
    from rolljax.service.wire import Limits
    from rolljax.serving.schema import ServedModel
    from rolljax.trainer.mesh import SLOT_AXES, MeshSpec, param_shardings
    from rolljax.trainer.slots import SlotTrainer

    folder = str(args.model)
    cfg, tokenizer = hf.read_config(folder), load_tokenizer(folder)
    name = args.name or folder
    check_base(Path(args.folder), folder, name)
    print(f"loading {name}", file=sys.stderr, flush=True)
    slots = LoraSlots(num=args.adapters, rank=args.rank)
    dtype: Dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    lora = dataclasses.replace(slots.lora, int8_base=args.int8_base)
    model, mesh = Model(cfg, dtype, lora=lora), MeshSpec(tensor=args.tensor).build()
    plain = model.plain
    where = param_shardings(mesh, plain.axes(), plain.abstract())
    base = model.base(hf.load(folder, plain, where, computed=True))
    sizes = {"slots": args.slots, "max_context": args.max_context}
    settings = serve.read_sizes(sizes, SamplerConfig(), cfg, of_run=False)
    limits = Limits(cfg.vocab_size, settings.max_context)
    trainer = SlotTrainer(mesh, model, base, slots, settings.max_context, micro_tok(mesh, model))
    chat = Chat.of(tokenizer) if tokenizer.chat_template else None
    served = ServedModel(name, tokenizer, chat, cfg.vocab_size, settings.max_context)
    store = ServiceStore(Path(args.folder))
    sampler = Sampler(
        Engine(model, settings, mesh, SLOT_AXES),
        empty_adapters(model, mesh, base, slots),
        0,
        vocabulary=served.vocabulary,
        longest_prompt=0,
    )
    watchdog.watch(sampler.inbox)
    described = BaseModel(
        name, folder, tokenizer, hf.decoder_module(folder), type(cfg).architecture, name if args.name else folder
    )
    samples = Samples(sampler, AdapterPlaces(sampler, slots, store), limits, served.stop_ids, args.max_samples)

    def make_worker(done: Callable[[str, int], None]) -> TrainingWorker:
        worker = TrainingWorker(trainer, described, store, limits, args.state_steps, done)
        watchdog.watch(worker.inbox)
        return worker

    service = TrainingService(
        store,
        described,
        limits,
        samples,
        make_worker,
        keys=keys,
        session_s=args.session_s,
        max_policies=args.max_models,
    )
    try:
        yield service
    finally:
        await service.close()
        sampler.close()


def check_base(folder: Path, model: str, name: str) -> None:
    """Write which base model a service's folder is for, or check it.

    Raises:
      ConfigError: it is for another one.
    """
    from rolljax.model.files import folder_digest
    from rolljax.storage import durable
    from rolljax.storage.layout import SERVICE

    digest = folder_digest(Path(model))
    marker = folder / SERVICE
    if not marker.is_file():
        durable.write(marker, json.dumps({"base_model": name, "digest": digest}))
        return
    found = json.loads(marker.read_text())
    if found["digest"] != digest:
        raise ConfigError(
            f"holds adapters of another base model, {found['base_model']}",
            setting="--folder",
            value=str(folder),
            remedy="name another folder, or that model",
        )


def empty_adapters(model: Model, mesh: Mesh, base: Params, slots: LoraSlots) -> SlottedAdapters:
    """Return the sampler's weights without an adapter in any slot."""
    import jax
    import jax.numpy as jnp

    from rolljax.model.lora import SlottedAdapters
    from rolljax.trainer.mesh import param_shardings, replicated

    shardings = param_shardings(mesh, model.axes(), model.abstract(), fsdp=False)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract())  # noqa: E731
    scales = jax.device_put(jnp.zeros(slots.num), replicated(mesh))
    return SlottedAdapters(base, jax.jit(zeros, out_shardings=shardings)(), scales)
