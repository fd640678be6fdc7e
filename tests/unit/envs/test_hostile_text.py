"""No text of a policy or an environment can keep the trainer busy: every pattern and every reader takes time linear in it.

Patterns are found in the source, so that a new one is tested, or is listed with a reason, before it is used.

How growth is measured: processor time of this thread alone, so other processes do not count. A reader that needs
less than `QUICK_S` for `SIZE` characters is not quadratic, which would be at least `SIZE**2 / 2` steps, a hundred times
as long. Only of the others the times for one and two lengths are compared, each the best of several, and the comparison
is repeated at greater lengths before it fails: a linear reader would have to be disturbed every time.
"""

import ast
import functools
import importlib
import math
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rolljax
from rolljax.envs import bm25
from rolljax.envs.adapters import gymnasium, taubench
from rolljax.envs.adapters.openenv import OpenEnv, OpenEnvEnv
from rolljax.envs.adapters.reasoning_gym import FORMS
from rolljax.envs.base import EnvSpec
from rolljax.envs.catalog import make_spec
from rolljax.envs.catalog import names as environment_names
from rolljax.envs.code_problems import Problem, program_of
from rolljax.envs.pool.episode_runner import check_answer, describe
from rolljax.envs.text import MAX_ANSWER_CHARS, clean, code_blocks, linear_pattern, read_json, split_thinking
from rolljax.envs.tools.base import ToolError, ToolSpec, clip, plain
from rolljax.envs.tools.calculator import calc
from rolljax.envs.tools.parsers import PARSERS
from rolljax.envs.tools.schema import problem_of
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.judging.verdict import VerdictForm, last_object, read_label
from rolljax.model.tokenizer import MARK, UNMARK
from rolljax.recipes.dlcot.dlcot_stages import sections
from rolljax.recipes.shop_simulator import pages, shopper
from rolljax.recipes.stagent import itinerary
from rolljax.recipes.terminal_bench.actions import parse_action
from rolljax.recipes.terminal_bench.dockerfile import read_dockerfile
from rolljax.recipes.terminal_bench.tampering import suspicious_files, suspicious_words
from rolljax.rollout.agents.worker import read_answer
from rolljax.serving.schema import ApiError, parse_json

ROOT = Path(rolljax.__file__).parent
TEXT = {"type": "string"}
SPECS = (
    ToolSpec("calc", "", {"properties": {"expression": TEXT}, "required": ["expression"]}),
    ToolSpec("search", "", {"properties": {"city": TEXT, "tags": {"type": "array"}}, "required": ["city", "tags"]}),
    ToolSpec("python", "", {"properties": {"code": TEXT}, "required": ["code"]}),
)
SIZE = 2**14
QUICK_S = 0.01
MOST = 3.0
"""How often as long a text of twice the length may take; linear is 2, quadratic 4."""

# ---- how long something takes ---------------------------------------------------------------------------------------


def cpu_s(read, text, times):
    best = math.inf
    for _ in range(times):
        start = time.thread_time()
        read(text)
        best = min(best, time.thread_time() - start)
    return best


def growth(read, make, size):
    """Return the ratio of times for a text of twice the length; 1 if both are read at once."""
    ratio = 1.0
    for chars in (size, 2 * size, 4 * size):
        once = cpu_s(read, make(chars), 1)
        if once < QUICK_S:
            return 1.0
        if once > 5:  # a linear reader would need a fiftieth of that
            return math.inf
        ratio = cpu_s(read, make(2 * chars), 3) / min(once, cpu_s(read, make(chars), 3))
        if ratio <= MOST:
            return ratio
    return ratio


def repeated(head, pump, tail, chars):
    return head + pump * (chars // len(pump)) + tail


def check(read, head, pump, tail, size=SIZE):
    ratio = growth(read, lambda chars: repeated(head, pump, tail, chars), size)
    assert ratio <= MOST, f"{head!r} + {pump!r} * n + {tail!r}: twice the text takes {ratio:.1f} times as long"


EVIL = [
    "\n", "\r\n", " ", "\t", "a", "0", "9", "\\", "\\\\", '"', "'", '\\"', "`", "```", "```\n", "```python\n", "``", "(", "[", "{", "}",
    ")", "[]", "{}", '{"a":', "[[1],", ",", ":", "=", "==", "-", "--", "+", "*", "**", "/", "//", "1/", "1,", "1.", "1e", "1e9",
    "%", "$", "${a:-", "$a", "<", "<<", "<<a", "<think>", "</think>", "<tool_call>", "</tool_call>", '<tool_call>{"name":"calc"',
    "<tool_call>[1,", "def ", "def f", "async ", "async def", "\\boxed{", "\\frac{1}{2}", "\\text", "x\n", " \n", "\n ", "\t\n",
    "a b ", "a-", "a\\\n", "RUN a && ", "ENV a=$a$a\n", "--a ", "site-packages/", "/proc/1/", "/proc/111", "search[", "click[a]", "ask[",
    "\x1b[m", "\x1b[1;31m", "\x1b[0m", "\x1b[", "\x00", "\u00a0", "\u2003", "\u2028", "\u0661", "\ufdd0", "\ufdd01", "\ufdd01\ufdd1",
    "\ufffd", "\U0001d7d9", "\u0130", "e\u0301", "\ud800", "\udc00",
]  # fmt: skip
TAILS = ["", "!", "\n", "x", "```", "}", "</tool_call>", " "]

# ---- patterns -------------------------------------------------------------------------------------------------------

TRUSTED = {
    "sandbox/inside/checker.py": "the tests' own pattern, in the tests' sandbox",
    "aot/hlo.py": "what XLA's compiler wrote about our own program",
    "aot/hlo_text.py": "what XLA's compiler wrote about our own program",
    "aot/programs.py": "an error text of XLA's compiler",
    "envs/catalog.py": "what the user typed",
    "recipes/terminal_bench/inside.py": "runs in the sandbox, under its limits",
    "play.py": "what the user typed",
}
"""Files whose patterns meet no text of a policy or an environment, and what they do meet."""
MADE = {
    ("envs/games/mastermind.py", "f'[1-{self._spec.digits}]{{{self._spec.length}}}'"): ["[1-6]{3}"],
    ("envs/code_problems.py", "f'^[ \\\\t]*{head}'"): [r"(?m)^[ \t]*(?:async[ \t]+)?def[ \t]+f\b"],
    ("envs/code_problems.py", "f'^{head}'"): [r"(?m)^(?:async[ \t]+)?def[ \t]+f\b"],
    ("envs/tools/parsers.py", "f'{_THINK}|{pattern}'"): [
        f"(?m)<think>|{p.opening(SPECS)}" for p in PARSERS.values()
    ],
    ("envs/tools/parsers.py", "re.escape(f'</{word}>')"): ["</python>"],
    ("envs/tools/parsers.py", "f'{re.escape(spec.text_parameter)}\\\\s*=(?!=)\\\\s*'"): [r"code\s*=(?!=)\s*"],
    ("envs/adapters/reasoning_gym.py", "form"): [form.pattern for form in FORMS.values()],
    ("model/tokenizer.py", "f'({self._specials.pattern})'"): [r"(<\|assistant\|>|<\|end\|>)"],
    ("model/tokenizer.py", "f'{spelling.pattern}|{MARK}|{UNMARK}'"): [rf"<\|assistant\|>|<\|end\|>|{MARK}|{UNMARK}"],
    ("model/vocabulary.py", "'|'.join(map(re.escape, sorted(texts, key=lambda t: (-len(t), t)))) or '(?!)'"): [
        r"<tool_call>|</think>|<s>"
    ],
    ("model/tokenizer.py", "f'{MARK}([0-9]+){UNMARK}'"): [f"{MARK}([0-9]+){UNMARK}"],
}  # fmt: skip
"""Patterns that are put together while the program runs: examples of them."""
WHOLE = {("envs/adapters/reasoning_gym.py", "form")}
"""Those of them that only whole texts are held against."""


ANCHORED = {"match", "fullmatch"}
SEARCHES = {"search", "findall", "finditer", "split", "sub", "subn"}


def sources():
    return [p for p in sorted(ROOT.rglob("*.py")) if "terminal_tasks" not in p.parts]


def uses(path):
    """Yield (written pattern, flags, names it is bound to, whether it is searched for) of every use of `re` in a
    file."""
    text = path.read_text()
    if not re.search(r"\bre\.", text):
        return
    nodes = list(ast.walk(ast.parse(text)))
    kept = {
        id(n.value): [t.id for t in n.targets if isinstance(t, ast.Name)] for n in nodes if isinstance(n, ast.Assign)
    }
    called = [n.func for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    for n in nodes:
        if not (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and ast.unparse(n.func.value) == "re"):
            continue
        if n.func.attr in {"compile", *SEARCHES, *ANCHORED}:
            flags = [a for a in (*n.args[1:], *(k.value for k in n.keywords)) if ast.unparse(a).startswith("re.")]
            bits = eval(ast.unparse(flags[0]), {"re": re}) if flags else 0
            names = kept.get(id(n), [])
            verbs = {c.attr for c in called if ast.unparse(c.value).rpartition(".")[2] in names} | {n.func.attr}
            yield n.args[0], bits, names, not verbs & ANCHORED or bool(verbs & SEARCHES)


@functools.cache
def patterns():
    """Return every pattern of rolljax for foreign text, by its place, with whether it is searched for; and the patterns
    without an example."""
    found, unknown = {}, []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if name in TRUSTED:
            continue
        for written, flags, names, searched in uses(path):
            text = ast.unparse(written)
            if isinstance(written, ast.Constant):
                found[f"{name} {text}"] = re.compile(written.value, flags), searched
            elif (name, text) in MADE:
                searched &= (name, text) not in WHOLE
                found |= {f"{name} {example!r}": (re.compile(example), searched) for example in MADE[name, text]}
            elif module := [importlib.import_module("rolljax." + name.removesuffix(".py").replace("/", "."))] * bool(
                names
            ):
                found |= {f"{name} {k}": (getattr(module[0], k), searched) for k in names if hasattr(module[0], k)}
                unknown += [f"{name}: {text}" for k in names if not hasattr(module[0], k)]
            else:
                unknown.append(f"{name}: {text}")
    return found, unknown


def test_every_pattern_is_known():
    found, unknown = patterns()
    assert not unknown, "give an example in MADE"
    assert len(found) > 30
    listed = {(p.relative_to(ROOT).as_posix(), ast.unparse(written)) for p in sources() for written, *_ in uses(p)}
    assert set(MADE) <= listed and set(TRUSTED) <= {file for file, _ in listed}, "a list names what is gone"
    for path in sources():
        assert not re.search(r"(?m)^\s*(?:from re import|import re as|import regex|import sre)", path.read_text()), path


def read_by(pattern, searched, text):
    if isinstance(pattern.pattern, bytes):
        text = text.encode("utf-8", "surrogatepass")
    if searched:
        for _ in pattern.finditer(text):
            pass
    pattern.match(text)
    pattern.fullmatch(text)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("where", sorted(patterns()[0]))
def test_patterns_are_linear(where):
    """The table, with what looks like the pattern's own text before it, and pieces of that again and again."""
    pattern, searched = patterns()[0][where]
    read = functools.partial(read_by, pattern, searched)
    for pump in EVIL:
        check(read, "", pump, "!")

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(example=st.from_regex(pattern), data=st.data())
    def pumped(example, data):
        if isinstance(example, bytes):
            example = example.decode("utf-8", "surrogateescape")
        start = data.draw(st.integers(0, max(0, len(example) - 1)))
        end = data.draw(st.integers(start + 1, max(start + 1, len(example))))
        pump = example[start:end] or data.draw(st.sampled_from(EVIL))
        check(read, example[:start], pump, data.draw(st.sampled_from(TAILS)))

    pumped()


KNOWN_BAD = [
    (re.compile(r"(?m)^\s*(?:async\s+)?def\s+f\b"), "\n", 2**9),
    (re.compile(r"site-packages/\S*\.pth\b"), "site-packages/", 2**12),
    (re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})"), "${a:-", 2**10),
    (re.compile(r"(?:\x1b\[[0-9;]*m)+(.*?)\x1b\[0m", re.DOTALL), "\x1b[m", 2**6),
]


@pytest.mark.parametrize("pattern, pump, size", KNOWN_BAD, ids=range(len(KNOWN_BAD)))
def test_the_measure_finds_what_is_not_linear(pattern, pump, size):
    """The patterns that stood here before: eight times the text takes at least twice as long as a linear one could."""
    read = functools.partial(read_by, pattern, True)
    small, large = (cpu_s(read, repeated("", pump, "!", chars), 3) for chars in (size, 8 * size))
    assert large > 16 * small


# ---- readers --------------------------------------------------------------------------------------------------------

HEAD = 'import math\n\ndef f(x):\n    """Doc."""\n'
HUMANEVAL = Problem("1", "q", HEAD, "f", ("def check(f): pass",), "", HEAD + "    return x\n")
MBPP = Problem("1", "q", "", "f", ("assert f(1) == 1",), "", "def f(x): return x")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}},
}


def refused(*errors):
    """Return a wrapper that ignores the errors with which a reader may answer."""

    def make(read):
        def call(text):
            try:
                read(text)
            except errors:
                pass

        return call

    return make


def needs_no_file(name):
    try:
        make_spec(name)
        return True
    except ConfigError:
        return False


def stepped(ref):
    """Return a function that plays an environment once for every text."""
    spec = make_spec(ref)
    task = spec.task(0)

    def step(text):
        env = spec.make()
        env.reset(task)
        env.step(text)

    return step


def checked_arguments(text):
    value = plain(read_json(text))
    problem_of(SCHEMA, value)
    clip(str(value), 4096)


READERS = {
    "code_blocks": code_blocks,
    "read_json": refused(ValueError)(read_json),
    "clean": clean,
    "check_answer": refused(EnvError)(lambda text: check_answer(text, MAX_ANSWER_CHARS)),
    "describe": lambda text: describe(ValueError(text)),
    "program_of, HumanEval": lambda text: program_of(text, HUMANEVAL),
    "program_of, MBPP": lambda text: program_of(text, MBPP),
    "program_of, behind a block": lambda text: program_of("```python\n" + text, HUMANEVAL),
    "parse_action": lambda text: parse_action(text, MAX_ANSWER_CHARS),
    "suspicious_words": lambda text: suspicious_words(text, "an instruction"),
    "suspicious_files": lambda text: suspicious_files([text], []),
    "read_dockerfile": refused(DataError)(lambda text: read_dockerfile(text, {})),
    "calc": refused(ToolError)(calc),
    "arguments of a call": refused(ValueError)(checked_arguments),
    "answer format": lambda text: linear_pattern(r"(?:<think>.*</think>\s*)*<answer>.*</answer>", "").fullmatch(clean(text)),
    "itinerary": itinerary.read,
    "shop's actions": pages.parse,
    "words": bm25.words,
    "asked": lambda text: shopper.asked(text, ["size", "color", "budget"], 2),
    "gymnasium's colours": gymnasium._bracketed,
    "tau-bench's calls": taubench._read,
    "OpenEnv's actions": OpenEnvEnv(OpenEnv(action_key=""))._action,
    "a request's body": refused(ApiError)(lambda text: parse_json(text.encode("utf-8", "surrogatepass"))),
    "a judge's verdict": refused(ValueError)(lambda text: read_label("{" + text, "verdict", {"Safe": "Safe"})),
    "a judge's marks": refused(ValueError)(lambda text: VerdictForm(marks={"score": (0, 10)}).read(text + "}")),
    "the last object of an answer": refused(ValueError)(last_object),
    "thinking": split_thinking,
    "sections of a chain of thought": sections,
    "an agent's answer": refused(EnvError)(lambda text: read_answer(b'{"answer":' + text.encode("utf-8", "surrogatepass"), "x", own=True)),
} | {f"calls, {name}": lambda text, p=parser: list(p.parse(text, SPECS)) for name, parser in PARSERS.items()}  # fmt: skip
GAMES = {name: stepped(name) for name in environment_names() if name != "terminal" and needs_no_file(name)}
OPENINGS = ["", '<tool_call>{"name":"search","arguments":{"city":"', "<tool_call>", "search(", "```python\n", "<python>", "<think>", '{"a":[', '"']  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_readers_are_linear(name):
    for pump in EVIL:
        check(READERS[name], "", pump, "")


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    head=st.sampled_from(OPENINGS) | st.text(max_size=5),
    pump=st.lists(st.sampled_from(EVIL) | st.text(min_size=1, max_size=3), min_size=1, max_size=4).map("".join),
    tail=st.sampled_from(TAILS),
)
def test_readers_are_linear_on_made_text(name, head, pump, tail):
    check(READERS[name], head, pump, tail)


@pytest.mark.sweep
@pytest.mark.parametrize("head", OPENINGS)
@pytest.mark.parametrize("name", READERS)
def test_readers_are_linear_on_long_text(name, head):
    for pump in EVIL:
        check(READERS[name], head, pump, "", size=2**16)


@pytest.mark.parametrize("name", GAMES)
def test_environments_that_run_in_the_trainer_answer_anything_at_once(name):
    """What `runs = 'inline'` promises: a turn on an answer of any 2^16 characters takes milliseconds
    (here: a hundred times as long, for slow machines; one quadratic look at it would take longer than that)."""
    if make_spec(name).runs != "inline":
        pytest.skip("runs in a worker process")
    for pump in EVIL:
        assert cpu_s(GAMES[name], repeated("", pump, "", 2**16), 1) < 0.5


def test_who_reads_in_the_trainer():
    """What stays inline is ours, bounded and tested above; a class that says nothing runs in a worker process."""
    inline = {name for name in GAMES if make_spec(name).runs == "inline"}
    games = {"frozen_lake", "sokoban", "guess_number", "nim", "countdown", "mastermind"}
    games |= {"key_door", "key_door_chain", "house", "styled_words"}
    assert inline == games | {"shop", "calculator", "digit_sums"} | {"key_rules", "with_experience", "extraction"}
    assert EnvSpec.runs == "process" and make_spec("travel").runs == "process"
    assert {make_spec(f"rolljax.envs.tools.calculator.Arithmetic(terms={n})").runs for n in (2, 3)} == {"inline"}


READ_JSON_HERE = {
    "agents/worker.py": "a line of an agent program, tested above",
    "envs/adapters/gem_server.py": "requests of another trainer, bounded",
    "envs/adapters/gymnasium.py": "the user's own settings",
    "envs/adapters/expressions.py": "has tests of its own (test_expressions.py)",
    "envs/adapters/openenv.py": "answers of a server, bounded by MAX_FRAME_BYTES",
    "envs/adapters/openenv_server.py": "requests of another trainer, bounded",
    "envs/adapters/reasoning_gym.py": "replaces `eval` in a library, in a worker process",
    "envs/adapters/rock.py": "answers of a server, bounded by MAX_ANSWER_BYTES",
    "envs/adapters/verifiers.py": "our own program: the policy's text is a part of its results, if at all",
    "envs/adapters/verifiers_program.py": "the run's own lines",
    "envs/bounded.py": "our own child",
    "envs/base.py": "our own server",
    "envs/catalog.py": "what the user typed",
    "envs/data/columns.py": "the user's file",
    "envs/data/messages.py": "the user's file",
    "envs/data/rows.py": "the user's file",
    "envs/checks.py": "our own worker",
    "envs/pool/processes.py": "our own worker",
    "envs/pool/wire.py": "our own worker, bounded",
    "envs/code_problems.py": "the user's file of problems",
    "recipes/terminal_bench/dockerfile.py": "the user's folder of tasks",
    "recipes/terminal_bench/grading.py": "a sandbox's verdict, bounded",
    "recipes/terminal_bench/harbor.py": "the user's folder of tasks",
    "recipes/terminal_bench/inside.py": "runs in the sandbox",
    "envs/records.py": "the user's file",
    "envs/tasks.py": "our own checkpoint",
    "envs/text.py": "tested above",
    "recipes/shop_simulator/shopper.py": "our own task",
    "recipes/stagent/travel.py": "our own task",
    "sampler/openai_types.py": "tested above",
}
"""Files of the rooms that meet a policy's text and read JSON or Python: whose text it is."""


def test_who_else_reads_json_or_python_is_known():
    words = r"json\.loads|json\.load\(|JSONDecoder|literal_eval|ast\.parse|yaml\.|\beval\("
    rooms = ("agents/", "envs/", "sampler/")
    found = {p.relative_to(ROOT).as_posix() for p in sources() if re.search(words, p.read_text())}
    missing = {f for f in found if f.startswith(rooms)} - set(READ_JSON_HERE)
    assert not missing, "use rolljax.envs.text.read_json, or say whose text it is"


@pytest.mark.parametrize("depth", [31, 33, 90, 200, 300, 400, 900, 990, 1000, 5000, 20_000])
def test_no_depth_of_nesting_is_an_environments_failure(depth):
    """An answer that its reader chokes on is a wrong answer: never a fault, which would leave it out."""
    for deep in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "(" * depth, "[" * depth):
        for text in (
            deep,
            f'<tool_call>{{"name":"search","arguments":{deep}}}</tool_call>',
            f'{{"stops":{deep}}}',
            f"calc({deep})",
        ):
            for read in (*READERS.values(), *GAMES.values()):
                read(text)
