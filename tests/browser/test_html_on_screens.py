"""The HTML report by night, on narrow phones and without script, as Chromium emulates them."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nccl_doctor.api import Finding, Where
from nccl_doctor.registry import installed
from nccl_doctor.report.formats.html import render
from nccl_doctor.report.html.findings import fix_of
from tests.browser.chromium import Chromium, Tab
from tests.support.clusters import make_cluster
from tests.support.pages import PORT, broken, healthy, hostile, report_of

pytestmark = pytest.mark.browser

# Contrast as WCAG 2 defines it, of every text with what is painted behind it.
CONTRAST = """(() => {
  const canvas = (text) => {
    const found = text.match(/[\\d.]+/g).map(Number);
    return {rgb: found.slice(0, 3), alpha: found.length > 3 ? found[3] : 1};
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const paint = canvas(getComputedStyle(at).backgroundColor);
      if (paint.alpha === 1) return paint.rgb;
      if (paint.alpha !== 0) throw new Error("half transparent: " + at.className);
    }
    return canvas(getComputedStyle(document.documentElement).backgroundColor).rgb;
  };
  const seen = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const each = texts.currentNode.parentElement;
    const words = texts.currentNode.textContent.trim();
    if (!words || ["SCRIPT", "STYLE", "TITLE", "title"].includes(each.tagName)) continue;
    const box = each.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const [a, b] = [light(canvas(getComputedStyle(each).color).rgb), light(behind(each))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen.push([Math.round(ratio * 100) / 100, each.tagName + "." + each.className, words]);
  }
  return seen.sort((one, other) => one[0] - other[0]);
})()"""
PRESS = """(() => {
  const part = [...document.querySelectorAll("#causes .typed")]
    .find((each) => each.querySelector(".on").firstChild.textContent === "HOSTS");
  part.querySelector("button.copy").click();
  return document.getSelection().toString();
})()"""
OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
LIGHT = """(() => {
  const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
})()"""
COLOURS = """(() => {
  const paint = (name) => {
    const found = document.querySelector(name);
    return found && getComputedStyle(found).backgroundColor;
  };
  const frame = getComputedStyle(document.querySelector("td.blamed"));
  return {
    good: paint("td.r0"), bad: paint("td.r4"), self: paint("td.self"), paper: paint("body"),
    frame: frame.outlineStyle + " " + frame.outlineWidth,
  };
})()"""
ESSENTIAL = """(() => {
  const seen = (each) => each.getBoundingClientRect().width > 0;
  const all = (names) => [...document.querySelectorAll(names)].filter(seen);
  return {
    badge: document.querySelector(".badge").innerText,
    causes: all("#causes article").map((each) => each.innerText),
    cells: all("td[data-from]").map((each) => [
      each.dataset.from, each.dataset.to, each.innerText,
      getComputedStyle(each).backgroundColor, getComputedStyle(each).outlineStyle,
    ]),
    listed: all("#links table:not(.heat) tbody tr").map((each) => each.innerText),
    lanes: all("#timeline details[open] .row").map((each) => each.innerText),
    remarks: all("#timeline details[open] .remark").map((each) => each.innerText),
    groups: all("#groups details[open] tbody tr").map((each) => each.innerText),
    folds: all("summary").map((each) => each.innerText),
  };
})()"""


# Numbers that stand on more than one line: their parts have different tops.
BROKEN_NUMBERS = """(() => {
  const broken = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    for (const each of text.textContent.matchAll(/(?<![\\w.-])\\d[\\d.,]*(?![\\w-])/g)) {
      range.setStart(text, each.index);
      range.setEnd(text, each.index + each[0].length);
      const shown = [...range.getClientRects()].filter((box) => box.width > 0);
      if (new Set(shown.map((box) => Math.round(box.top))).size > 1) broken.push(each[0]);
    }
  }
  return broken;
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pages")
    hosts = tuple(f"gpu-node-{i:03}.rack7.cluster.example" for i in range(64))
    link = Finding(PORT, "no answer", Where(links=((hosts[3], hosts[60]),)))
    made = {
        "broken": broken(),
        "healthy": replace(healthy(), verdict="pass", exit_code=0),
        "hostile": hostile(),
        "many": report_of(make_cluster(hosts, 1), link),
    }
    for name, report in made.items():
        (folder / f"{name}.html").write_text(render(report, installed), "utf-8")
    return folder


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def tab(chromium: Chromium) -> Tab:
    return chromium.tab()


def test_what_is_copied_is_what_is_typed(tab: Tab, tmp_path: Path) -> None:
    steps = "# on nd1\nip link set lo up\nip addr\n# on every host\nexport A='=eth0'"
    link = Finding(PORT, "no answer", Where(links=(("nd0", "nd1"),)), fix="words")
    whole = render(report_of(make_cluster(("nd0", "nd1")), link), installed)
    page = tmp_path / "page.html"
    page.write_text(whole.replace(fix_of("words"), fix_of(steps)), "utf-8")
    tab.open(page)
    for hosts, commands in (("on nd1", "ip link set lo up\nip addr"), ("on every host", "export")):
        assert tab.run(PRESS.replace("HOSTS", hosts)).startswith(commands)


@pytest.mark.parametrize(("width", "marks"), [(390, True), (1200, False)])
def test_a_failing_cell_is_a_mark_on_a_phone_and_words_elsewhere(
    tab: Tab, pages: Path, width: int, marks: bool
) -> None:
    tab.is_phone(width, 844)
    tab.open(pages / "broken.html")
    text = tab.run("document.querySelector('td[data-from=nd1][data-to=nd2]').innerText")
    assert "✗" in text
    assert (text.strip() == "✗") == marks


def brightness(png: str) -> float:
    """Mean of all bytes of a picture, 0 to 255: each line is undone from how PNG predicts it."""
    data, at, packed, width, depth = base64.b64decode(png), 8, b"", 0, 3
    while at < len(data):
        size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        if name == b"IHDR":
            width, depth = int.from_bytes(body[:4], "big"), {2: 3, 6: 4}[body[9]]
        elif name == b"IDAT":
            packed += body
        at += size + 12
    raw, step = zlib.decompress(packed), width * depth
    before, total, count = bytearray(step), 0, 0
    for start in range(0, len(raw), step + 1):
        kind, line = raw[start], bytearray(raw[start + 1 : start + 1 + step])
        for i in range(step):
            left = line[i - depth] if i >= depth else 0
            corner = before[i - depth] if i >= depth else 0
            line[i] = (line[i] + _predicted(kind, left, before[i], corner)) & 255
        before, total, count = line, total + sum(line), count + step
    return total / count


def _predicted(kind: int, left: int, up: int, corner: int) -> int:
    if kind == 4:
        near = left + up - corner
        return min((left, up, corner), key=lambda each: abs(near - each))
    return (0, left, up, (left + up) // 2)[kind]


@pytest.mark.parametrize("name", ["broken", "healthy", "hostile", "many"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_that_is_written_can_be_read(tab: Tab, pages: Path, name: str, scheme: str) -> None:
    tab.prefers(scheme)
    tab.open(pages / f"{name}.html")
    light = tab.run(LIGHT)
    assert light > 0.9 if scheme == "light" else light < 0.1
    if name != "many":
        tab.run(OPEN_ALL)
    seen = tab.run(CONTRAST)
    assert len(seen) > 20
    assert [each for each in seen if each[0] < 4.5] == []


def test_the_heat_map_has_its_colours_by_night_too(tab: Tab, pages: Path) -> None:
    found = {}
    for scheme in ("light", "dark"):
        tab.prefers(scheme)
        tab.open(pages / "broken.html")
        found[scheme] = tab.run(COLOURS)
        assert found[scheme]["frame"] == "solid 2px"
        colours = [found[scheme][name] for name in ("good", "bad", "paper")]
        assert len(set(colours)) == 3
    for name in ("good", "bad", "paper"):
        assert found["light"][name] != found["dark"][name]


def test_the_picture_is_dark_by_night(tab: Tab, pages: Path) -> None:
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=200, height=150, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    tab.open(pages / "broken.html")
    tab.prefers("light")
    day = brightness(tab.picture())
    tab.prefers("dark")
    night = brightness(tab.picture())
    assert day > 200, "white paper"
    assert night < 110, "opaque all over, so a quarter of the bytes may be 255"


@pytest.mark.parametrize("width", [320, 390])
@pytest.mark.parametrize("name", ["broken", "hostile", "many"])
def test_a_phone_need_not_scroll_sideways(tab: Tab, pages: Path, name: str, width: int) -> None:
    tab.is_phone(width, 640)
    tab.open(pages / f"{name}.html")
    assert tab.run("innerWidth") == width, "as wide as the screen, not a desktop made small"
    if name != "many":
        tab.run(OPEN_ALL)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    assert tab.run("document.querySelector('#causes').getBoundingClientRect().top") < 640


def test_what_is_essential_is_there_without_script(
    tab: Tab, chromium: Chromium, pages: Path
) -> None:
    tab.has_no_script()
    tab.open(pages / "broken.html")
    without = tab.run(ESSENTIAL)
    assert tab.run("document.querySelector('.script').hidden") is True, "no script has run"
    other = chromium.tab()
    other.open(pages / "broken.html")
    assert other.run("document.querySelector('.script').hidden") is False
    assert without == other.run(ESSENTIAL)
    assert without["badge"] == "✗ FAIL"
    assert len(without["cells"]) == 12
    assert {"none", "solid"} == {cell[-1] for cell in without["cells"]}
    for name in ("causes", "listed", "lanes", "groups", "folds"):
        assert without[name], name


def test_the_views_of_the_map_change_without_script(tab: Tab, pages: Path) -> None:
    tab.has_no_script()
    tab.open(pages / "broken.html")
    colours = """[...document.querySelectorAll("td[data-from]")]
        .map((each) => getComputedStyle(each).backgroundColor)"""
    seen = []
    for letter in "rlb":
        tab.run(f"document.querySelector('.pick-{letter} + label').click()")
        seen.append(tuple(tab.run(colours)))
    assert len(set(seen)) > 1
    bandwidth = tab.run("document.querySelector('td[data-to=\"nd3\"]').innerText")
    assert "bit/s" in bandwidth


@pytest.mark.parametrize("name", ["broken", "healthy", "hostile", "many"])
def test_it_asks_nobody_for_anything_and_complains_of_nothing(
    tab: Tab, pages: Path, name: str
) -> None:
    tab.open(pages / f"{name}.html")
    tab.run(OPEN_ALL)
    others = [url for url in tab.requests() if not url.startswith("data:,")]
    assert others == [(pages / f"{name}.html").as_uri()]
    assert tab.words() == []
    assert tab.run("'pwned' in window") is False


@pytest.mark.parametrize("name", ["broken", "healthy"])
def test_no_line_ends_inside_a_number_on_a_phone(tab: Tab, pages: Path, name: str) -> None:
    tab.is_phone(360, 740)
    tab.open(pages / f"{name}.html")
    assert tab.run(BROKEN_NUMBERS) == []
    tab.run(OPEN_ALL)
    assert tab.run(BROKEN_NUMBERS) == []


def test_a_pass_is_printed_on_two_pages_at_most(tab: Tab, pages: Path) -> None:
    tab.open(pages / "healthy.html")
    printed = base64.b64decode(tab.call("Page.printToPDF")["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 2
