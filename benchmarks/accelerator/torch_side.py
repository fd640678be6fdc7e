"""Decode and a training step of the same shape in torch and in rolljax, on the same device.

torch is what its users run without a serving engine: transformers' Qwen3 with SDPA attention; a static cache, compiled
where the device is a GPU; float32 weights under bfloat16 autocast and fused AdamW. Each side of each row has its own
process, so that one does not hold the memory of the other. `ratio`: torch's seconds over rolljax's.

    python benchmarks/accelerator/torch_side.py --child torch '{"what": "decode", ...}'    # one side alone, as JSON
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's process shares the device

from common import Peaks, Piece, main, random_sampler_weights, random_weights, shapes  # noqa: E402
from decode import decode_figures  # noqa: E402
from update import fitting, make_trainer, update_figures  # noqa: E402

CHILD_S = 150.0
"""Longest time of torch's side of a row."""


def work(tiny: bool) -> list[dict[str, Any]]:
    """Return the rows that both sides measure; torch compiles its decode step for minutes, so updates come first."""
    if tiny:
        return [
            {"what": "decode", "shape": "tiny", "batch": 4, "context": 32, "steps": 4},
            {"what": "update", "shape": "tiny", "length": 64, "rows": 2},
        ]
    return [
        {"what": "update", "shape": "4B", "length": 2048, "rows": 4},
        {"what": "decode", "shape": "4B", "batch": 64, "context": 512, "steps": 16},
        {"what": "update", "shape": "0.6B", "length": 2048, "rows": 4},
        {"what": "decode", "shape": "0.6B", "batch": 64, "context": 512, "steps": 16},
    ]


def estimate(tiny: bool, peaks: Peaks) -> float:
    return 20.0 + 90.0 * len(work(tiny))


def body(piece: Piece) -> None:
    if importlib.util.find_spec("torch") is None:
        piece.record({"what": "torch", "cannot": "torch is not installed"})
        return
    for one in work(piece.tiny):
        if not piece.has_time(one, 60.0):
            continue
        with piece.attempt(one) as row:
            shape = shapes(piece.tiny)[one["shape"]]
            row["layers"] = (fitting(shape, piece.peaks) if one["what"] == "update" else shape).num_layers
            asked = one | {"layers": row["layers"], "tiny": piece.tiny}
            row |= {f"torch_{name}": value for name, value in child("torch", asked).items()}
            row["tok_s"] = child("rolljax", asked)["tok_s"]
            row["ratio"] = row["tok_s"] / row["torch_tok_s"]


# ---- processes of their own -----------------------------------------------------------------------------------------


def child(side: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Measure one side of a row in another process.

    Raises:
      RuntimeError: its process failed; TimeoutExpired: it took too long.
    """
    command = [sys.executable, __file__, "--child", side, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S)
    if done.returncode:
        raise RuntimeError(f"the side of {side} failed: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def rolljax_side(asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens per second of decode steps or updates of rolljax."""
    from rolljax.model.decoder import Model

    shape = dataclasses.replace(shapes(asked["tiny"])[asked["shape"]], num_layers=asked["layers"])
    if asked["what"] == "decode":
        model = Model(shape, "bfloat16")
        sizes = {name: asked[name] for name in ("batch", "context", "steps")}
        return decode_figures(model, random_sampler_weights(model), None, attention="auto", **sizes)
    trainer = make_trainer(shape, asked["length"], asked["rows"], "full")
    policy = trainer.states.init(random_weights(trainer.model, computed=False)).policy
    return update_figures(trainer, policy, None)[1]


def torch_model(asked: dict[str, Any], dtype: Any) -> Any:
    """Return transformers' model of that shape with random weights."""
    import torch
    import transformers

    shape = shapes(asked["tiny"])[asked["shape"]]
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=asked["layers"],
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn_size,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=shape.max_position,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def seconds(call: Any, repeats: int) -> float:
    """Return the median time of a call after the first two, on the device."""
    import statistics

    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def torch_decode(asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens per second of decode steps: generations of two lengths, so that prefill and set-up cancel."""
    import torch

    model = torch_model(asked, torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    prompt = torch.randint(1, model.config.vocab_size, (asked["batch"], asked["context"]), device=model.device)
    on_gpu = torch.cuda.is_available()
    short, long = (asked["steps"], 5 * asked["steps"])
    cache = {"cache_implementation": "static"} if on_gpu else {}  # generate compiles the step with a static cache

    def generate(n: int) -> float:
        how = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": True, "top_k": 0, **cache}
        with torch.inference_mode():
            return seconds(lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **how), 3)

    step_s = (generate(long) - generate(short)) / (long - short)
    return {"tok_s": asked["batch"] / step_s, "step_ms": 1e3 * step_s}


def torch_update(asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens per second of updates: a weighted sum of log-probs, its gradients, AdamW; with gradient
    checkpointing."""
    import torch

    model = torch_model(asked, torch.float32).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    on_gpu = torch.cuda.is_available()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=on_gpu)
    tokens = torch.randint(1, model.config.vocab_size, (asked["rows"], asked["length"]), device=model.device)
    weights = torch.randn(tokens.shape[0], tokens.shape[1] - 1, device=model.device)

    def step() -> None:
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(tokens).logits[:, :-1]
        targets = tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
        (loss * weights.flatten()).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step_s = seconds(step, 3)
    return {"tok_s": tokens.numel() / step_s, "step_s": step_s}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        wanted = json.loads(sys.argv[3])
        torch_sides = {"decode": torch_decode, "update": torch_update}
        side = torch_sides[wanted["what"]] if sys.argv[2] == "torch" else rolljax_side
        print(json.dumps(side(wanted)))
    else:
        main("torch_side", body, estimate)
