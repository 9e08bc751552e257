"""Differences between two reports, as text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nccl_doctor.judge.history.difference import Difference, FindingChange
from nccl_doctor.judge.history.figures import SHARE, Change, amount, percent
from nccl_doctor.model.findings import Where
from nccl_doctor.report.lines import MIN_WIDTH, Table, finished, lay_out, wrapped
from nccl_doctor.report.story import FindingBlock, PlaceWords, explained_by

_MARKS = {"new": "✗", "gone": "✓", "changed": "·"}
_NONE = "–"


def render(
    difference: Difference,
    places: PlaceWords,
    *,
    width: int = 100,
    verbose: bool = False,
    ascii: bool = False,
) -> str:
    """The difference as text that ends in a newline.

    Args:
        difference: what to render; nothing in it is trusted to be free of terminal escapes.
        places: how places are called, by the newer report.
        width: columns of the terminal; less than 40 is taken as 40.
        verbose: also speeds that hardly changed, and those of busy machines.
        ascii: write nothing but ASCII.
    """
    width = max(width, MIN_WIDTH)
    blocks = list(_blocks(difference, places, width, verbose=verbose))
    return finished(["\n\n".join("\n".join(block) for block in blocks)], ascii=ascii)


def _blocks(
    difference: Difference, places: PlaceWords, width: int, *, verbose: bool
) -> Iterator[list[str]]:
    def say(where: Where) -> str:
        return places.say(where) or "everywhere"

    yield [
        line
        for name, about in (("before", difference.old), ("now", difference.new))
        for line in wrapped(
            f"{about['started']}  {about['verdict'].upper()}: {about['summary']}",
            width,
            f"{name:<8}",
        )
    ]
    if difference.notes:
        yield [line for note in difference.notes for line in wrapped(note, width, "! ")]
    if difference.turns:
        turns = sorted(difference.turns, key=lambda turn: (not turn.is_worse, turn.state))
        yield ["Findings", *(line for turn in turns for line in _turn(turn, places, width))]
    if difference.hosts:
        rows = [(host, before, now) for host, before, now in difference.hosts]
        yield ["Hosts", *_table(("host", "before", "now"), rows, width)]
    if difference.words:
        changed = [(w.name, w.before, w.now, say(w.where)) for w in difference.words]
        yield ["Setup", *_table(("what", "before", "now", "where"), changed, width)]
    if difference.checks:
        yield ["Checks", *_table(("check", "before", "now"), difference.checks, width)]
    if not (difference.turns or difference.hosts or difference.words or difference.checks):
        yield ["No finding, host, version or setting has changed."]
    if difference.speeds:
        yield ["Speeds", *_speeds(difference, places, width, verbose=verbose)]


def _turn(turn: FindingChange, places: PlaceWords, width: int) -> Iterator[str]:
    finding = turn.finding
    head = FindingBlock(finding, places.say(finding.where)).head
    text = f"{turn.state}: {finding.level.value} {head}: {finding.message}"
    if turn.before is not None and turn.now is not None:
        was = places.say(turn.before.where)
        text += f"; before: {turn.before.level.value}{f' ({was})' if was else ''}"
    if finding.explained_by:
        text += f"; {explained_by([finding])}"
    yield from wrapped(text, width, f"  {_MARKS[turn.state] if _tells(turn) else '·'} ")


def _tells(turn: FindingChange) -> bool:
    return turn.state == "gone" or turn.is_worse


def _speeds(
    difference: Difference, places: PlaceWords, width: int, *, verbose: bool
) -> Iterator[str]:
    changes = difference.speeds if verbose else difference.notable
    if changes:
        head = ("what", "where", "before", "now", "change")
        yield from _table(head, [_speed(change, places) for change in changes], width)
    notes = []
    if not verbose:
        busy = sum(change.busy for change in difference.speeds)
        small = len(difference.speeds) - len(changes) - busy
        if small:
            notes.append(f"{small} changed by less than {100 * SHARE:.0f} % (-v)")
        if busy:
            notes.append(f"{busy} measured on a busy machine, so not reliable (-v)")
    notes.append("two runs cannot tell a change from noise: use --baseline DIR with five or more")
    for note in notes:
        yield from wrapped(note, width, "  · ")


def _speed(change: Change, places: PlaceWords) -> tuple[str, ...]:
    word = ""
    if change.busy:
        word = ", measured on a busy machine"
    elif abs(change.share) >= SHARE:
        word = ", worse" if change.loss > 0 else ", better"
    return (
        change.now.name,
        places.say(change.now.where) or "everywhere",
        amount(change.now, change.before),
        amount(change.now, change.value),
        percent(change.share) + word,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str | None]], width: int) -> list[str]:
    cells = tuple(tuple(_NONE if cell is None else cell for cell in row) for row in rows)
    return lay_out(Table("", (), True, tuple(head), cells), width)
