"""Files of items and judged answers for tests of judged evaluations."""

import json

from rolljax.evaluation.judged.base import Judged


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def judged(draw, sibling, item, facts=None, **labels):
    return Judged(draw, sibling, item, facts or {"thought": True}, labels, {}, {})
