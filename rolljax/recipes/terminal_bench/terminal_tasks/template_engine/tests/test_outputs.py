"""The function, called in a process of its own."""

import json
import subprocess
import sys

CALL = """
import json, sys
sys.path.insert(0, "/work")
import template
text, values = json.loads(sys.argv[1])
try:
    print(json.dumps(template.render(text, values)))
except (KeyError, ValueError) as e:
    print(json.dumps({"error": type(e).__name__}))
"""


def render(text, values):
    command = [sys.executable, "-I", "-c", CALL, json.dumps([text, values])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return json.loads(done.stdout)


def test_values():
    assert render("a {{x}} {{ y }}\n{{n.k}}", {"x": 1, "y": "z", "n": {"k": [2]}}) == "a 1 z\n[2]"


def test_conditions():
    text = "{% if a %}A{% end %}{% if b %}B{% end %}{% if c %}C{% end %}"
    assert render(text, {"a": 1, "b": []}) == "A"


def test_loops_may_be_nested():
    text = "{% for r in rows %}{% for x in r.xs %}{{x}},{% end %}{% if r.last %}!{% end %};{% end %}"
    assert render(text, {"rows": [{"xs": [1, 2]}, {"xs": [3], "last": True}]}) == "1,2,;3,!;"


def test_the_name_of_a_loop_ends_with_it():
    assert render("{% for x in xs %}{{x}}{% end %}{{x}}", {"xs": [1], "x": "o"}) == "1o"


def test_values_are_no_templates():
    assert render("{{x}}", {"x": "{{y}}{% if %}"}) == "{{y}}{% if %}"


def test_errors():
    assert render("{{x}}", {}) == {"error": "KeyError"}
    for text in ("{% if a %}", "{% end %}", "{% while a %}{% end %}"):
        assert render(text, {"a": 1}) == {"error": "ValueError"}
