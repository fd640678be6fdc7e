"""Serve a model over HTTP: `python -m rolljax.serve --run RUN | --model HF_DIR --port P`, OpenAI's API on 127.0.0.1.

Compiles the programs that requests can need, then prints the address; from then on `/ready` answers 200. SIGTERM or
Ctrl-C lets open requests finish (`--drain_s`) and ends with code 0; a second one ends at once. docs/export_and_serve.md
lists the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rolljax import cli
from rolljax.concurrency import signals
from rolljax.errors import EXIT_INTERRUPTED, ConfigError, needed

if TYPE_CHECKING:
    from rolljax.model.decoder import DecoderConfig, Dtype, Params
    from rolljax.recipe import Recipe
    from rolljax.run.checkpoint import Step
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.serving.schema import ServedModel
    from rolljax.serving.server import Service

API_KEY = "ROLLJAX_API_KEY"
MAX_CONTEXT = 4096
"""Default context for models that allow a longer one; `--max_context` overrides it."""
SIZES = ("slots", "max_context", "page_size", "pages", "prefill_chunk", "steps_per_dispatch", "speculate")
"""Sizes of the sampler that may be named."""
BITS = {"quantization": ("none", "int8"), "kv_dtype": ("auto", "fp8")}
"""Further settings of the sampler that may be named, and their values."""
DTYPES = ("float32", "bfloat16")
CLOSING_S = 5
"""Seconds for writing the last answers to their clients, after all answers are done or cancelled."""
KEEP_ALIVE_S = 5
"""Seconds that a connection stays open without a request."""
LINES = 4
"""Number of progress lines during compilation if stderr is not a terminal."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.serve", description="Serve a model over HTTP.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="run folder: its newest checkpoint (or --step)")
    what.add_argument("--model", help="local Hugging Face folder")
    parser.add_argument("--step", help="with --run: of a kept checkpoint, or 'best': of the highest held-out reward")
    parser.add_argument("--chat_template", metavar="FILE|plain", help=f"with --model: {cli.TEMPLATE_HELP}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    parser.add_argument("--served_model_name", metavar="NAME", help="default: the name of the folder")
    parser.add_argument("--api_key", help=f"bearer token, several with commas (default: ${API_KEY})")
    parser.add_argument("--max_concurrency", type=int, default=1024, help="open requests (default: %(default)s)")
    parser.add_argument("--max_body_mib", type=float, default=8.0, help="size of a request (default: %(default)s)")
    parser.add_argument(
        "--body_s", type=float, default=30.0, help="seconds for a body to arrive (default: %(default)s)"
    )
    parser.add_argument(
        "--drain_s", type=float, default=30.0, help="seconds to finish at the end (default: %(default)s)"
    )
    sizes = parser.add_argument_group("sampler", "of a run: its own settings unless given here")
    sizes.add_argument("--slots", type=int, help="answers sampled at the same time (default: 64)")
    sizes.add_argument("--max_context", type=int, help=f"tokens of prompt and answer (default: at most {MAX_CONTEXT})")
    sizes.add_argument("--page_size", type=int, help="tokens per page of keys and values (default: 16)")
    sizes.add_argument("--pages", type=int, help="pages in all (default: enough for every slot at full length)")
    sizes.add_argument("--prefill_chunk", type=int, help="prompt tokens computed at once (default: 512)")
    sizes.add_argument("--steps_per_dispatch", type=int, help="tokens between two looks of the host (default: 8)")
    sizes.add_argument("--speculate", type=int, help="tokens guessed ahead and checked in one step (default: 0)")
    sizes.add_argument("--tensor", type=int, default=1, help="devices a layer is split over (default: %(default)s)")
    sizes.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPU, else bfloat16")
    sizes.add_argument("--quantization", choices=BITS["quantization"], help="of the layers' weights (default: none)")
    sizes.add_argument("--kv_dtype", choices=BITS["kv_dtype"], help="of keys and values (default: auto, as --dtype)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()

    def run() -> int:
        check_arguments(args)
        with listen(args.host, args.port) as listener:
            keys = open_keys(args.api_key, listener)
            allow_open_files(4 * args.max_concurrency)
            engine, params, version, served = load(
                run=args.run,
                model=args.model,
                step=cli.read_step(args.step),
                chat_template=args.chat_template,
                name=args.served_model_name,
                tensor=args.tensor,
                dtype=args.dtype,
                **{name: getattr(args, name) for name in (*SIZES, *BITS)},
            )
            from rolljax.concurrency.waits import Watchdog
            from rolljax.sampler.client import Sampler

            with needed("uvicorn", "a server"):
                from rolljax.serving.server import ServerLimits, Service

            sampler = Sampler(engine, params, version, vocabulary=served.vocabulary, longest_prompt=0)
            watchdog = Watchdog()
            watchdog.watch(sampler.inbox)
            watchdog.start()
            try:
                limits = ServerLimits(keys, args.max_concurrency, int(args.max_body_mib * 2**20), args.body_s)
                run_server(Service(sampler, served, limits), listener, args.drain_s)
            finally:
                watchdog.close()
                sampler.close()
        return 0

    return cli.run_verb(run)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for arguments that are wrong before anything is loaded."""
    check_source(args.run, args.model, cli.read_step(args.step), args.chat_template)
    for name, low, high in (("port", 0, 65535), ("max_concurrency", 1, 2**20), ("tensor", 1, 2**20)):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"must be {low} to {high}", setting=f"--{name}", value=getattr(args, name))
    for name in ("max_body_mib", "body_s", "drain_s"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ConfigError("must be a number, not negative", setting=f"--{name}", value=getattr(args, name))


def check_source(
    run: str | Path | None, model: str | Path | None, step: Step | None, chat_template: str | None
) -> None:
    """Raise `ConfigError` unless a run folder or a Hugging Face folder is named, with options that go with it."""
    from rolljax.model.folder import folder_remedy

    if (run is None) == (model is None):
        raise ConfigError("is needed, not both or none", setting="--run or --model", remedy="name one of them")
    if step is not None and not run:
        raise ConfigError("goes with --run", setting="--step", value=step, remedy="a folder holds one model")
    if chat_template is not None and run:
        raise ConfigError(
            "goes with --model: a run has the template that it was trained with",
            setting="--chat_template",
            value=chat_template,
            remedy="leave it out",
        )
    if run and not (Path(run) / "config.gin").is_file():
        remedy = "name the folder that rolljax.train wrote, under runs/"
        raise ConfigError("is not a run folder: it has no config.gin", setting="--run", value=str(run), remedy=remedy)
    if model and not (Path(model) / "config.json").is_file():
        message, remedy = "is not a Hugging Face folder: it has no config.json", folder_remedy(str(model))
        raise ConfigError(message, setting="--model", value=str(model), remedy=remedy)


def read_keys(given: str | None) -> tuple[str, ...]:
    """Return the keys from the option, or else from the environment."""
    text = os.environ.get(API_KEY, "") if given is None else given
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    if given is not None and not keys:
        raise ConfigError("holds no key", setting="--api_key", value=given, remedy="leave it out, or give a key")
    return keys


def open_keys(given: str | None, listener: socket.socket, prefix: str = "") -> tuple[str, ...]:
    """Return the keys (`read_keys`); where there are none and others can reach the address, a new one, printed."""
    keys = read_keys(given)
    if not keys and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        keys = (prefix + secrets.token_urlsafe(24),)
        print(f"key, as this address is open to others: {keys[0]}", flush=True)
    return keys


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket, which refuses connections until the server is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        raise ConfigError(
            f"cannot be listened on: {e}",
            setting="--host, --port",
            value=f"{host}:{port}",
            remedy="choose another port (0 picks a free one) or an address of this machine",
        ) from e
    return listener


def allow_open_files(wanted: int) -> None:
    """Raise this process's soft limit of open files, as far as it may: every connection is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


# ---- the model


def load(
    *,
    run: str | Path | None = None,
    model: str | Path | None = None,
    step: Step | None = None,
    chat_template: str | None = None,
    name: str | None = None,
    tensor: int = 1,
    dtype: Dtype | None = None,
    recipe: Recipe | None = None,
    **sizes: Any,
) -> tuple[Engine, Params, int, ServedModel]:
    """Load the engine, its weights and their policy version, and the model against which requests are checked.

    Args:
      run, model: a run folder, or a Hugging Face folder; give exactly one. step: the checkpoint of the run; None: the
        newest.
      chat_template: of a folder: the path of a file, or `plain`. name: of the model in requests; None: the folder's.
      tensor: devices a layer is split over. dtype: None: the run's; of a folder float32 on CPU, else bfloat16.
      recipe: of the run; None: the settings of the policy that the run folder records. sizes: `SIZES` and `BITS` of the
        sampler; None: the run's, or the defaults.

    Raises:
      ConfigError: arguments that cannot be used together. CheckpointError: weights that cannot be read.
    """
    import jax

    from rolljax.model import hf
    from rolljax.model.decoder import DecoderConfig, Model
    from rolljax.model.tokenizer import Chat, load_tokenizer
    from rolljax.run.policy import policy_recipe
    from rolljax.run.preflight import ResolvedRecipe, micro_tok, recipe_chat
    from rolljax.run.trained_weights import trained_params
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.mesh import SLOT_AXES, MeshSpec, param_shardings
    from rolljax.trainer.publish import make_publish

    with needed("pydantic", "a model that answers requests"):
        from rolljax.serving.schema import ServedModel

    check_source(run, model, step, chat_template)
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"is not one of {', '.join(DTYPES)}", setting="--dtype", value=dtype)
    folder, sampler, lora = str(run or model), SamplerConfig(), None
    source: DecoderConfig | str = folder
    if run:
        recipe = recipe or policy_recipe(run)
        source, sampler, lora, dtype = recipe.model, recipe.sampler, recipe.lora, dtype or recipe.dtype
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    cfg = source if isinstance(source, DecoderConfig) else hf.read_config(source)
    chat: Chat | None
    if recipe is not None:
        chat = recipe_chat(recipe, run)
        tokenizer = chat.tokenizer
    else:
        tokenizer = load_tokenizer(folder)
        chat = Chat.of(tokenizer, chat_template or "") if chat_template or tokenizer.chat_template else None
    sampler, mesh = read_sizes(sizes, sampler, cfg, of_run=bool(run)), MeshSpec(tensor=tensor).build()
    decoder = Model(cfg, dtype, lora=lora, int8_sampler=sampler.quantization == "int8")
    name = name or Path(folder).resolve().name
    served = ServedModel(name, tokenizer, chat, cfg.vocab_size, sampler.max_context)
    print(f"loading {name}", file=sys.stderr, flush=True)
    if recipe is None:
        where = param_shardings(mesh, decoder.axes(), decoder.abstract())
        params, version = hf.load(folder, decoder, where, computed=True), 0
    else:
        resolved = ResolvedRecipe(recipe.sized(mesh, micro_tok(mesh, decoder)), mesh, mesh, decoder)
        params, version = trained_params(resolved, folder, step)
    return Engine(decoder.plain, sampler, mesh, SLOT_AXES), make_publish(mesh, decoder)(params), version, served


def read_sizes(sizes: Mapping[str, Any], sampler: SamplerConfig, cfg: DecoderConfig, *, of_run: bool) -> SamplerConfig:
    """Return the settings of a sampler with the given sizes in place of its own."""
    import jax

    given = {name: size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        if name in SIZES and type(size) is not int:
            raise ConfigError("must be int", setting=f"--{name}", value=size)
    if not of_run:
        given.setdefault("max_context", min(cfg.max_position, MAX_CONTEXT))
    if given.get("max_context", 0) > cfg.max_position:
        raise ConfigError(
            f"is more than the model's {cfg.max_position} positions",
            setting="--max_context",
            value=given["max_context"],
            remedy=f"at most {cfg.max_position}",
        )
    programs: Literal["few", "many"] = "few" if jax.default_backend() == "cpu" else "many"
    return dataclasses.replace(sampler, prefix_match="any", tensor=None, expert=None, programs=programs, **given)


# ---- the server


def run_server(service: Service, listener: socket.socket, drain_s: float) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Requests for tokens are taken when everything is compiled."""
    server = service.make_server(keep_alive_s=KEEP_ALIVE_S, closing_s=CLOSING_S)

    async def run() -> None:
        stop = asyncio.Event()
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        signals.in_loop(stop.set)
        stopping, warming = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(warm_up(service, url(listener)))
        await asyncio.wait((stopping, warming), return_when=asyncio.FIRST_COMPLETED)
        if warming.done():
            warming.result()
            print(hello(service, listener), flush=True)
            await stopping
        warming.cancel()
        signals.in_loop(os._exit, EXIT_INTERRUPTED)
        await service.drain(drain_s)
        server.should_exit = True
        await serving

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())
    service.close()


async def warm_up(service: Service, url: str) -> None:
    """Compile the programs that requests can need, with a bar on a terminal and a few lines elsewhere."""
    from rolljax.console.progress import ProgressBar

    with ProgressBar("compiling") as bar:
        bar.say(f"compiling what requests can need; {url}/ready says when it is done")

        def show(done: int, programs: int) -> None:
            due = programs and done * LINES // programs > (done - 1) * LINES // programs
            bar.show(done, programs, "compiling", f"compiled {done} of {programs} programs", now=bool(due))

        await service.warm_up(show)
    gc.collect()
    gc.freeze()  # exclude everything loaded and compiled so far from full garbage collections


def url(listener: socket.socket) -> str:
    """Return the address of a listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hello(service: Service, listener: socket.socket) -> str:
    """Return the line with the server's address and an example request."""
    key = " -H 'Authorization: Bearer KEY'" if service.limits.keys else ""
    limits, name = service.sampler.limits, service.served.name
    return (
        f"serving {name} at {url(listener)}/v1 ({limits.slots} slots, context {limits.max_context} tokens); try: "
        f"curl {url(listener)}/v1/completions{key} -H 'Content-Type: application/json' "
        f"""-d '{{"model": "{name}", "prompt": "Hello"}}'"""
    )


if __name__ == "__main__":
    sys.exit(main())
