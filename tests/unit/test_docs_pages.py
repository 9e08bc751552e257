"""docs/: what is written from the program is as the program is, and every link leads somewhere."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from nccl_doctor import registry
from nccl_doctor.api import Check, Confidence, Layer, Level, Severity
from nccl_doctor.cli import cli
from nccl_doctor.model.findings import Status
from nccl_doctor.report.manual import check_page, code_and_check_pages, shown
from tests.cli.program import program
from tests.unit.test_readme import doctor, options

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
AT_THE_ROOT = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
"""Pages of the site that do not lie in docs/."""
BY_HAND = [
    ROOT / "README.md",
    *AT_THE_ROOT,
    *sorted(path for path in DOCS.glob("*.md")),
    *sorted(DOCS.glob("examples/**/*.md")),
]
RULE = "-" * 72
"""What `explain --all` prints between a page and the next one."""
QUOTE = re.compile(r"^<!-- quote: (\S+) -->\n\n```python\n(.*?)^```", re.M | re.DOTALL)
"""Code that a page shows from a file of ours."""
ACCURACY = (DOCS / "accuracy.md").read_text("utf-8")
PICTURES = (ROOT / "scripts" / "screenshots.py").read_text("utf-8")
WRITTEN = [*sorted(DOCS.glob("checks/*.md")), *sorted(DOCS.glob("codes/*.md"))]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(docs: ModuleType) -> dict[str, str]:
    pages: dict[str, str] = docs.pages()
    return pages


def prose(text: str) -> str:
    """Markdown without its code blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "", text)


@functools.cache
def anchors(path: Path) -> set[str]:
    """What a fragment may name: the headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
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


def test_the_pages_are_as_the_program_is(docs: ModuleType, made: dict[str, str]) -> None:
    made = {**made, **docs.filled(DOCS)}
    for path in docs.stale(DOCS, made):
        there = (DOCS / path).read_text("utf-8") if (DOCS / path).is_file() else None
        assert there == made.get(path), f"docs/{path} is not as the program is: run `make docs`"


def test_a_page_that_is_old_missing_or_too_many_is_seen(
    docs: ModuleType, made: dict[str, str], tmp_path: Path
) -> None:
    assert len(docs.write(tmp_path, made)) == len(made)
    assert docs.stale(tmp_path, made) == []
    assert docs.main(["--docs", str(tmp_path), "--check"]) == 0
    (tmp_path / "codes" / "host-absent.md").unlink()
    (tmp_path / "checks" / "ranks.md").write_text("old")
    (tmp_path / "codes" / "never-was.md").write_text("gone")
    wrong = ["checks/ranks.md", "codes/host-absent.md", "codes/never-was.md"]
    assert docs.stale(tmp_path, made) == wrong
    assert docs.main(["--docs", str(tmp_path), "--check"]) == 1
    assert docs.main(["--docs", str(tmp_path)]) == 0
    assert docs.stale(tmp_path, made) == []


SCREEN = re.compile(
    r"((?:.*\n){2})^```\n(?:\$ .*\n)?nccl-doctor: (?:PASS|WARN|FAIL|UNKNOWN)\b", re.M
)
ELSEWHERE = {"docs/deepspeed.md", "docs/kubernetes.md"}
"""Their screens are compared by tests of their own: test_docs_launchers, test_docs_kubernetes."""


def test_every_screen_comes_from_a_recording_and_every_recording_is_shown() -> None:
    shown = set(re.findall(r'"samples" / "([\w-]+)', PICTURES))
    for path in BY_HAND:
        text = path.read_text("utf-8")
        shown |= set(re.findall(r"^<!-- sample (\S+): nccl-doctor ", text, re.MULTILINE))
        for before in SCREEN.findall(text):
            assert "\n<!-- sample " in before or str(path.relative_to(ROOT)) in ELSEWHERE, path
    assert shown == {path.name.partition(".")[0] for path in (DOCS / "samples").iterdir()}


def test_a_sample_that_is_old_is_seen_and_what_stands_above_it_stays(docs: ModuleType) -> None:
    mark = "<!-- sample no-time: nccl-doctor report judge report.json -->\n```\n$ typed\n"
    page = docs.fill(f"{mark}old\n```\nmore\n")
    assert page.startswith(f"{mark}nccl-doctor: UNKNOWN: ")
    assert page.endswith("\n```\nmore\n")
    assert docs.fill(page) == page
    with pytest.raises(SystemExit, match=r"no docs/samples/never-was\.\*"):
        docs.fill(page.replace("no-time", "never-was"))


def test_the_organisation_is_one_variable(
    docs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "ORGANISATION", "some-org")
    for name in ("tasks", "ci"):
        text = docs.fill(text_of(name))
        assert "some-org/nccl-doctor" in text
        assert "YOUR-ORGANISATION" not in text


def test_plain_torchrun_does_not_survive_what_the_readme_shows() -> None:
    """The corpus says so of the fault that was recorded: each host still waits after a minute."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "<!-- sample one-way: " in readme
    (row,) = re.findall(r"^\| node 0's firewall lets in MASTER_PORT only \|.*$", ACCURACY, re.M)
    assert "| nothing (nd0, nd1 still waiting) |" in row


def test_no_page_is_lost_because_a_check_is_broken(
    docs: ModuleType, made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs.write(tmp_path, made)
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


def test_a_page_holds_what_explain_prints() -> None:
    found = registry.load()
    for check in found.checks:
        if found.origins[check.name] == "nccl-doctor":
            page = (DOCS / "checks" / f"{check.name}.md").read_text("utf-8")
            assert page.startswith(check_page(check) + "\n\n")
    for name, folder in (("peer-one-way", "codes"), ("rank-silent", "codes"), ("ranks", "checks")):
        printed = program("explain", "--all", name).stdout.partition(f"\n\n{RULE}\n")[0].strip()
        assert printed
        assert (DOCS / folder / f"{name}.md").read_text("utf-8").startswith(f"{printed}\n\n")


def test_a_code_of_several_checks_has_all_their_pages() -> None:
    found = registry.load()
    code, owners = next((code, names) for code, names in found.owners.items() if len(names) > 1)
    page = code_and_check_pages(found, code)
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


def test_a_written_page_is_good_markdown() -> None:
    """Docstrings are written as plain text: nothing in them may vanish or turn into something."""
    wrong = []
    for path in WRITTEN:
        text, name = path.read_text("utf-8"), f"{path.parent.name}/{path.stem}"
        if text.count("`") % 2:
            wrong.append(f"{name}: a backtick without its other one")
        words = prose(re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)).replace("<!--", "")
        for tag in re.findall(r"<[A-Za-z/!][^>]*>", words):
            wrong.append(f"{name}: put it into backticks: {tag}")
        for before, line in itertools.pairwise(text.splitlines()):
            begins = re.match(r"\s*([-*+]|\d+[.)]) ", line)
            if begins and before and not re.match(r"\s*([-*+]|\d+[.)]) |  ", before):
                wrong.append(f"{name}: a list needs an empty line before it: {line}")
    assert not wrong, "\n".join(wrong)


# --- all of them ---


def leads_nowhere(page: Path, file: str, fragment: str) -> bool:
    target = (page.parent / file).resolve() if file else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return True
    return bool(fragment) and fragment not in anchors(target)


def test_every_relative_link_leads_somewhere() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {file}#{fragment}"
        for path in [*BY_HAND, *WRITTEN]
        for file, fragment in links(path)
        if leads_nowhere(path, file, fragment)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_page_stands_in_the_navigation_and_on_the_start_page() -> None:
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))

    def named(nav: Any) -> Iterator[str]:
        if isinstance(nav, str):
            yield nav
        for inner in (
            nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
        ):
            yield from named(inner)

    own = {str(path.relative_to(DOCS)) for path in [*BY_HAND, *WRITTEN] if DOCS in path.parents}
    pages = {page for page in own if not re.match(r"(checks|codes)/(?!README)", page)}
    assert sorted(named(site["nav"])) == sorted([*pages, *(path.name for path in AT_THE_ROOT)])
    assert (ROOT / site["docs_dir"]) == DOCS
    start = {file for file, _ in links(DOCS / "README.md")}
    assert pages - start == {"README.md"}
    assert {f"../{path.name}" for path in AT_THE_ROOT} <= start
    assert "docs/README.md" in {file for file, _ in links(ROOT / "README.md")}


# --- what is written by hand speaks of the program as it is ---

HANDS = [
    *("README", "start", "reports", "launchers", "verdicts", "writing-a-check"),
    *("tasks", "what-changed", "what-it-finds", "other-tools"),
]
hands = pytest.mark.parametrize("name", HANDS)


def text_of(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


@hands
def test_every_command_on_a_page_exists(name: str) -> None:
    for words in doctor(QUOTE.sub("", text_of(name))):
        command: click.Command = cli
        rest = [word for word in words if word not in ("…", "...")]
        while isinstance(command, click.Group) and rest and re.fullmatch(r"[a-z]+", rest[0]):
            command = command.commands[rest.pop(0)]
        own = rest[: rest.index("--")] if "--" in rest else rest
        given = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert given <= options(command, hidden=False), words
        for option in ("--select", "--ignore"):
            if option in own:
                registry.load(own[own.index(option) + 1].split(","))


@hands
def test_every_option_and_code_on_a_page_exists(name: str) -> None:
    text, found = text_of(name), registry.load()
    told = {span.split()[0] for span in re.findall(r"`(--[a-z][a-z-]+[^`]*)`", text)}
    known = options(cli.commands["run"], hidden=False) | {"--help"}
    assert told <= known
    codes = set(re.findall(r"^[✗!] .* \[([a-z-]+)\]$", text, re.MULTILINE))
    codes |= set(re.findall(r"(?:explained|blocked) by ([a-z]+-[a-z-]+)", text))
    codes |= set(re.findall(r"\(`([a-z]+-[a-z-]+)`\)", text))
    assert codes <= set(found.kinds)


@pytest.mark.parametrize("name", ["start", "reports"])
def test_every_check_in_a_sample_exists(name: str) -> None:
    blocks = re.findall(r"^```\n(.*?)^```", text_of(name), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {check.name for check in registry.load().checks}
    for block in blocks:
        for entry in re.findall(r"^  [?·] ([a-z_, \n]+): ", block, re.MULTILINE):
            told = {word for word in re.split(r"[,\s]+", entry) if word}
            assert told <= names


def test_the_levels_and_exit_codes_are_told() -> None:
    text = text_of("start")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [level.value for level in Level]
    assert re.findall(r"^\| (\d) \|", text, re.MULTILINE) == ["0", "1", "2", "3"]


def test_statuses_verdicts_severities_and_layers_are_told() -> None:
    report, verdicts = text_of("reports"), text_of("verdicts")
    rows = re.findall(r"^\| (\w+) \| [✓!✗?·] \|", report, re.MULTILINE)
    assert rows == [status.value for status in Status]
    for severity in Severity:
        assert f"\n| {severity.value} | " in verdicts
    assert " → ".join(layer.value for layer in Layer) in verdicts
    for confidence in Confidence:
        assert confidence.value in report


def test_every_attribute_of_a_check_is_told() -> None:
    section = text_of("writing-a-check").partition("**The class** says:")[2].partition("\n\n**")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", section, re.MULTILINE))
    assert set(told) == set(Check.__annotations__)
    for name, default in told.items():
        if not hasattr(Check, name):
            assert default == "must be given"
            continue
        value = getattr(Check, name)
        shown_as = str(value) if isinstance(value, Enum) else repr(value).replace("'", '"')
        assert default == shown_as


def test_code_in_the_pages_is_quoted_from_the_source() -> None:
    """Whatever a page quotes stands in the file that it names: copy it anew where it changed."""
    text = text_of("writing-a-check")
    assert len(QUOTE.findall(text)) == len(re.findall(r"^```python$", text, re.MULTILINE)) == 2
    for path, code in QUOTE.findall(text):
        assert code in (ROOT / path).read_text("utf-8"), f"docs/writing-a-check.md: {path}"
    assert QUOTE.findall(text)[0][1] == (ROOT / "checks" / "torch_import.py").read_text("utf-8")


@pytest.mark.parametrize("room", ["toolkit", "system"])
def test_every_part_of_the_toolkit_is_named_for_authors_of_checks(room: str) -> None:
    section = text_of("writing-a-check").partition("## What it may import")[2].partition("\n## ")[0]
    rows = re.findall(rf"^\| (`nccl_doctor\.{room}.*?) \|", section, re.MULTILINE)
    named = {word.rpartition(".")[2] for row in rows for word in re.findall(r"`([\w.]+)`", row)}
    folder = ROOT / "nccl_doctor" / room
    there = {path.stem for path in folder.glob("[!_]*.py")}
    assert named == there | {path.parent.name for path in folder.glob("*/__init__.py")}
