"""ROME's mask of turns."""

import pytest

from rolljax.data.pipeline import Pipeline
from rolljax.errors import ConfigError
from rolljax.recipes.rome import turn_mask
from tests.stages import through


def test_a_model_says_which_turns_mattered(tmp_path):
    said = [
        {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("tool", "t"), ("assistant", "b"))
    ]
    rule = lambda messages, rng: "Turns: 9" if rng.random() < 0.3 else "Because.\nTurns: 2"  # noqa: E731
    rows, _, _ = through(tmp_path, turn_mask.TurnMask(judge=True, tries=9), records=[{"messages": said}], rule=rule)
    assert [m.get("weight") for m in rows[0]["messages"]] == [None, 0, None, 1]
    with pytest.raises(ConfigError, match="asks a model"):
        Pipeline((turn_mask.TurnMask(judge=True),))
