"""A game with GEM's calls, learned by GEM's ReBN, in one file.

    python examples/gem_game.py            # four minutes on two cores

`HigherLower` is what GEM calls an environment: `reset(seed)` and `step(text)`. rolljax plays any such object (`Gem`).
Reference games teach the form of an answer; then ReBN, with a discount, finds that halving the range is quickest.
"""

import argparse
import random

import rolljax
from rolljax.envs.adapters.gem import Gem
from rolljax.envs.games.guess_number import GuessNumber
from rolljax.envs.pool import PoolConfig
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.rebn import ReBn
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.optimizer import AdamW

TURNS = 6


class HigherLower:
    """Guess a number from 1 to 10; the answer says where it lies."""

    def reset(self, seed=None):
        self.secret, self.turns = random.Random(seed).randint(1, 10), 0
        return "1-10?", {}

    def step(self, action):
        self.turns += 1
        guess = int(action) if action.strip().isascii() and action.strip().isdigit() else 0
        right = guess == self.secret
        text = "" if right else "higher" if guess < self.secret else "lower"
        return text, float(right), right, not right and self.turns == TURNS, {}


def make(game):
    """Return the environment of a name, as `gem.make` does."""
    return {"HigherLower": HigherLower}[game]()


def main(steps=60, **settings):
    start = rolljax.Phase(
        "warm_start", Sft(), steps=60, prompts_per_step=32, temperature=0.7, optimizer=AdamW(lr=3e-3), eval_every=10,
        stop_at_reward=0.3,
    )  # fmt: skip
    learn = rolljax.Phase(
        "learn", ReBn(gamma=0.9), steps=steps, prompts_per_step=16, group_size=8, updates_per_step=2,
        optimizer=AdamW(lr=1e-3), eval_every=20,
    )  # fmt: skip
    common = {
        "model": Qwen3Config(init_std=0.1),
        "sampler": SamplerConfig(slots=128, max_context=128, prefill_chunk=2048),
        "max_answer_tok": 4,
        "pool": PoolConfig(where="thread"),
    }
    scripted = GuessNumber(largest=10, max_turns=TURNS)
    warm = rolljax.train(rolljax.Recipe(scripted, (start,), **common), run_dir="runs/gem_start", **settings)
    game = Gem("HigherLower", maker=f"{__name__}.make", max_turns=TURNS)
    recipe = rolljax.Recipe(game, (learn,), **common | {"model": str(warm.path / "hf")})
    return rolljax.train(recipe, run_dir="runs/gem_game", **settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    print(main(parser.parse_args().steps))
