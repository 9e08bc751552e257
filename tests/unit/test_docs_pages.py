"""docs/: what is written from the program is as the program is, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nccl_doctor import registry
from nccl_doctor.manual import check_page, code_page, shown
from tests.cli.program import program

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BY_HAND = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in DOCS.glob("*.md")),
    *sorted(DOCS.glob("examples/**/*.md")),
]
WRITTEN = [*sorted(DOCS.glob("checks/*.md")), *sorted(DOCS.glob("codes/*.md"))]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(text: str) -> str:
    """Markdown without its code blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "", text)


def anchors(text: str) -> set[str]:
    """What a fragment may name: the headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    heads += re.findall(r"^(\S.*)\n(?:===+|---+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def links(path: Path) -> Iterator[tuple[str, str]]:
    """The file, seen from this one, and the fragment, of every relative link."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            file, _, fragment = target.partition("#")
            yield file, fragment


# --- what is written from the program ---


def test_the_pages_are_as_the_program_is(docs: ModuleType) -> None:
    assert docs.stale(DOCS) == [], "docs/ is not as the program is: run `make docs`"


def test_a_page_that_is_old_missing_or_too_many_is_seen(docs: ModuleType, tmp_path: Path) -> None:
    assert len(docs.write(tmp_path)) == len(docs.pages())
    assert docs.stale(tmp_path) == []
    assert docs.main(["--docs", str(tmp_path), "--check"]) == 0
    (tmp_path / "codes" / "host-absent.md").unlink()
    (tmp_path / "checks" / "ranks.md").write_text("old")
    (tmp_path / "codes" / "never-was.md").write_text("gone")
    wrong = ["checks/ranks.md", "codes/host-absent.md", "codes/never-was.md"]
    assert docs.stale(tmp_path) == wrong
    assert docs.main(["--docs", str(tmp_path), "--check"]) == 1
    assert docs.write(tmp_path) == wrong
    assert docs.stale(tmp_path) == []


def test_no_page_is_lost_because_a_check_is_broken(
    docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs.write(tmp_path)
    monkeypatch.setitem(sys.modules, "nccl_doctor.checks.ranks", None)  # its import fails
    with pytest.raises(SystemExit, match=r"nccl_doctor\.checks\.ranks"):
        docs.main(["--docs", str(tmp_path)])
    assert (tmp_path / "checks" / "ranks.md").is_file()


def test_every_check_and_code_has_its_page() -> None:
    found = registry.load()
    own = [name for name, origin in found.origins.items() if origin == "nccl-doctor"]
    assert {path.stem for path in DOCS.glob("checks/*.md")} == {*own, "README"}
    codes = {code for code in found.kinds if set(found.owners.get(code, own)) & set(own)}
    assert {path.stem for path in DOCS.glob("codes/*.md")} == {*codes, "README"}


def test_a_page_begins_with_what_explain_prints() -> None:
    found = registry.load()
    for check in found.checks:
        if found.origins[check.name] == "nccl-doctor":
            page = (DOCS / "checks" / f"{check.name}.md").read_text("utf-8")
            assert page.startswith(check_page(check) + "\n\n")
    for name, folder in (("peer-one-way", "codes"), ("rank-silent", "codes"), ("ranks", "checks")):
        printed = program("explain", name).stdout
        assert printed
        assert (DOCS / folder / f"{name}.md").read_text("utf-8").startswith(printed + "\n")


def test_a_code_of_several_checks_has_all_their_pages() -> None:
    found = registry.load()
    code, owners = next((code, names) for code, names in found.owners.items() if len(names) > 1)
    page = code_page(found, code)
    for check in found.checks:
        assert (check_page(check) in page) == (check.name in owners)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("ip route get <address>; add it", "ip route get `<address>`; add it"),
        ("export A==<device>:<port>,… or not", "export `A==<device>:<port>,…` or not"),
        ("mtu <the same everywhere>", "mtu `<the same everywhere>`"),
        ("(`ip <nic>`) and <nic>.", "(`ip <nic>`) and `<nic>`."),
        ("a < b and c > d, x <- y", "a < b and c > d, x <- y"),
    ],
)
def test_placeholders_are_code(text: str, seen: str) -> None:
    assert shown(text) == seen
    assert shown(seen) == seen


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_written_page_is_good_markdown(path: Path) -> None:
    """Docstrings are written as plain text: nothing in them may vanish or turn into something."""
    text = path.read_text("utf-8")
    assert text.count("`") % 2 == 0
    words = prose(re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)).replace("<!--", "")
    assert not re.findall(r"<[A-Za-z/!][^>]*>", words), "put it into backticks"
    lines = text.splitlines()
    for before, line in itertools.pairwise(lines):
        begins = re.match(r"\s*([-*+]|\d+[.)]) ", line)
        inside = re.match(r"\s*([-*+]|\d+[.)]) |  ", before)
        assert not begins or not before or inside, f"a list needs an empty line before it: {line}"


# --- all of them ---


@pytest.mark.parametrize("path", [*BY_HAND, *WRITTEN], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    for file, fragment in links(path):
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{file} is not there"
        assert target.is_relative_to(ROOT)
        assert not fragment or fragment in anchors(target.read_text("utf-8")), f"#{fragment}"
