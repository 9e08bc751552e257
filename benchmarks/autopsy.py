"""Does an autopsy name the rank that failed first? Real jobs that die, drawn by seed.

Each job is 2 to 16 gloo ranks of torch; a fault strikes one of them. What its launcher prints is
judged, and beside it the rank that the "Root Cause" block of torchrun names in the same text, and
those that the answer of denpex names, if its program is given (from the package index, in an
environment of its own). Writes a table into a page, below its heading "Measured".

    python benchmarks/autopsy.py --seed 7 --jobs 200 --denpex v/bin/denpex --write docs/autopsy.md

Exit code 0 where every bar is met, else 1.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nccl_doctor.autopsy.examine import examine
from tests.support.deaths import CODES, Death, consoles_of, drawn

HEADING = "## Measured"
BLOCK, DENPEX = "torchrun's block", "denpex"
_BLOCK = re.compile(r"Root Cause \(first observed failure\):.*?rank      : (\d+)", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What was said of one job: ranks, code and confidence.

    `peers`: ranks that other programs name in the same text.
    """

    death: Death
    ranks: Sequence[int]
    code: str
    confidence: str
    peers: Mapping[str, Sequence[int]]

    @property
    def place(self) -> str:
        """`right`, `not told` or `wrong`."""
        if [*self.ranks] == self.death.culprits:
            return "right"
        return "wrong" if self.ranks else "not told"

    def is_right(self) -> bool:
        """True if the rank is right."""
        return self.place == "right"

    def has_cause(self) -> bool:
        """True if the code is right for the fault."""
        return self.code in CODES[self.death.fault]


def answer(death: Death, denpex: Path | None) -> Answer:
    """Run a job, and judge what is left of it."""
    with tempfile.TemporaryDirectory() as folder:
        left = consoles_of(death, Path(folder))
        report = examine([str(each) for each in left], io.BytesIO(), started="")
        text = "".join(each.read_text(errors="replace") for each in left if each.is_file())
        block = _BLOCK.search(text)
        peers = {BLOCK: [int(block[1])]} if block else {}
        if denpex:
            peers[DENPEX] = named_by_denpex(denpex, text, Path(folder))
    cause = report.root_causes[0] if report.root_causes else None
    return Answer(
        death,
        () if cause is None else cause.where.ranks,
        "nothing" if cause is None else cause.code,
        "" if cause is None else cause.confidence.value,
        peers,
    )


def named_by_denpex(program: Path, text: str, folder: Path) -> list[int]:
    """Ranks in the sentence with which denpex answers."""
    file = folder / "all.log"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [program, "diagnose-local", file], capture_output=True, text=True, timeout=60, check=False
    )
    cause = re.search("^ROOT CAUSE: (.*)$", done.stdout, re.MULTILINE)
    return sorted({int(rank) for rank in re.findall(r"\brank (\d+)", cause[1])}) if cause else []


def share(answers: Sequence[Answer], is_right: Callable[[Answer], bool]) -> float:
    """Part of the answers that are right, 0 to 1; 1 of none."""
    return sum(map(is_right, answers)) / len(answers) if answers else 1.0


def is_fair(each: Answer) -> bool:
    """True if no innocent is named as certain."""
    return each.place != "wrong" or each.confidence != "certain"


def bars(answers: Sequence[Answer]) -> list[tuple[str, float, float]]:
    """Each bar: its words, its value, and the least that it has to be."""
    told = [each for each in answers if each.death.is_told and each.death.launcher != "one-node"]
    one = [each for each in answers if each.death.launcher == "one-node"]
    return [
        ("rank, where the text tells it", share(told, Answer.is_right), 0.95),
        ("cause, where the text tells it", share(told, Answer.has_cause), 0.90),
        ("rank, of all", share(answers, Answer.is_right), 0.85),
        ("rank, from one host's text", share(one, Answer.is_right), 0.60),
        ("no innocent named as certain", share(answers, is_fair), 1.0),
    ]


def page(answers: Sequence[Answer], seed: int) -> str:
    """The part of the page below its heading."""
    peers = sorted({name for each in answers for name in each.peers}, reverse=True)
    lines = [
        HEADING,
        "",
        f"`python benchmarks/autopsy.py --seed {seed} --jobs {len(answers)}`: jobs of 2 to 16 gloo "
        "ranks that die in a way, on a rank and under a launcher that a seed draws; torch "
        f"{_torch()}.",
        "",
        "| bar | value | at least |",
        "|---|---|---|",
        *(f"| {words} | {value:.1%} | {least:.0%} |" for words, value, least in bars(answers)),
        "",
        "Other programs: of the texts in which they name a rank, those where it is the right one.",
        "",
        f"| fault | jobs | rank right | not told | wrong | cause right | {' | '.join(peers)} |",
        f"|{'---|' * (6 + len(peers))}",
    ]
    for fault in sorted({each.death.fault for each in answers}):
        mine = [each for each in answers if each.death.fault == fault]
        places = Counter(each.place for each in mine)
        cells = [
            *(fault, len(mine), *(places[name] for name in ("right", "not told", "wrong"))),
            sum(map(Answer.has_cause, mine)),
            *(of_peer(name, mine) for name in peers),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def of_peer(name: str, answers: Sequence[Answer]) -> str:
    """How often another program is right where it names a rank, as `2 of 3`."""
    named = [each for each in answers if each.peers.get(name)]
    right = sum([*each.peers[name]] == each.death.culprits for each in named)
    return f"{right} of {len(named)}"


def _torch() -> str:
    from importlib.metadata import version

    return version("torch")


def main() -> int:
    """Run the jobs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run side by side")
    parser.add_argument("--denpex", type=Path, metavar="PROGRAM", help="its program, to compare")
    parser.add_argument("--write", type=Path, help="page whose part below the heading is replaced")
    parser.add_argument("--records", type=Path, help="write each answer into this file as a line")
    given = parser.parse_args()
    deaths = [*drawn(given.seed, given.jobs)]
    with ThreadPoolExecutor(given.at_once) as pool:
        answers = []
        for each in pool.map(answer, deaths, repeat(given.denpex)):
            answers.append(each)
            if not (each.is_right() and each.has_cause()):
                print(f"{each.place}: {each.death}: {each.code} {each.ranks} {each.confidence}")
            if given.records:
                with open(given.records, "a", encoding="utf-8") as file:
                    said = [str(each.death), each.place, each.code, [*each.ranks], each.confidence]
                    file.write(json.dumps([*said, each.peers]) + "\n")
    text = page(answers, given.seed)
    print(text)
    if given.write:
        before = given.write.read_text(encoding="utf-8").partition(HEADING)[0].rstrip("\n")
        given.write.write_text(f"{before}\n\n{text}", encoding="utf-8")
    return 0 if all(value >= least for _, value, least in bars(answers)) else 1


if __name__ == "__main__":
    sys.exit(main())
