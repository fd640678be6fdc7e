"""Check every family of reasoning-gym in this process: it loads, accepts its own answer, and survives hostile ones.

    python tests/e2e/reasoning_gym_families.py TEXTS MARK [FAMILY ...]

Prints a JSON line per family: name, seconds to load, seconds per task, slowest answer, errors. A call that takes
longer than its limit is interrupted. Answers that are executed make the file MARK.
"""

import contextlib
import json
import random
import signal
import sys
import time

from rolljax.envs.adapters.reasoning_gym import REFUSED, ReasoningGym
from rolljax.errors import EnvError

NO_REFERENCE = {"boxnet", "graph_color", "rubiks_cube", "rush_hour"}
SLOW = {"knight_swap", "futoshiki", "sokoban", "zebra_puzzles", "quantum_lock", "puzzle24", "sudoku", "rush_hour"}
"""Families that take long to make a task: one task each."""
LIMIT_S = 200.0
MARK = sys.argv[2]
HOSTILE = [
    "",
    "\x00",
    "9**9**9**9",
    "(" * 300,
    "[" * 5000,
    "-" * 3000 + "1",
    "1e999999999",
    "1/0",
    "9" * 5000,
    "٣٤",
    "nan",
    "inf",
    "x" * 1_000_000,
    "{" * 100 + "}" * 100,
    "True",
    "None",
    "[[0]]",
    "exp(exp(exp(exp(99))))",
    "((((9**99)**99)**99)**99)",
    "factorial(10**9)",
    "9**(9999999999*(x/x))",
    "F+999999999",
    "R9999999",
    "¬" * 4000,
    "S('x').func",
    "().__class__.__base__.__subclasses__()",
    f"open({MARK!r}, 'w')",
    f"__import__('os').system('touch {MARK}')",
    f"[__import__('os').system('touch {MARK}')]",
    "\ud800",
]


@contextlib.contextmanager
def limit():
    def late(*_):
        raise TimeoutError(f"over {LIMIT_S:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def texts(rng, number, reference):
    """Yield hostile texts first, then mutations of the answer and noise."""
    yield from HOSTILE
    alphabet = "0123456789+-*/()[]{},.: '\"\\\n_abcxyzCTFE^%&|<>=é☃"
    for _ in range(number):
        if rng.random() < 0.5 and reference:
            chars = list(reference)
            for _ in range(rng.randint(1, 4)):
                chars[rng.randrange(len(chars))] = rng.choice(alphabet)
            yield "".join(chars)
        else:
            yield "".join(rng.choices(alphabet, k=rng.randint(1, 60)))


def check(family, number):
    start = time.perf_counter()
    wrong, slowest = [], 0.0
    spec = ReasoningGym(family)
    loaded = time.perf_counter()
    tasks = [spec.task(i) for i in range(1 if family in SLOW else 3)]
    made = time.perf_counter()
    assert [spec.task(t.index) for t in tasks[:1]] == tasks[:1]
    reference = None
    for task in tasks:
        env = spec.make()
        env.reset(task)
        try:
            reference = env.reference_answer()
        except EnvError:
            if family not in NO_REFERENCE:
                wrong.append("no reference answer")
            break
        with limit():
            result = env.step(reference)
        if not result.success or result.reward != 1:
            wrong.append(f"reference of task {task.index} scores {result.reward_parts}")
    rng, solved = random.Random(family), 0
    for text in texts(rng, number, reference):
        env = spec.make()
        env.reset(tasks[0]) if family not in SLOW else setattr(env, "_entry", entry_of(spec, tasks[0]))
        before = time.perf_counter()
        try:
            with limit():
                result = env.step(text)
            assert isinstance(result.reward, float) and 0 <= result.reward <= 1 and result.terminated
            solved += result.success and text in HOSTILE
        except Exception as e:
            wrong.append(f"{text[:40]!r}: {type(e).__name__}: {e}")
        slowest = max(slowest, time.perf_counter() - before)
    if solved > 1:
        wrong.append(f"{solved} hostile texts taken for right")
    return {
        "family": family,
        "load_s": round(loaded - start, 3),
        "task_s": round((made - loaded) / len(tasks), 4),
        "slowest_s": round(slowest, 3),
        "wrong": wrong,
    }


def say(record):
    """Print one line. Families print dots of their own, so it starts a new one."""
    sys.stdout.write("\n" + json.dumps(record) + "\n")
    sys.stdout.flush()


_entries = {}


def entry_of(spec, task):
    """Return the task's entry, cached: `reset` would make it again each time."""
    if spec.family not in _entries:
        _entries[spec.family] = spec.item(task.index)
    return _entries[spec.family]


if __name__ == "__main__":
    from reasoning_gym.factory import DATASETS

    families = sys.argv[3:] or sorted(set(DATASETS) - set(REFUSED))
    for name in families:
        say({"starting": name})
        try:
            say(check(name, int(sys.argv[1])))
        except Exception as e:
            say({"family": name, "wrong": [f"{type(e).__name__}: {e}"]})
