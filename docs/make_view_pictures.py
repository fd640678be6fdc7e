"""The pictures of docs/runs.md: `python docs/make_view_pictures.py runs/quickstart runs/frozen_lake`, with Chromium.

The first run has curves that climb, the second one episodes of several turns. Needs playwright and a chromium on the
path, or in $CHROMIUM.
"""

import os
import shutil
import sys
import threading
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from rolljax.serve import listen, url
from rolljax.viewer import answers
from rolljax.viewer.app import make_server
from rolljax.viewer.filters import Filter
from rolljax.viewer.runs import Runs, ViewedRun

DOCS = Path(__file__).parent
SIZE = {"width": 1180, "height": 740}


def mixed_step(run: ViewedRun, share: float) -> int:
    """Return the step with rollouts whose reward is nearest to a fraction of the highest."""
    rows = [r for r in run.rows(0)[1] if r["phase"] == "rl"]
    most = max(r["reward/mean"] for r in rows)
    return int(min(rows, key=lambda r: abs(r["reward/mean"] - share * most))["step"])


def solved_in_turns(run: ViewedRun, step: int) -> int:
    """Return the line of a trajectory that solved its task in as many turns as possible up to five, in a group with
    failures."""
    groups = answers.step(run, step, Filter())["groups"]
    found = [t for g in groups if g["spread"] > 0 for t in g["trajectories"] if t["success"]]
    return int(max(found, key=lambda t: t["turns"] if t["turns"] <= 5 else 0)["line"])


def picture(browser: Browser, address: str, name: str, *, dark: bool, hover: str = "") -> None:
    context = browser.new_context(viewport=SIZE, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#page[data-shown]")
    page.wait_for_timeout(500)
    if hover:
        page.locator(hover).first.hover()
        page.wait_for_timeout(200)
    page.screenshot(path=str(DOCS / name))
    context.close()


def main() -> None:
    climbs, turns = (Path(p) for p in sys.argv[1:3])
    runs = Runs([climbs, turns])
    first, second = runs.all()
    listener = listen("127.0.0.1", 0)
    server = make_server(runs, None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    several = mixed_step(second, 0.5)
    try:
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            picture(browser, f"{url(listener)}/#/{first.name}?smooth=0.8", "view_run.png", dark=False)
            line = solved_in_turns(second, several)
            address = f"{url(listener)}/#/{second.name}/{several}/{line}?colour=logp"
            picture(browser, address, "view_trajectory.png", dark=True, hover=".said-box .tok[class*=' q']")
            browser.close()
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
