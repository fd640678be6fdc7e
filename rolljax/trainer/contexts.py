"""Other prompts for the same sampled tokens: a forward pass scores answers as if something else had been asked.

- `solved_sibling`: the whole conversation of a sibling that solved the task, then the answer's own prompt. The policy
  sees a right answer before it judges its own (self-distillation).
- `next_prompt`: the prompt of the next group in place of its own (the mismatched pairs of KTO).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rolljax.trainer.batch import Sample

Context = Literal["solved_sibling", "next_prompt"]


def solved_siblings(success: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the index of the first other trajectory of the same group that is solved, `[N]`; -1 where there is none.

    Args:
      success: `[N]` bool. groups: `[N]` group of each trajectory.
    """
    found = np.full(len(success), -1)
    for n, group in enumerate(groups):
        others = np.flatnonzero((groups == group) & success)
        others = others[others != n]
        found[n] = others[0] if len(others) else -1
    return found


def in_context(
    samples: Sequence[Sequence[Sample]], success: np.ndarray, groups: np.ndarray, context: Context
) -> list[Sample]:
    """Return the samples after another prompt, in their order; unchanged where no sibling is solved.

    Args:
      samples: by group, each of one sequence. success, groups: `[N]`, of the same trajectories.
    """
    every = [sample for group in samples for sample in group]
    prompts = [sample.tokens[: sample.indices[0]] for sample in every]
    if context == "solved_sibling":
        shown = solved_siblings(success, groups)
        none = np.zeros(0, np.int32)
        return [_after(s, every[i].tokens if i >= 0 else none, 0) for s, i in zip(every, shown, strict=True)]
    first = np.searchsorted(groups, (groups + 1) % (groups.max(initial=-1) + 1))
    return [_after(s, prompts[i], len(own)) for s, i, own in zip(every, first, prompts, strict=True)]


def _after(sample: Sample, before: np.ndarray, without: int) -> Sample:
    """Return a sample with tokens `before` it, and without its own first tokens."""
    tokens = np.concatenate([before, sample.tokens[without:]]).astype(np.int32)
    return dataclasses.replace(sample, tokens=tokens, indices=sample.indices + len(before) - without)
