"""The viewer's page in a real browser: from a run to one token of it, and back."""

import dataclasses
import json
import os
import re
import shutil
import time

import pytest

from rolljax.run.folder import RunFolder
from rolljax.storage.layout import METRICS, RESOLVED, SUMMARY

from .. import viewing

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HARM = " ".join(viewing.HARMFUL)
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium; else name one in $CHROMIUM)")
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    yield from watched(browser, {})


@pytest.fixture
def phone(browser):
    yield from watched(browser, PHONE)


def watched(browser, options):
    """Open a page in its own context; any error or warning of it fails the test."""
    context = browser.new_context(**options)
    opened = context.new_page()
    said = opened.said = []
    opened.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
    opened.on(
        "request",
        lambda request: (
            said.append(request.url) if not request.url.startswith(("http://127.0.0.1", "data:", "file:")) else None
        ),
    )
    opened.set_default_timeout(20_000)
    yield opened
    assert said == []
    context.close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return viewing.write_run(tmp_path_factory.mktemp("browsed") / "run", steps=12, text=HARM)


@pytest.fixture(scope="module")
def site(run_dir):
    other = viewing.write_run(run_dir.parent / "second", steps=6, seed=1)
    with viewing.Viewing(run_dir) as one, viewing.Viewing(run_dir, other) as two:
        one.both = two.url
        yield one


def until(page, holds, arg=None):
    """Wait until something holds in the page. (`wait_for_function` would make code of a text there, which our policy forbids.)"""
    deadline = time.monotonic() + 60
    while not page.evaluate(f"arg => Boolean({holds})", arg):
        assert time.monotonic() < deadline, f"{holds} does not hold, {arg}, {page.url}"
        page.wait_for_timeout(20)


def at(page, address):
    """Wait until the page shows what its address says."""
    until(page, "document.getElementById('page').dataset.shown?.split('?')[0] === arg", address)


def says(locator, *parts):
    """Wait until a condition holds."""
    for part in parts:
        playwright.expect(locator).to_contain_text(part, timeout=20_000)


def texts(page, selector):
    return page.locator(selector).all_text_contents()


def test_from_the_run_to_a_token(page, site):
    page.goto(site.url)
    page.locator("figure.chart").first.wait_for()
    names = texts(page, "figcaption .name")
    assert names[0] == "reward/mean" and "policy/entropy_nat" in names and "faults/env_n" not in names
    assert "reward per trajectory" in page.locator("figure.chart").first.text_content()
    page.get_by_role("link", name="Steps").click()
    at(page, "#/run/steps")
    assert page.locator("tbody tr").count() == 12
    page.get_by_role("link", name="12", exact=True).click()
    at(page, "#/run/12")
    assert page.locator("li.group").count() == 5
    assert "spread 0.5" in page.locator("li.group").first.text_content()
    page.locator("li.group a.task").first.click()
    at(page, "#/run/12/g/0-50")
    assert page.locator("article.sibling").count() == 4
    page.locator("article.sibling header a").nth(1).click()
    at(page, "#/run/12/9")
    assert page.locator("li.turn").count() == 2
    assert (
        texts(page, "li.turn details.of-env .who") == ["environment"]
        and not page.locator("details.of-env .told").first.is_visible()
    )
    page.locator("details.of-env summary").click()
    says(page.locator("details.of-env .told"), "You see a wall.")
    token = page.locator(".tok").nth(3)
    token.hover()
    says(page.locator(".tip"), re.compile(r"log-prob.*%"), "advantage+0.5", "policy version1")
    assert page.locator(".tip .likeliest tr").count() == 2
    says(page.locator(".tip .likeliest"), "likeliest tokens", "\\xe2", "%")
    token.click()
    until(page, "location.href.endsWith('token=0.3')")


def test_tokens_are_coloured_by_what_is_asked_for(page, site):
    page.goto(f"{site.url}/#/run/12/9")
    at(page, "#/run/12/9")
    assert texts(page, ".choice button") == ["nothing", "log-prob", "advantage", "policy version"]
    assert "p3" in page.locator(".tok").first.get_attribute("class")
    page.get_by_role("button", name="log-prob", exact=True).click()
    until(page, "document.querySelector(\".tok[class*=' q']\") && !document.querySelector('.tok.p3')")
    until(page, "location.href.includes('colour=logp')")
    page.keyboard.press("c")
    until(page, "location.href.includes('colour=advantage')")


def test_a_link_leads_to_a_token(page, site):
    page.goto(f"{site.url}/#/run/12/9?colour=logp&token=1.2")
    page.locator(".tok.pinned").wait_for()
    assert page.locator(".tok.pinned").text_content() == " " and page.locator(".tip").is_visible()
    assert page.get_by_role("button", name="log-prob", exact=True).get_attribute("aria-pressed") == "true"


def test_the_keyboard_goes_everywhere(page, site):
    page.goto(f"{site.url}/#/run/steps")
    at(page, "#/run/steps")
    for key in "jj":
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    at(page, "#/run/11")
    page.keyboard.press("]")
    at(page, "#/run/12")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    at(page, "#/run/12/g/0-50")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    at(page, "#/run/12/8")
    page.keyboard.press("l")
    at(page, "#/run/12/9")
    page.keyboard.press("u")
    at(page, "#/run/12/g/0-50")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    page.keyboard.press("u")
    at(page, "#/run/12")
    page.keyboard.press("/")
    page.keyboard.type("status:failed")
    until(page, "document.querySelectorAll('li.group').length === 1")
    assert "q=status" in page.url


def test_search_and_filter(page, site):
    page.goto(f"{site.url}/#/run/search")
    page.locator("li.hit").first.wait_for()
    page.locator("[data-search]").fill("fault:infra")
    until(page, "document.querySelectorAll('li.hit').length === 12")
    assert texts(page, "li.hit .sign.bad") == ["failed"] * 12
    page.locator("[data-search]").fill("colour:red")
    page.locator(".wrong:not(:empty)").wait_for()
    assert "is no field" in page.locator(".wrong").text_content()
    assert ["400" in text for text in page.said] == [True]
    page.said.clear()
    page.get_by_role("button", name="cut").click()
    until(page, "document.querySelectorAll('li.hit .sign.warn').length === 12")
    page.locator("li.hit a").first.click()
    at(page, "#/run/12/17")
    assert "an answer was cut: length" in page.locator("p.fault").text_content()


def test_two_runs_share_a_chart(page, site):
    page.goto(site.both)
    page.locator("figure.chart").first.wait_for()
    assert page.locator("table.runs tbody tr").count() == 2
    assert page.locator("figure.chart").first.locator("path.line").count() == 2
    page.get_by_label("show the curves of run").uncheck()
    until(page, "document.querySelector('figure.chart').querySelectorAll('path.line').length === 1")
    page.goto(f"{site.both}/#/run/config?with=second")
    page.locator("tr.differs").first.wait_for()
    assert texts(page, "tr.differs td:first-child") == [
        "seed", "phases[0].steps", "phases[0].optimizer.lr", "phases[1].steps", "phases[1].optimizer.lr"]  # fmt: skip


def box_of(page, selector):
    """Return the place of the first such element. The page replaces charts when it draws them again: wait for one."""
    where = """selector => {
        const box = document.querySelector(selector)?.getBoundingClientRect();
        return box?.width ? {x: box.x, y: box.y, width: box.width} : null; }"""
    return page.wait_for_function(where, arg=selector).json_value()


def test_controls_change_the_curves(page, site):
    page.goto(site.url)
    chart = page.locator("figure.chart").first
    chart.locator("path.line").wait_for()
    assert chart.locator("path.star").count() == 2 and chart.locator("text.phase").count()
    page.get_by_label("log scale").check()
    until(page, "location.hash.includes('log=1')")
    page.get_by_label("smoothing").fill("0.8")
    page.locator("figure.chart path.raw").first.wait_for()
    page.locator("[data-search]").fill("entropy")
    until(page, "document.querySelectorAll('figure.chart').length === 1 && location.hash.includes('metric=entropy')")
    box = box_of(page, "figure.chart svg")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    says(page.locator(".readout"), re.compile(r"step \d+"))
    page.mouse.click(box["x"] + box["width"] - 12, box["y"] + 40)
    at(page, "#/run/12")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Write three runs that differ in their seed, one of another recipe, and one that is damaged."""
    root = tmp_path_factory.mktemp("seeds")
    for number in range(4):
        path = viewing.write_run(root / f"run{number}", steps=4)
        settings = json.loads((path / RESOLVED).read_text()) | {"seed": number}
        (path / RESOLVED).write_text(json.dumps(settings | ({"max_answer_tok": 9} if number == 3 else {})))
        rows = [
            viewing.row(s, "warm_start" if s == 1 else "a phase of reinforcement" if s < 4 else "the last phase")
            | {"reward/mean": number + s / 8, "time/step_s": 60.0 * (number + 1), "train/trained_tok_n": 2e6, "loss/total": -1.234e-5 * s}
            for s in range(1, 5)
        ]  # fmt: skip
        (path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    damaged = viewing.write_run(root / "damaged", steps=1)
    (damaged / SUMMARY).write_text("[]")
    (damaged / METRICS).write_text('{"step": "one"}\n')
    (damaged / "rollouts" / "step_1.jsonl").write_text("{}\n")
    return root


def test_curves_by_wall_time_and_tokens_and_means_over_seeds(page, seeds):
    with viewing.Viewing(*sorted(seeds.glob("run*"))) as site:
        page.goto(f"{site.url}/#/?runs=run0,run1,run2,run3")
        chart = page.locator("figure.chart").first
        chart.locator("path.line").first.wait_for()
        assert chart.locator("path.line").count() == 4 and chart.locator("path.seed").count() == 0
        page.get_by_label("mean over seeds").check()
        until(page, "document.querySelector('figure.chart').querySelectorAll('path.seed').length === 3")
        assert chart.locator("path.line").count() == 2
        assert texts(page, "figure.chart:first-child .value")[:2] == ["1.5", "3.5"]  # of seeds 0 to 2, and of seed 3
        assert texts(page, ".legend .key") == ["mean of 3 seeds: run0…", "run3"]
        page.get_by_label("across").select_option("wall time")
        until(page, "location.hash.includes('x=wall')")
        until(page, "[...document.querySelectorAll('figure.chart .tick')].some(t => t.textContent.endsWith('min'))")
        page.reload()
        page.get_by_label("across").select_option("trained tokens")
        until(page, "[...document.querySelectorAll('figure.chart .tick')].some(t => t.textContent === '4M')")
        box = box_of(page, "figure.chart svg")
        page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 40)
        says(chart.locator(".readout"), "8M tokens")
        page.mouse.click(box["x"] + box["width"] - 14, box["y"] + 40)
        at(page, "#/run0/4")


CUT = """[...document.querySelectorAll('figure.chart svg')].flatMap((svg) => {
  const [all, labels] = [svg.getBoundingClientRect(), [...svg.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()])];
  const beyond = labels.filter(([, r]) => r.left < all.left - 1 || r.right > all.right + 1 || r.top < all.top - 1 || r.bottom > all.bottom + 1);
  const over = labels.filter(([, a], i) => labels.some(([, b], k) => k < i && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
  return [...beyond, ...over].map(([text]) => text);
})"""


@pytest.mark.parametrize("x", ["step", "wall", "tokens"])
def test_no_label_of_a_chart_is_cut_or_written_over(page, phone, seeds, x):
    with viewing.Viewing(seeds / "run0") as site:
        for wide in (page, phone):
            wide.goto(f"{site.url}/#/run0?x={x}")
            wide.locator("figure.chart path.line").first.wait_for()
            until(wide, "document.querySelectorAll('figure.chart svg').length > 5")
            assert wide.evaluate(CUT) == []
        wide.goto("about:blank")
        page.goto("about:blank")


def test_a_damaged_run_is_shown_next_to_the_others(page, seeds):
    with viewing.Viewing(seeds) as site:
        page.goto(site.url)
        page.locator("figure.chart").first.wait_for()
        assert page.locator("table.runs tbody tr").count() == 5
        assert texts(page, "table.runs .sign.bad") == ["damaged"]
        for address, words in (
            ("#/damaged", "summary.json cannot be read: it is not a JSON object"),
            ("#/damaged/1", "Line 0: key is missing"),
        ):
            page.goto(f"{site.url}/{address}")
            at(page, address)
            says(page.locator("main .fault").first, words)


def test_the_reference_answer_stands_next_to_the_policys(page, tmp_path):
    path = viewing.write_run(tmp_path / "run", steps=1)
    folder, answer = RunFolder(path), "north, <b>then</b> the door"
    folder.write_rollouts(1, [dataclasses.replace(t, reference=answer) for t in viewing.step_of(1)])
    folder.write_heldout("rl", [dataclasses.replace(viewing.step_of(2)[0], reference=answer)])
    with viewing.Viewing(path) as site:
        for address in ("#/run/1/1", "#/run/1/g/0-6"):
            page.goto(f"{site.url}/{address}")
            at(page, address)
            says(page.locator(".reference"), "reference answer", answer)
        for address in ("#/run/1", "#/run/heldout"):
            page.goto(f"{site.url}/{address}")
            at(page, address)
            says(page.locator("main"), answer)
        page.goto("about:blank")


def test_held_out_answers_before_and_after(page, site):
    page.goto(f"{site.url}/#/run/heldout")
    page.locator("table.heldout").wait_for()
    assert page.locator("table.heldout tbody tr").count() == 4
    page.get_by_role("button", name="better 2").click()
    until(page, "document.querySelectorAll('table.heldout tbody tr').length === 2")
    page.locator("table.heldout tbody tr a").last.click()
    at(page, "#/run/heldout:rl/3")
    page.keyboard.press("u")
    at(page, "#/run/heldout")


def test_the_page_follows_a_run(page, tmp_path):
    path = viewing.write_run(tmp_path / "run", steps=2, finished=False)
    with viewing.Viewing(path) as site:
        page.goto(f"{site.url}/#/run/steps")
        at(page, "#/run/steps")
        assert page.locator("tbody tr").count() == 2
        page.evaluate(
            "new Promise(done => { const e = new EventSource('/api/events'); e.onopen = () => { e.close(); done(); }; })"
        )
        viewing.add_step(path, 3)
        until(page, "document.querySelectorAll('tbody tr').length === 3")
        says(page.locator(".standing"), "step 3 of 4")
        page.goto("about:blank")


def test_texts_stay_texts(page, site):
    """Script tags, controls, what turns the direction round: all of it is seen, none of it does anything."""
    for address in ("#/run/12", "#/run/12/g/0-50", "#/run/12/9", "#/run/search", "#/run/heldout"):
        page.goto(f"{site.url}/{address}")
        at(page, address)
        until(page, "document.body.textContent.includes('<script>')")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main script, main img, main iframe, main [onerror]").count() == 0
        assert page.evaluate(
            "!/[\\u202a-\\u202e\\u2066-\\u2069\\u0000\\u0007\\u001b]/.test(document.body.textContent + document.title)"
        )
    page.goto(f"{site.url}/#/run/12/9?colour=none")
    at(page, "#/run/12/9")
    marks = set(texts(page, ".mark"))
    assert {"RLO", "PDF", "LRI", "PDI", "BEL", "ESC", "NUL", "CR", "ZWSP", "BOM", "E0041"} <= marks


def test_no_script_of_a_text_could_run(page, site):
    """Even if the page tried to make markup or code of one: its policy refuses."""
    page.goto(f"{site.url}/#/run/12")
    at(page, "#/run/12")
    for attempt in (
        "document.body.innerHTML = '<img src=x onerror=hacked>'",
        "document.body.setAttribute('onclick', 'window.hacked = 3')",
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 4'}))",
        "setTimeout('window.hacked = 5', 0)",
    ):
        assert page.evaluate(f"() => {{ try {{ {attempt}; return false; }} catch {{ return true; }} }}"), attempt
    assert page.evaluate("window.hacked") is None and page.said
    page.said.clear()


def test_a_hundred_thousand_tokens_open_at_once(page, tmp_path):
    path = viewing.write_run(tmp_path / "run", steps=1)
    from rolljax.run.folder import RunFolder

    RunFolder(path).write_rollouts(1, [viewing.long_trajectory()])
    with viewing.Viewing(path) as site:
        page.goto(f"{site.url}/#/run/1/0")
        at(page, "#/run/1/0")
        made = page.locator(".tok").count()
        assert 0 < made < 20_000
        page.goto(f"{site.url}/#/run/1/0?token=0.99990")
        page.locator(".tok.pinned").wait_for()
        assert "99,991 of" in page.locator(".tip").text_content().replace("99991", "99,991")
        page.goto("about:blank")


def test_on_a_phone(phone, site):
    for address in (
        "#/run",
        "#/run/steps",
        "#/run/12",
        "#/run/12/g/0-50",
        "#/run/12/9",
        "#/run/heldout",
        "#/run/config",
        "#/run/search",
    ):
        phone.goto(f"{site.url}/{address}")
        at(phone, address)
        assert phone.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"), address
    phone.goto(f"{site.url}/#/run/12/9")
    at(phone, "#/run/12/9")
    phone.locator(".tok").nth(2).tap()
    box = phone.locator(".tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser, site, scheme):
    for page in watched(browser, {"color_scheme": scheme}):
        page.goto(f"{site.url}/#/run/12/9")
        at(page, "#/run/12/9")
        ink, paper = (channels(page, name) for name in ("color", "backgroundColor"))
        assert (sum(ink) > sum(paper)) == (scheme == "dark")
        page.keyboard.press("t")
        page.keyboard.press("t")
        assert sum(channels(page, "backgroundColor")) < 200


def channels(page, name):
    return [int(n) for n in re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{name}"))[:3]]


@pytest.mark.parametrize("step, line", [(12, None), (12, 9)])
def test_an_exported_page_needs_no_server(page, run_dir, tmp_path, step, line):
    from rolljax.viewer.export import page_of
    from rolljax.viewer.runs import ViewedRun

    file = tmp_path / "page.html"
    file.write_bytes(page_of(ViewedRun("run", run_dir), step, line))
    page.goto(f"file://{file}")
    if line is None:
        page.locator("li.group").first.wait_for()
        page.locator("li.group a.tile").nth(1).click()
    page.locator(".tok").first.wait_for()
    assert page.evaluate("window.hacked") is None
    page.locator(".tok").nth(2).hover()
    says(page.locator(".tip"), "log-prob")
