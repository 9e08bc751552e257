"""The HTML report in a real browser: drawn, harmless, and usable on a phone and without script.

One start of the browser for all of it: a frame around several copies of the page measures them.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.registry import installed
from nccl_doctor.report.formats.html import render
from tests.browser.chromium import OPTIONS, TIME_LIMIT_S, browser, environment
from tests.support.pages import broken, hostile

pytestmark = pytest.mark.browser

PHONE = 390

FRAMES = f"""<!doctype html><meta charset="utf-8"><title>frames</title>
<iframe id="desktop" src="broken.html" width="1200" height="900"></iframe>
<iframe id="phone" src="broken.html" width="{PHONE}" height="844"></iframe>
<iframe id="plain" src="broken.html" width="{PHONE}" height="844" sandbox="allow-same-origin">
</iframe>
<iframe id="hostile" src="hostile.html" width="{PHONE}" height="844"></iframe>
<pre id="result"></pre>
<script>
const colour = (cell) => cell.ownerDocument.defaultView.getComputedStyle(cell).backgroundColor;
const look = (name) => {{
  const frame = document.getElementById(name);
  const page = frame.contentDocument, root = page.documentElement;
  const cells = [...page.querySelectorAll("td[data-from]")];
  const visible = (each) => each.getBoundingClientRect().width > 0;
  return {{
    width: root.scrollWidth,
    links: cells.filter(visible).map((cell) => [cell.dataset.from, cell.dataset.to]),
    outlined: cells
      .filter((cell) => frame.contentWindow.getComputedStyle(cell).outlineStyle === "solid")
      .map((cell) => [cell.dataset.from, cell.dataset.to]),
    good: colour(page.querySelector("td.r0") || root),
    bad: colour(page.querySelector("td.r4") || root),
    paper: colour(page.body),
    font: parseFloat(frame.contentWindow.getComputedStyle(page.body).fontSize),
    cause: visible(page.querySelector("#causes .fix")),
    causeTop: page.querySelector("#causes").getBoundingClientRect().top,
    images: page.images.length,
    scripts: page.scripts.length,
    search: page.getElementById("filter").offsetWidth > 0,
    bars: [...page.querySelectorAll("details[open] rect")].filter(visible).length,
    pwned: "pwned" in frame.contentWindow,
  }};
}};
window.onload = () => {{
  const found = {{}};
  for (const name of ["desktop", "phone", "plain", "hostile"]) found[name] = look(name);
  const page = document.getElementById("desktop").contentDocument;
  const slow = page.querySelector('td[data-from="nd0"][data-to="nd3"]');
  found.before = colour(slow);
  page.querySelector(".pick-b + label").click();
  found.after = colour(slow);
  slow.click();
  found.told = page.querySelector(".chosen").innerText;
  const filter = page.getElementById("filter");
  filter.value = "all_reduce()";
  filter.dispatchEvent(new Event("input"));
  found.left = [...page.querySelectorAll("#facts > details")]
    .filter((each) => !each.hidden)
    .map((each) => each.querySelector("summary").textContent);
  const fold = document.getElementById("plain").contentDocument.querySelector("#facts > details");
  found.closed = fold.open;
  fold.querySelector("summary").click();
  found.opened = fold.open;
  document.getElementById("result").textContent = JSON.stringify(found);
}};
</script>
"""


@dataclass
class Seen:
    found: dict[str, Any]
    console: list[str]
    picture: bytes


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    command = browser()
    folder: Path = tmp_path_factory.mktemp("browser")
    (folder / "broken.html").write_text(render(broken(), installed), "utf-8")
    (folder / "hostile.html").write_text(render(hostile(), installed), "utf-8")
    (folder / "frames.html").write_text(FRAMES, "utf-8")
    picture = folder / "picture.png"
    done = subprocess.run(
        [
            *command,
            *OPTIONS,
            f"--user-data-dir={folder / 'profile'}",
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            "--window-size=1280,2800",
            "--virtual-time-budget=5000",
            f"--screenshot={picture}",
            "--dump-dom",
            (folder / "frames.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
        env=environment(folder),
    )
    result = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, re.DOTALL)
    assert result, done
    return Seen(
        json.loads(html.unescape(result[1])),
        [line for line in done.stderr.splitlines() if "CONSOLE" in line],
        picture.read_bytes(),
    )


def test_it_is_drawn(seen):
    assert seen.picture.startswith(b"\x89PNG")
    assert len(seen.picture) > 20_000  # an empty picture of this size has some 10 kB
    desktop = seen.found["desktop"]
    links = {tuple(pair) for pair in desktop["links"]}
    assert links == set(permutations(("nd0", "nd1", "nd2", "nd3"), 2))
    assert len(desktop["links"]) == 12
    assert {tuple(pair) for pair in desktop["outlined"]} == {
        ("nd1", "nd2"),
        ("nd0", "nd3"),
        ("nd3", "nd0"),
    }
    assert len({desktop["good"], desktop["bad"], desktop["paper"]}) == 3
    assert desktop["bars"] > 8
    assert desktop["cause"]


def test_no_word_on_the_console(seen):
    # But that the frame without script has none, which is meant.
    others = [line for line in seen.console if "is sandboxed" not in line]
    assert not others


def test_it_reacts(seen):
    assert seen.found["before"] != seen.found["after"]
    assert seen.found["told"].startswith("nd0 → nd3: ")
    assert len(seen.found["left"]) == 1
    assert "collectives" in seen.found["left"][0]


@pytest.mark.parametrize("frame", ["phone", "plain", "hostile"])
def test_it_fits_a_phone(seen, frame):
    assert seen.found[frame]["width"] <= PHONE
    assert seen.found[frame]["font"] >= 16
    assert seen.found[frame]["cause"]
    assert seen.found[frame]["causeTop"] < 844


def test_what_is_essential_needs_no_script(seen):
    phone, plain = seen.found["phone"], seen.found["plain"]
    for name in ("links", "outlined", "good", "bad", "cause", "bars"):
        assert plain[name] == phone[name]
    assert phone["search"]
    assert not plain["search"]
    assert (seen.found["closed"], seen.found["opened"]) == (False, True)


def test_hostile_values_run_nothing(seen):
    found = seen.found["hostile"]
    assert not found["pwned"]
    assert found["images"] == 0
    assert found["scripts"] == 1
