"""Train through the training service with the public `tinker` package: supervised, by reward, by preference.

    python -m rolljax.service --model HF_DIR --port 8000           # on the machine with the devices
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/training_service.py

Nothing here is rolljax's: the same script runs against any server of this API. The task is the last digit of a sum, as
bytes: `3+8=1`. A model with random weights learns it well enough to be rewarded now and then (supervised), and then
from its rewards alone. At the same time a second adapter learns to prefer wrong answers.
"""

import argparse
import asyncio

import numpy as np
import tinker
import torch
from tinker import types

DIGITS = "0123456789"
END = ord("\n")
ANSWER = types.SamplingParams(max_tokens=2, temperature=1.0, stop=[END])


def prompt(a, b):
    return list(f"{a}+{b}=".encode())


def sum_digit(a, b):
    return str((a + b) % 10)


def datum(tokens, num_prompt, **inputs):
    """Return a datum whose inputs are those of the answer's tokens; on the prompt they are 0."""
    before = [0.0] * (num_prompt - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **{name: before + list(x) for name, x in inputs.items()}},
    )


async def supervised(policy, rng, steps, rate, size=64):
    """Train on right answers; return the mean cross-entropy of each step, in nats per token."""
    curve = []
    for _ in range(steps):
        pairs = rng.integers(0, 10, (size, 2))
        data = []
        for a, b in pairs:
            ids, answer = prompt(a, b), [ord(sum_digit(a, b)), END]
            data.append(datum(ids + answer, len(ids), weights=[1 / (2 * size)] * 2))
        done = policy.forward_backward(data, "cross_entropy")
        stepped = policy.optim_step(types.AdamParams(learning_rate=rate))
        curve.append((await done).metrics["loss:sum"])
        await stepped
    return curve


async def rewarded(policy, rng, steps, rate, prompts=48, siblings=8):
    """Train on the rewards of sampled answers, each compared with its siblings; return the mean reward of each step."""
    curve = []
    for _ in range(steps):
        sampler = await policy.save_weights_and_get_sampling_client()
        pairs = rng.integers(0, 10, (prompts, 2))
        sampled = [sampler.sample(types.ModelInput.from_ints(prompt(a, b)), siblings, ANSWER) for a, b in pairs]
        groups = [await answers for answers in sampled]
        data, rewards = [], []
        for (a, b), group in zip(pairs, groups, strict=True):
            right = [ord(sum_digit(a, b)), END]
            scores = np.array([float(list(s.tokens) == right) for s in group.sequences])
            rewards.append(scores.mean())
            for sequence, advantage in zip(
                group.sequences, (scores - scores.mean()) / (scores.std() + 1e-6), strict=True
            ):
                ids, answer = prompt(a, b), list(sequence.tokens)
                each = [advantage / (prompts * siblings)] * len(answer)
                data.append(datum(ids + answer, len(ids), logprobs=sequence.logprobs, advantages=each))
        done = policy.forward_backward(data, "importance_sampling")
        stepped = policy.optim_step(types.AdamParams(learning_rate=rate))
        curve.append(float(np.mean(rewards)))
        await done
        await stepped
    return curve


async def preferred(policy, rng, steps, rate, beta=0.5, size=16):
    """Train to prefer wrong answers to right ones (DPO, arXiv:2305.18290), with a loss of our own; return the share of
    pairs in which the wrong one is likelier."""
    curve, reference = [], {}
    for _ in range(steps):
        data, pairs = [], rng.integers(0, 10, (size, 2))
        for a, b in pairs:
            for digit in (str((a + b + 1) % 10), sum_digit(a, b)):
                ids = prompt(a, b)
                data.append(datum([*ids, ord(digit), END], len(ids), weights=[1.0, 1.0]))
        keys = [tuple(d.model_input.to_ints()) for d in data]
        if not reference:  # of the policy before its first step, for every pair
            every = [
                datum([*prompt(a, b), ord(d), END], 4, weights=[1.0, 1.0])
                for a in range(10)
                for b in range(10)
                for d in DIGITS
            ]
            found = await policy.forward(every, "cross_entropy")
            for d, out in zip(every, found.loss_fn_outputs, strict=True):
                reference[tuple(d.model_input.to_ints())] = float(np.sum(out["logprobs"].data[-2:]))

        def loss(data, logprobs, keys=keys):
            gaps = torch.stack([x[-2:].sum() - reference[k] for x, k in zip(logprobs, keys, strict=True)])
            likelier = torch.stack([x[-2:].sum() for x in logprobs])
            wins = (likelier[::2] > likelier[1::2]).float().mean()
            return -torch.nn.functional.logsigmoid(beta * (gaps[::2] - gaps[1::2])).mean(), {"wins": float(wins)}

        done = policy.forward_backward_custom(data, loss)
        curve.append((await done).metrics["wins"])
        await policy.optim_step(types.AdamParams(learning_rate=rate))
    return curve


async def run(args):
    client = tinker.ServiceClient()
    base = args.base_model or (await tinker.RestClient().get_server_capabilities()).supported_models[0].model_name
    policy = await client.create_lora_training_client(base_model=base, rank=args.rank, seed=args.seed)
    rng = np.random.default_rng(args.seed)
    loss = await supervised(policy, rng, args.supervised_steps, 3e-3)
    print(f"supervised: {loss[0]:.2f} -> {loss[-1]:.2f} nats per token")
    path = (await policy.save_state(f"start{args.seed}", overwrite=True)).path
    # from the weights alone: Adam's averages are those of the supervised gradients, which are far larger
    policy, other = [await client.create_training_client_from_state(path) for _ in range(2)]
    rewards, wins = await asyncio.gather(
        rewarded(policy, rng, args.reward_steps, 1e-3),
        preferred(other, np.random.default_rng(1), args.preference_steps, 1e-3),
    )
    print(f"by reward: {np.mean(rewards[:3]):.2f} -> {np.mean(rewards[-3:]):.2f} right")
    print(f"by preference, at the same time: {wins[0]:.2f} -> {wins[-1]:.2f} of the wrong answers likelier")
    return loss, rewards, wins


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base_model", help="default: the server's")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--supervised_steps", type=int, default=60)
    parser.add_argument("--reward_steps", type=int, default=40)
    parser.add_argument("--preference_steps", type=int, default=15)
    asyncio.run(run(parser.parse_args()))
