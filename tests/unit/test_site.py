"""The site: MkDocs builds it without a warning, and its first page is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_doctor import __version__
from scripts import mkdocs_hook as site
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("site")  # one process builds it

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIRST = (DOCS / "README.md").read_text("utf-8")
SECTIONS = (
    *("Home", "Get started", "Guides", "Integrations", "Findings", "Checks", "How it works"),
    "Contribute",
)
ASKS = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)")
"""What a browser fetches without a click, from elsewhere."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def test_every_page_is_there_and_asks_nobody_else_for_anything(built: Path) -> None:
    pages = [path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")]
    for page in [*pages, *(Path(name).with_suffix("") for name in site.FROM_THE_ROOT)]:
        folder = page.parent if page.name == "README" else page
        text = (built / folder / "index.html").read_text("utf-8")
        assert not ASKS.findall(text), page


def test_the_sections_stand_in_their_order(built: Path) -> None:
    text = (built / "index.html").read_text("utf-8")
    tabs = text.partition('class="md-tabs__list"')[2].partition("</nav>")[0]
    assert tuple(re.findall(r">\s*([^<>]+?)\s*</a>", tabs)) == SECTIONS


@each_row(
    ("uri", "text", "seen"),
    [
        ("start.md", "[a](install.md#x)", "[a](install.md#x)"),
        ("checks/port.md", "[a](../start.md)", "[a](../start.md)"),
        ("start.md", "[a](../SECURITY.md#listeners)", "[a](SECURITY.md#listeners)"),
        ("checks/port.md", "[a](../../SECURITY.md)", "[a](../SECURITY.md)"),
        ("start.md", "![a](pictures/healthy.svg)", "![a](pictures/healthy.svg)"),
        (
            "start.md",
            "[a](examples/nccl-doctor-hello)",
            "[a](examples/nccl-doctor-hello/README.md)",
        ),
        ("start.md", "[a](../tests/lab)", "a"),
        ("start.md", "[a](examples/kubernetes)", "a"),
        ("start.md", "[a](no-such.md) [b](https://x.example) [c](#here)", None),
    ],
)
def test_a_link_is_right_in_the_site_too(uri: str, text: str, seen: str | None) -> None:
    """None: it stays, and MkDocs says what it leads to."""
    folder = (DOCS / uri).parent
    assert site.with_links(text, folder, uri, "") == (seen or text)


def test_other_files_are_links_to_the_repository_if_there_is_one() -> None:
    text = site.with_links("[a](../Makefile)", DOCS, "start.md", "https://git.example/o/r/")
    assert text == "[a](https://git.example/o/r/blob/HEAD/Makefile)"


def test_the_site_reads_lists_and_tables_as_github_does() -> None:
    """What nests on the one and not on the other is written in a way that both understand."""
    github = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False})
    markdown = pytest.importorskip("markdown")
    for path in (*sorted(DOCS.glob("*.md")), *(ROOT / name for name in site.FROM_THE_ROOT)):
        text = path.read_text("utf-8")
        here = markdown.markdown(
            site.as_in_the_site(text, path.parent, path.name, ""),
            extensions=["sane_lists", "tables", "fenced_code", "toc"],
        )
        there = github.render(text)
        for tag in ("li", "ul", "ol", "pre", "td", "em", "strong"):
            counts = [len(re.findall(rf"<{tag}[ >]", html)) for html in (there, here)]
            assert counts[0] == counts[1], f"{path.name}: <{tag}> on GitHub, in the site: {counts}"


def test_the_first_page_says_which_version_it_is_of_and_where_that_runs() -> None:
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", FIRST, re.MULTILINE))
    assert rows["version"].startswith(f"{__version__} ")
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    assert f"Python {python} or newer" in rows["runs on"]
    assert ("Beta" in project) == ("beta" in rows["version"])


def test_the_first_page_claims_no_more_hardware_than_is_on_record() -> None:
    """Once a run on a GPU is on record, say on the first page what it has shown."""
    runs = (DOCS / "gpu-validation.md").read_text("utf-8").partition("\n## Runs\n")[2]
    nothing = runs.strip().startswith("None yet.")
    assert nothing == ("**not validated on hardware** | everything about GPUs" in FIRST)


def test_the_pictures_are_small_and_whole() -> None:
    shown = re.findall(r"\]\((pictures/[\w.]+)\)", FIRST)
    assert sorted(shown) == sorted(str(p.relative_to(DOCS)) for p in DOCS.glob("pictures/*"))
    for name in shown:
        assert (DOCS / name).stat().st_size < 100_000, name
    for path in DOCS.glob("pictures/*.svg"):
        svg = path.read_text("utf-8")
        assert "http" not in svg.replace('"http://www.w3.org/2000/svg"', "")
        words = re.sub(r"<[^>]+>", "", svg).replace("&#160;", " ")
        assert f"nccl-doctor: {'PASS' if path.stem == 'healthy' else 'FAIL'}: " in words
