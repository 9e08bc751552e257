"""Compare the rules of nccl-doctor with real NCCL, and write docs/nccl-validation.md.

Every row of tests/lab/nccl/rows.py is asked of every version, on lab hosts with several interfaces:
which interface NCCL takes for its bootstrap, and what it reads from its configuration files. Needs
what the lab needs, a C compiler, and a package index or the wheels in the cache; no GPU. The names
and the defaults in the table of variables are compared with the code of every release since 2.27.

    python scripts/nccl_validation.py --write docs/nccl-validation.md
    python scripts/nccl_validation.py --version 2.29.7

Exit code 0 if every row is the same, 1 if not, 2 if there is no lab or no wheel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.hosts import trouble
from tests.lab.lab import Lab
from tests.lab.nccl.binary import Tabled
from tests.lab.nccl.binary import compare as compare_table
from tests.lab.nccl.rows import HOSTS, ROWS
from tests.lab.nccl.trials import Result, build, compare
from tests.lab.nccl.wheels import TABLED, VERSIONS, library
from tests.support.wheels import NoWheel

_HEAD = (
    "# Validation with NCCL",
    "`make test-nccl` writes this page. nccl-doctor knows the rules by which NCCL chooses its "
    "interface and reads its variables, release by release (`nccl_doctor/toolkit/nccl`). Here they "
    "are compared with NCCL itself: the library in a wheel of NVIDIA's of each version is asked by "
    "`ncclGetUniqueId`, in a child, as check [interfaces](checks/interfaces.md) asks the one that "
    "torch has loaded. That needs no GPU and no driver.",
    "The hosts are network namespaces with these interfaces, beside `lo` and `eth0`:",
)
_LEGEND = (
    "In the rows, `etc` is /etc/nccl.conf, `home` is .nccl.conf in the folder that HOME names, "
    "`owner` is the one in the home folder of the user database, `named` is the file `@named`, and "
    "nothing may be written into `@log`. `HOME=-`: not set. `@plugin` is a plug-in for variables, "
    "which says that NCCL_SOCKET_IFNAME is `=eth10`; the rules do not know that, so there the "
    "answer of NCCL has to count. NCCL *refuses*: ncclGetUniqueId fails, and so would the job.",
    "Not compared: which interfaces NCCL takes for data, beyond the first. NCCL says that only "
    "when it forms a group, which needs a GPU.",
    "## Result",
)
_TABLE = (
    "## Names and defaults",
    "Each variable that the code of a release asks for, and the default that it gives for a "
    "number, against `nccl_doctor/toolkit/variables/nccl.toml`; and each name in the table against "
    "the texts in the library. Since 2.30.3, NCCL lists some with their defaults itself: they are "
    "compared, too. A default that the table has as `auto` is decided later, and not compared.",
)

Results = Mapping[str, Sequence[Result]]
"""Version → results, in the order of `ROWS`."""


def page(results: Results, tabled: Mapping[str, Tabled], day: str) -> str:
    """The whole page, as Markdown."""
    count = sum(map(len, results.values()))
    wrong = [(v, each) for v, found in results.items() for each in found if each.differences]
    lines = [
        "\n\n".join([*_HEAD, _hosts(), *_LEGEND]),
        "",
        f"{day}: {count - len(wrong)} of {count} answers are those of the rules.",
        "",
        "| NCCL | rows | the same |",
        "|---|---|---|",
    ]
    for version, found in results.items():
        same = sum(not each.differences for each in found)
        lines.append(f"| {version} | {len(found)} | {same} |")
    lines += ["", "## Differences", ""]
    if wrong:
        lines += ["| NCCL | host | row | NCCL | difference |", "|---|---|---|---|---|"]
        lines += [
            f"| {v} | {each.row.host} | {_cell(each.row.text)} | {each.said} | "
            f"{_cell('; '.join(each.differences))} |"
            for v, each in wrong
        ]
    else:
        lines.append("None.")
    lines += ["", *_names_and_defaults(tabled)]
    lines += ["", "## Rows", "", "| host | set | NCCL takes |", "|---|---|---|"]
    lines += [
        f"| {row.host} | {_cell(row.text)} | {_answers({v: results[v][i].said for v in results})} |"
        for i, row in enumerate(ROWS)
    ]
    return "\n".join([*lines, ""])


def _names_and_defaults(tabled: Mapping[str, Tabled]) -> list[str]:
    lines = [
        "\n\n".join(_TABLE),
        "",
        "| NCCL | names | defaults | different |",
        "|---|---|---|---|",
    ]
    for version, each in tabled.items():
        lines.append(f"| {version} | {each.names} | {each.defaults} | {len(each.differences)} |")
    wrong = [f"- {v}: {said}" for v, each in tabled.items() for said in each.differences]
    return [*lines, "", *wrong] if wrong else lines


def _answers(said: Mapping[str, str]) -> str:
    """Text such as `lo 127.0.0.1 (2.29.7); eth0 192.168.77.1`: without a version, of all others."""
    answers = list(said.values())
    usual = max(answers, key=answers.count)
    odd = [
        f"{answer} ({', '.join(version for version in said if said[version] == answer)})"
        for answer in dict.fromkeys(answers)
        if answer != usual
    ]
    return "; ".join([*odd, usual])


def _hosts() -> str:
    lines = []
    for name, steps in HOSTS.items():
        said = [
            " ".join(words[1:]) + (" (without carrier)" if f"cut {words[1]}" in steps else "")
            for words in map(str.split, steps.strip().split("\n"))
            if words and words[0] in ("nic", "add", "label")
        ]
        bare = "eth0 has no address" if "flush eth0" in steps else ""
        lines.append(f"- {name}: {'; '.join(filter(None, [bare, *said]))}")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Ask, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="append", help="of NCCL; by default all of them")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page to write")
    args = parser.parse_args()
    reason = trouble()
    if reason:
        sys.stderr.write(f"nccl_validation: {reason}\n")
        return 2
    try:
        libraries = {version: library(version) for version in args.version or VERSIONS}
        tables = {version: library(version) for version in args.version or TABLED}
    except NoWheel as error:
        sys.stderr.write(f"nccl_validation: {error}\n")
        return 2
    results = {}
    with Lab([f"nd{number}" for number in range(len(HOSTS))]) as lab:
        hosts = build(lab)
        for version, path in libraries.items():
            found = results[version] = compare(lab, hosts, path, ROWS)
            wrong = [each for each in found if each.differences]
            sys.stdout.write(f"NCCL {version}: {len(found)} rows, {len(wrong)} different\n")
            for each in wrong:
                text = f"  {each.row.host}: {each.row.text}: NCCL: {each.said}"
                sys.stdout.write(f"{text}; {'; '.join(each.differences)}\n")
    tabled = {version: compare_table(version, path) for version, path in tables.items()}
    for version, each in tabled.items():
        said = [f"NCCL {version}: {each.names} names, {each.defaults} defaults", *each.differences]
        sys.stdout.write("\n  ".join(said) + "\n")
    if args.write is not None:
        day = datetime.now(timezone.utc).date().isoformat()
        args.write.write_text(page(results, tabled, day), encoding="utf-8")
    wrong_rows = any(each.differences for found in results.values() for each in found)
    return int(wrong_rows or any(each.differences for each in tabled.values()))


if __name__ == "__main__":
    sys.exit(main())
