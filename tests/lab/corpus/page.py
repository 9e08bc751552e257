"""The page of `make accuracy`, and the bars that it is held to. Pure."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version

from tests.lab.corpus import Case, blind
from tests.lab.corpus.figures import Figures, figures
from tests.lab.corpus.runs import Result
from tests.lab.corpus.stock import BACKEND, STOCK_CAP_S, TRIES, Stock
from tests.lab.lab import TOTAL_S

JOIN_S = 10.0
HEALTHY_JOIN_S = 20.0
"""Hosts of healthy clusters may come 8 s late, and take their time to start."""
LAUNCHER_S = 6.0
AFTER_JOIN_S = 5.0
MEDIAN_S = 6.0
RIGHT = 0.95
EVERYWHERE = 0.98
"""Share of the faults of which no screen of any host says what is not so."""
WORKS = 0.95
"""Share of the printed fixes that have to work as typed."""
BY_HAND, HELPS = "by hand", "works"
PRECISION, RECALL, PLACE = 0.985, 0.993, 0.97
"""Least shares that the blind slice has to reach."""
PEER = ("98.2%", "99.3%", "95.7%")
"""The same of SkeletonHunter, in production: SIGCOMM 2025, as its authors published it."""

Row = tuple[Case, Result]


@dataclass(frozen=True)
class Bar:
    """One thing that has to hold, what was seen, and whether it does."""

    text: str
    seen: str
    met: bool


def bars(
    faults: Sequence[Row],
    unseen: Sequence[Row],
    healthy: Sequence[Row],
    fixes: Mapping[str, str] | None = None,
    stock: Mapping[str, Stock] | None = None,
) -> list[Bar]:
    """Every bar, over the runs that were made.

    Args:
        faults: of the corpus.
        unseen: those that nobody chose.
        healthy: clusters without a fault.
        fixes: id of a fault → what came of its fix.
        stock: id of a fault → what plain torchrun said.
    """
    stock = stock or {}
    typed = [said for said in (fixes or {}).values() if said != BY_HAND]
    work = [said for said in typed if said.startswith(HELPS)]
    every = [*faults, *unseen, *healthy]
    found = _added(unseen)
    right = [row for row in faults if row[1].score.is_right]
    everywhere = [row for row in faults if row[1].score.is_right_everywhere]
    tried = [(case, result, stock[case.id]) for case, result in faults if case.id in stock]
    too_hard = [case.id for case, result, said in tried if result.score.fails and said.runs]
    blamed = [case.id for case, result in every if result.score.blamed]
    over = [c.id for c, r in every if r.seconds > _deadline(c) or None in r.codes]
    loud = [case.id for case, result in healthy if not _is_healthy(result)]
    quick = [result.seconds for case, result in faults if not case.waits]
    slow = [result.seconds for case, result in faults if case.waits]
    return [
        Bar(
            f"right cause and place, of {len(faults)} faults: at least {RIGHT:.0%}",
            f"{len(right)} ({len(right) / max(1, len(faults)):.0%})",
            len(right) >= RIGHT * len(faults),
        ),
        Bar(
            f"right on every host's screen, of {len(faults)} faults: at least {EVERYWHERE:.0%}",
            f"{len(everywhere)} ({len(everywhere) / max(1, len(faults)):.0%})",
            len(everywhere) >= EVERYWHERE * len(faults),
        ),
        Bar(
            f"`fail` where plain torchrun runs the job, of {len(tried)} tried: none",
            _few(too_hard),
            not too_hard,
        ),
        *(
            Bar(
                f"{name} of the blind slice: at least {least:.1%}", str(share), share.value >= least
            )
            for name, share, least in (
                ("precision", found.precision, PRECISION),
                ("recall", found.recall, RECALL),
                ("place", found.place, PLACE),
            )
            if unseen
        ),
        Bar("healthy hosts blamed in any run: none", _few(blamed), not blamed),
        Bar(
            f"runs over their deadline of {TOTAL_S:g} s ({LAUNCHER_S:g} s more under torchrun or "
            "srun): none",
            _few(over),
            not over,
        ),
        Bar(
            f"of {len(healthy)} healthy runs, with a finding above info: none",
            _few(loud),
            not loud,
        ),
        Bar(
            f"median time to verdict without a join time-out: at most {MEDIAN_S:g} s",
            f"{statistics.median(quick):.1f} s" if quick else "not run",
            not quick or statistics.median(quick) <= MEDIAN_S,
        ),
        Bar(
            f"latest verdict after the join time-out of {JOIN_S:g} s: at most {AFTER_JOIN_S:g} s",
            f"{max(slow) - JOIN_S:.1f} s" if slow else "not run",
            not slow or max(slow) <= JOIN_S + AFTER_JOIN_S,
        ),
        *(
            [
                Bar(
                    f"printed fixes that work as typed, of {len(typed)}: at least {WORKS:.0%}",
                    f"{len(work)} ({len(work) / len(typed):.0%})",
                    len(work) >= WORKS * len(typed),
                )
            ]
            if typed
            else ()
        ),
    ]


def _deadline(case: Case) -> float:
    """Seconds until the last host has to be done: a launcher imports torch before it starts ranks,
    and stops them after.
    """
    return TOTAL_S + (0 if case.launcher in ("own", "plain") else LAUNCHER_S)


def _added(rows: Iterable[Row]) -> Figures:
    return figures((case, result.score) for case, result in rows)


def _is_healthy(result: Result) -> bool:
    return result.score.is_right and not any(result.codes) and not result.leftovers


def _few(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(sorted(set(names)))}" if names else "none"


# The page -----------------------------------------------------------------------------------------


def page(
    faults: Sequence[Row],
    stock: dict[str, Stock],
    unseen: Sequence[Row],
    healthy: Sequence[Row],
    *,
    met: Sequence[Bar],
    fixes: Mapping[str, str],
) -> str:
    """The page in Markdown."""
    day = datetime.now(timezone.utc).date().isoformat()
    out = [
        "# Accuracy",
        "",
        "Answers of nccl-doctor to injected faults, compared with plain `torchrun`.",
        "Written by `make accuracy`; do not edit. "
        f"{day}, nccl-doctor {version('nccl-doctor')}, torch {version('torch')} (gloo, CPU), "
        f"Python {platform.python_version()}.",
        "",
        "Each case runs once, on 2 to 4 hosts made of network namespaces: `nccl-doctor run` with "
        "the launcher that the case names (else its own), "
        f"`--join-timeout {JOIN_S:g}` (healthy ones {HEALTHY_JOIN_S:g}) and a "
        "shared `--output-dir`, started on every host at once. An answer is right if its "
        "findings above info that nothing explains are the injected ones, each with a right code "
        "at exactly the injected place, and nothing else. Seconds are from the "
        "start of the first host to the end of the last. If hosts could not reach each other, "
        "the answer is their partial reports, merged by `nccl-doctor report merge`. What each host "
        "prints is scored too: no screen may name a cause that the answer does not hold, or blame "
        f"a host that nothing was done to. Plain torchrun ({BACKEND}, static rendezvous, then "
        "all-reduce, all-gather, all-to-all, broadcast and barrier in two groups, send and receive "
        f"between every two ranks) is stopped after {STOCK_CAP_S:g} s; the table shows the first "
        "line on any host that reports a problem; where it runs and the answer is a failure, it is "
        f"tried up to {TRIES} times, and the first that does not run is shown. Calibration: "
        "whether the answer is a failure, "
        f"and whether that job runs all the same. The job of every record is one of {BACKEND}: it "
        "connects each pair of ranks in one direction only, so that some one-way faults, which "
        "stop NCCL, are warnings here. Faults that begin during the run are not tried. The records "
        "are in `tests/lab/corpus`. Where a fix was typed, on the hosts that it "
        f'names, it "{HELPS}" if the cluster was healthy after it, and as broken as before after '
        "its undo, where one is printed for each step.",
        "",
        "| limit | measured | |",
        "|---|---|---|",
        *(f"| {bar.text} | {bar.seen} | {'met' if bar.met else '**missed**'} |" for bar in met),
        "",
        *_three(faults, unseen, healthy),
        "",
        "## Faults",
        "",
        "| fault | hosts | cause and place | reported | s | fix | plain torchrun | s "
        "| calibration |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    out += [
        _row(case, result, stock.get(case.id), fixes.get(case.id, "")) for case, result in faults
    ]
    silent = [each for each in stock.values() if each.seconds is None]
    runs = [each for each in stock.values() if each.runs]
    if stock:
        out += [
            "",
            f"Plain torchrun was tried on {len(stock)} faults: it printed nothing within "
            f"{STOCK_CAP_S:g} s on {len(silent)}, and ran the job to its end on {len(runs)}. "
            f"{_autopsies(faults, stock)}",
        ]
    if unseen:
        out += ["", *_blind(unseen)]
    out += [
        "",
        "## Healthy clusters",
        "",
        "| cluster | runs | above info | slowest, s |",
        "|---|---|---|---|",
    ]
    for case in {case.id: case for case, _ in healthy}.values():
        mine = [result for other, result in healthy if other is case]
        bad = Counter(str(cause) for each in mine for cause in each.score.reported)
        words = ", ".join(f"{text} ({times}×)" for text, times in bad.items()) or "none"
        slowest = max(each.seconds for each in mine)
        out.append(f"| {_cell(case.title)} | {len(mine)} | {_cell(words)} | {slowest:.1f} |")
    return "\n".join(out) + "\n"


def _autopsies(faults: Sequence[Row], stock: Mapping[str, Stock]) -> str:
    """How often `nccl-doctor autopsy` knew the cause from what plain torchrun printed."""
    said = [(case, stock[case.id]) for case, _ in faults if case.id in stock]
    told = [(case, each) for case, each in said if each.code]
    right = [case for case, each in told if any(each.code in one.codes for one in case.expect)]
    sure = [each for case, each in told if case not in right and each.sure == "certain"]
    return (
        f"From what it printed, `nccl-doctor autopsy` named a cause of {len(told)}: the code of "
        f"the fault on {len(right)}, another code as certain on {len(sure)} (an effect of it that "
        "the text shows, such as a port that refuses for a host that is not there)."
    )


def _three(faults: Sequence[Row], unseen: Sequence[Row], healthy: Sequence[Row]) -> list[str]:
    """Precision, recall and place, beside those of another system."""
    rows = {
        "the corpus, and healthy clusters": _added([*faults, *healthy]),
        f"the blind slice (seed {blind.SEED})": _added(unseen),
    }
    shown = {name: (each.precision, each.recall, each.place) for name, each in rows.items()}
    return [
        "## Precision, recall, place",
        "",
        "Precision: findings above info that nothing explains and that name an injected fault, of "
        "all such findings. "
        "Recall: injected causes that are named by a right code at a place of theirs. Place: of "
        "those, the ones whose place is right, all of it and no more. With Wilson intervals of "
        "95 %. SkeletonHunter's figures are its authors' (SIGCOMM 2025): of faults in production, "
        "which injected ones cannot stand for.",
        "",
        "| | precision | recall | place |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(map(str, three))} |" for name, three in shown.items()),
        f"| SkeletonHunter | {' | '.join(PEER)} |",
    ]


def _blind(unseen: Sequence[Row]) -> list[str]:
    """The blind slice, as it came."""
    out = [
        "## Faults that nobody chose",
        "",
        f"Drawn with seed {blind.SEED} from mechanisms, hosts, directions, moments and launchers; "
        "run once, and kept as they came. What is wrong here is mended afterwards, and proven by "
        "the seed of the next release.",
        "",
        "| | fault | launcher | hosts × ranks | cause and place | reported | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, result in unseen:
        wanted = "; ".join(map(str, case.expect))
        size = f"{case.hosts} × {case.nproc}"
        cells = [case.id.rpartition("-")[2], case.title, case.launcher, size, wanted, seen(result)]
        out.append(f"| {' | '.join(map(_cell, cells))} | {result.seconds:.1f} |")
    return out


def seen(result: Result) -> str:
    """What was reported, and what is wrong with it."""
    mark = "" if result.score.is_right else "**wrong**: "
    said = [*map(str, result.score.reported)] or ["nothing"]
    return mark + "; ".join([*said, *(f"**{each}**" for each in result.score.untrue)])


def _calibrated(result: Result, stock: Stock | None) -> str:
    """Whether the answer is a failure, and whether the job runs all the same."""
    if stock is None:
        return ""
    level = "fail" if result.score.fails else "warn" if result.score.reported else "pass"
    if level != "fail" and any(result.codes):
        level = "unknown"
    if not stock.runs:
        return f"{level}, does not run"
    return f"**{level}, runs**" if level == "fail" else f"{level}, runs"


def _row(case: Case, result: Result, stock: Stock | None, fix: str) -> str:
    wanted = "; ".join(map(str, case.expect))
    words, seconds = "not tried", ""
    if stock is not None:
        words = f"{stock.words} ({stock.ended})"
        words += f"; autopsy: {stock.code} ({stock.sure})" if stock.code else ""
        seconds = "–" if stock.seconds is None else f"{stock.seconds:.0f}"
    took = f"{result.seconds:.1f}"
    cells = [case.title, str(case.hosts), wanted, seen(result), took, fix, words]
    return f"| {' | '.join(map(_cell, cells))} | {seconds} | {_calibrated(result, stock)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
