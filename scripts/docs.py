"""Write the pages of docs/ that are made from the program: checks, finding codes, the command line;
and in the pages written by hand what is printed, shown or named there.

What `nccl-doctor explain` prints is what stands in the former. Pages of checks and codes that are
gone are removed. In the latter (README.md too) a code block below a comment is filled:
`<!-- sample one-way: nccl-doctor report judge report.json -->` with what the command prints of
docs/samples/one-way.json.gz, after lines that begin with `$ `; `<!-- docs/examples/FILE -->` with
the file. ORGANISATION is written wherever the repository is named. With --check nothing is written:
exit 1 where a page is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import click  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from nccl_doctor import registry  # noqa: E402
from nccl_doctor.cli import cli  # noqa: E402
from nccl_doctor.cli.help import PROGRAM  # noqa: E402
from nccl_doctor.model.check import Check  # noqa: E402
from nccl_doctor.model.findings import Layer  # noqa: E402
from nccl_doctor.registry import Registry, question  # noqa: E402
from nccl_doctor.report.manual import check_page, code_page  # noqa: E402

FOLDERS = ("checks", "codes")
"""Of docs/: they hold nothing but written pages."""
COMMAND_LINE = "cli.md"
MARK = "<!-- Written by `make docs`; do not edit. -->"
WIDTH = 78
"""What click prints into in a terminal of 80 columns."""
ORGANISATION = "YOUR-ORGANISATION"
"""Owner of the repository at github.com."""
SAMPLES = ROOT / "docs" / "samples"
SCREEN = {"COLUMNS": "100", "NO_COLOR": "1", "GITHUB_ACTIONS": None}
_REPOSITORY = re.compile(
    r"(?<=github\.com/)[\w-]+(?=/nccl-doctor)|(?<=repository: )[\w-]+(?=/nccl)"
)
_SAMPLE = re.compile(
    r"^(<!-- sample (\S+): (nccl-doctor .+) -->\n+```\n(?:\$ .*\n)*)(?s:.*?)(?=^```$)", re.M
)
_EXAMPLE = re.compile(r"^(<!-- (docs/examples/\S+) -->\n```\w+\n)(?s:.*?)(?=^```$)", re.M)


def pages() -> dict[str, str]:
    """Path under docs/ → text, of every page that is made from the program as it is here.

    Raises:
        SystemExit: a built-in check cannot be loaded, so its pages would be lost.
    """
    found = registry.load()
    for problem in found.problems:
        if problem.evidence["distribution"] == "nccl-doctor":
            raise SystemExit(f"docs: {problem.message}")
    checks = [check for check in found.checks if found.origins[check.name] == "nccl-doctor"]
    own = {check.name for check in checks}
    codes = [
        code
        for code in sorted(found.kinds)
        if not found.owners.get(code) or set(found.owners[code]) & own
    ]
    out = {"checks/README.md": _checks(checks), "codes/README.md": _codes(found, codes)}
    for check in checks:
        links = [f"[{kind.code}](../codes/{kind.code}.md)" for kind in check.kinds]
        foot = f"Codes: {', '.join(links)} · [all checks](README.md)"
        out[f"checks/{check.name}.md"] = _page(check_page(check), foot)
    for code in codes:
        links = [f"[{name}](../checks/{name}.md)" for name in found.owners.get(code, ())]
        foot = f"Check: {', '.join(links)} · " if links else ""
        out[f"codes/{code}.md"] = _page(code_page(found, code), f"{foot}[all codes](README.md)")
    out[COMMAND_LINE] = _command_line()
    return out


def stale(docs: Path, made: Mapping[str, str]) -> list[str]:
    """Pages under `docs` that are not as they were made, or should not be there: their paths."""
    there = {
        str(path.relative_to(docs)) for folder in FOLDERS for path in (docs / folder).glob("*")
    }
    wrong = [path for path, text in made.items() if _read(docs / path) != text]
    return sorted({*wrong, *(there - set(made))})


def write(docs: Path, made: Mapping[str, str]) -> list[str]:
    """Write what is not as it was made, remove what should not be there: their paths."""
    changed = stale(docs, made)
    for path in changed:
        if path in made:
            (docs / path).parent.mkdir(parents=True, exist_ok=True)
            (docs / path).write_text(made[path], encoding="utf-8")
        else:
            (docs / path).unlink()
    return changed


def filled(docs: Path) -> dict[str, str]:
    """Path, seen from `docs`, → text as it should be, of every page that is written by hand."""
    pages = [*docs.glob("*.md"), docs.parent / "README.md"]
    return {
        os.path.relpath(page, docs): fill(page.read_text(encoding="utf-8"))
        for page in pages
        if page.is_file() and page.name != COMMAND_LINE
    }


def fill(text: str) -> str:
    """A page with its samples, its files and its repository as they are now."""
    text = _REPOSITORY.sub(ORGANISATION, text)
    text = _EXAMPLE.sub(lambda found: found[1] + (ROOT / found[2]).read_text("utf-8"), text)
    return _SAMPLE.sub(lambda found: found[1] + printed(found[2], found[3]), text)


def printed(sample: str, line: str) -> str:
    """What a command prints of a recording, which it names last.

    Raises:
        SystemExit: there is no such recording, or the command breaks.
    """
    recorded = sorted(SAMPLES.glob(f"{sample}.*"))
    if not recorded:
        raise SystemExit(f"docs: no docs/samples/{sample}.*: record it by scripts/samples.py")
    _, *words = shlex.split(line)
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(recorded[0], Path(place, words[-1]))
        os.chdir(place)
        try:
            done = CliRunner().invoke(cli, words, env=SCREEN)
        finally:
            os.chdir(here)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise SystemExit(f"docs: {line}, of docs/samples/{sample}: {done.exception!r}")
    return done.stdout


def _page(text: str, foot: str) -> str:
    return f"{text}\n\n{foot}\n\n{MARK}\n"


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _checks(checks: Sequence[Check]) -> str:
    lines = [
        f"The {len(checks)} built-in checks by layer, lowest first: a broken layer explains those "
        "above it. `nccl-doctor explain NAME` prints the same pages, `nccl-doctor checks` a table "
        "with plug-ins too. Those of the level `standard` do not run with `--level quick`, "
        "those of the level `full` only with `--level full`.",
    ]
    for layer in Layer:
        rows = [
            f"| [{check.name}]({check.name}.md) | {question(check)} | {check.level.value} |"
            for check in checks
            if check.layer is layer
        ]
        lines += _table(layer, ("check", "question", "level"), rows)
    return _page("\n".join(["# Checks", "", *lines]), "[All finding codes](../codes/README.md)")


def _codes(found: Registry, codes: Iterable[str]) -> str:
    kinds = [found.kinds[code][0] for code in codes]
    lines = [
        f"All {len(kinds)} finding codes by layer, lowest first. `nccl-doctor explain CODE` prints "
        "the same pages. The severity is the usual one: `fail` means that the job would not start, "
        "would hang or would compute wrongly, `warn` that it would run, but slower or at risk, "
        "`info` is worth knowing. A code never changes its meaning.",
    ]
    for layer in Layer:
        rows = [
            f"| [{kind.code}]({kind.code}.md) | {kind.title} | {kind.severity.value} |"
            for kind in kinds
            if kind.layer is layer
        ]
        lines += _table(layer, ("code", "fault", "severity"), rows)
    return _page("\n".join(["# Finding codes", "", *lines]), "[All checks](../checks/README.md)")


def _table(layer: Layer, head: tuple[str, ...], rows: Sequence[str]) -> Iterator[str]:
    if rows:
        yield from (
            "",
            f"## {layer.value}",
            "",
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
        )
        yield from rows


def _command_line() -> str:
    lines = ["# Command line", "", "What `--help` prints, command by command."]
    for path, text in helps():
        lines += ["", f"## {' '.join(path)}", "", "```", text, "```"]
    return "\n".join([*lines, "", MARK, ""])


def helps() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command, as the words that one types, and its --help in a terminal of 80 columns."""
    yield from _helps(cli, None, PROGRAM)


def _helps(
    command: click.Command, parent: click.Context | None, name: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    settings = {"terminal_width": WIDTH, **command.context_settings}
    with click.Context(command, parent=parent, info_name=name, **settings) as ctx:
        yield tuple(ctx.command_path.split()), command.get_help(ctx)
        if isinstance(command, click.Group):
            for inner in sorted(command.commands):
                yield from _helps(command.commands[inner], ctx, inner)


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or look whether they are as they should be."""
    parser = argparse.ArgumentParser(prog="docs.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the pages are")
    given = parser.parse_args(arguments)
    made = {**pages(), **filled(given.docs)}
    changed = (stale if given.check else write)(given.docs, made)
    for path in changed:
        sys.stdout.write(
            f"{'stale' if given.check else 'wrote'} {os.path.normpath(f'docs/{path}')}\n"
        )
    if given.check and changed:
        sys.stderr.write("docs: not as the program is: run `make docs`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
