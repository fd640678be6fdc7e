"""Copies of a run folder in which files are damaged, and requests that mean harm: drawn from a seeded generator."""

import json
import os
import shutil
import urllib.parse

from rolljax.storage.layout import ENVIRONMENT, METRICS, RESOLVED, ROLLOUTS, SUMMARY

DEEP = "[" * 100_000 + "]" * 100_000
FILES = (RESOLVED, SUMMARY, ENVIRONMENT, METRICS, "rollouts/step_2.jsonl", "rollouts/heldout_rl.jsonl")
VALUES = (
    "null", "true", '""', '"x"', "-1", "1.5", "1e999", "NaN", "-Infinity", "9" * 400, "9" * 4000, "9" * 5000, "[]", "{}", "[null]",
    '{"a": null}', '"\\ud800"', '"\\u0000"', '"../../etc/passwd"', f'"{"a" * 5000}"', DEEP, '[{"phase": 3, "mean": "x"}]', "[[1, 2], [3]]",
)  # fmt: skip
"""JSON texts in place of an expected value."""
BYTES = (b"", b"\x00" * 64, b"\xff\xfe{", b"{", b"[]", b"null\n", b'"text"', DEEP.encode(), b"\n\n\n")
STRAY = (
    "step_x.jsonl", "step_1x.jsonl", "step_.jsonl", "step_-1.jsonl", "step_1e9.jsonl", "step_²3.jsonl", "heldout_.jsonl",
    "heldout_<b>.jsonl", "step_99999999999999999999.jsonl", f"step_{'9' * 200}.jsonl", "note.txt",
)  # fmt: skip
NUMBERS = (
    "1",
    "2",
    "0",
    "-1",
    "1.5",
    "99",
    "x",
    "",
    "9" * 20,
    "9" * 5000,
    "1e3",
    "١",
    "²",
    "%00",
    "0x1",
    " 1",
    "nan",
    "..",
    "None",
)
NAMES = (
    "{}", "none", "", "..", "%2e%2e", "{}%00", "a" * 300, "%ff", "%F0%9F%98%80", "{}/..", "<script>", "%0d%0aX: y", "*",
)  # fmt: skip
QUERIES = (
    "reward<1", "reward>1e999", "reward=nan", "len>" + "9" * 5000, "part:score>0", "part:>", "part:a>b", 'env:"', "-", '"', "'", "a" * 3000, ":",
    "success:", "draw=١", "-" * 500, "%00", "%ff", "%22%22%22", "reward<1" + "%20reward<1" * 200, "status:ok \\ ( [ * +", "=", "<>",
)  # fmt: skip


def damaged_runs(healthy, into, rng, number):
    """Make damaged copies of a run folder, each damaged in one to three places; returns their folders."""
    made = []
    for i in range(number):
        path = into / f"run_{i}"
        shutil.copytree(healthy, path)
        for _ in range(rng.randint(1, 3)):
            rng.choice((field, field, field, whole_file, kind_of_file, stray_file))(path, rng)
        made.append(path)
    return made


def field(path, rng):
    """Replace a value in a JSON file by another, or remove it."""
    file = path / rng.choice(FILES)
    if not file.is_file():
        return
    lines = (
        file.read_text(errors="replace").splitlines() if file.suffix == ".jsonl" else [file.read_text(errors="replace")]
    )
    for i in rng.sample(range(len(lines)), min(len(lines), 3)):
        try:
            lines[i] = other_value(json.loads(lines[i]), rng)
        except (ValueError, RecursionError):
            continue
    file.write_text("\n".join(lines) + "\n", errors="replace")


def other_value(value, rng):
    """Return a JSON text like that of `value`, with a hostile text at one place of it, or without that place."""
    marker = "\x01here\x01"
    at = value
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return rng.choice(VALUES)
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.7:
            at = at[key]
            continue
        if rng.random() < 0.25:
            del at[key]
            return json.dumps(value, separators=(",", ":"))
        at[key] = marker
        return json.dumps(value, separators=(",", ":")).replace(json.dumps(marker), rng.choice(VALUES))


def whole_file(path, rng):
    """Replace a file by other bytes, cut it, or change some of its bytes."""
    file = path / rng.choice(FILES)
    if not file.is_file():
        return
    data = bytearray(file.read_bytes())
    match rng.randrange(3):
        case 0:
            data = rng.choice(BYTES)
        case 1:
            data = data[: rng.randrange(len(data) + 1)]
        case 2:
            for _ in range(8 if data else 0):
                data[rng.randrange(len(data))] = rng.randrange(256)
    file.write_bytes(data)


def kind_of_file(path, rng):
    """Put a folder, a pipe or a link in place of a file. The settings stay a file, or the folder would be no run."""
    file = path / rng.choice(
        (SUMMARY, ENVIRONMENT, METRICS, "rollouts/step_2.jsonl", "rollouts/heldout_rl.jsonl", ROLLOUTS)
    )
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    if not file.parent.is_dir():
        return
    match rng.randrange(4):
        case 0:
            file.mkdir()
        case 1:
            os.mkfifo(file)
        case 2:
            file.symlink_to(file)
        case 3:
            file.symlink_to("/nowhere")


def stray_file(path, rng):
    """Write a file that no run writes."""
    if (path / ROLLOUTS).is_dir():
        (path / ROLLOUTS / rng.choice(STRAY)).write_bytes(rng.choice((b"", b"{}\n", (DEEP + "\n").encode())))


def hostile_target(names, rng):
    """Return the path and query of a request, mostly similar to paths of the viewer."""
    name = urllib.parse.quote(rng.choice(names))
    if rng.random() < 0.2:
        name = rng.choice(NAMES).format(name)
    step = rng.choice(("1", "2", "2", "3", "heldout:rl", "heldout:start", "heldout:", "heldout:%2e%2e%2fx", *NUMBERS))
    line = rng.choice(("0", "1", "2", "3", *NUMBERS))
    path = rng.choice((
        "/api/runs", f"/api/runs/{name}/rows?after={rng.choice(NUMBERS)}&generation={rng.choice(NUMBERS)}", f"/api/runs/{name}/config",
        f"/api/runs/{name}/heldout", f"/api/runs/{name}/search?q={rng.choice(QUERIES)}&from={rng.choice(NUMBERS)}",
        f"/api/runs/{name}/steps/{step}?q={rng.choice(QUERIES)}", f"/api/runs/{name}/steps/{step}/{line}", f"/export/{name}/{step}",
        f"/export/{name}/{step}/{line}", f"/assets/{rng.choice(('main.js', name, 'a' * 300 + '.js', '%00.js', '..%2fapp.py'))}",
        f"//evil.example/{name}", f"/{name}/", f"/api/runs/{name}", f"/?{rng.choice(QUERIES)}", "/api/runs/", f"/api//runs/{name}/rows",
    ))  # fmt: skip
    return path.replace(" ", "%20")


METHODS = ("HEAD", "POST", "PUT", "OPTIONS", "TRACE", "CONNECT", "get", "G€T", "")
HOSTS = ("localhost", "[", "[::1", "evil.example", "", "127.0.0.1:x", "é", "a" * 5000)
VERSIONS = ("HTTP/1.0", "HTTP/9.9", "", "\x00")
HEADERS = (
    "Cookie: a=b; ; =; \x01\r\n", "Authorization: Bearer \xff\r\n", "Content-Length: 5\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "X: y\r\n" * 150, ":\r\n", "Range: bytes=0-\r\n", "Expect: 100-continue\r\n",
)  # fmt: skip


def hostile_head(port, target, rng):
    """Return the bytes of a request for a target; one in four is malformed."""
    parts = {"method": "GET", "host": f"127.0.0.1:{port}", "version": "HTTP/1.1", "more": ""}
    others = {"method": METHODS, "host": HOSTS, "version": VERSIONS, "more": HEADERS}
    if rng.random() < 0.25:
        part = rng.choice(list(others))
        parts[part] = rng.choice(others[part])
    text = "{method} {} {version}\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n".format(target, **parts)
    return text.encode("latin-1", "replace") if rng.random() < 0.95 else text.encode()
