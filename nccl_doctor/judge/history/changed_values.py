"""Words that changed: versions, variables, interfaces, GPUs; and in a few words, where. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nccl_doctor.judge.history.sheet import Key, Sheet, hosts_of
from nccl_doctor.model.findings import Where


@dataclass(frozen=True)
class Word:
    """A word that is not what it was, at all the places where it changed alike; None: not there.

    `runs` is how many earlier runs of how many had what was there before.
    """

    check: str
    name: str
    before: str | None
    now: str | None
    where: Where
    runs: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        return f"{self.name} {self.before or 'absent'} → {self.now or 'absent'}"


def changed_words(now: Sheet, past: Sequence[Sheet]) -> list[Word]:
    """Every word that differs from what most earlier runs had (of a tie the newest), `past` being
    newest first. What a check did not observe on a host is not compared there.
    """
    found: dict[tuple[str, str, str | None, str | None], Word] = {}
    keys = dict.fromkeys([*now.words, *(key for sheet in past for key in sheet.words)])
    for key in keys:
        if not _was_seen(now, key):
            continue
        earlier = [_value(sheet, key) for sheet in past if _was_seen(sheet, key)]
        if not earlier:
            continue
        # most_common keeps the order in which it met them: the newest first.
        usual, times = Counter(earlier).most_common(1)[0]
        value = _value(now, key)
        if value == usual:
            continue
        where = now.words[key].where if key in now.words else key[2]
        same = (key[0], key[1], usual, value)
        if same in found:
            where = found[same].where | where
        found[same] = Word(*same, where, (times, len(earlier)))
    return sorted(found.values(), key=lambda word: (word.check, word.name, str(word.before)))


def together(words: Sequence[Word]) -> list[tuple[Where, list[Word]]]:
    """Words that changed at the same hosts: they have one new image, or one new setting."""
    groups: dict[frozenset[str], list[Word]] = {}
    for word in words:
        groups.setdefault(frozenset(hosts_of(word.where)), []).append(word)
    return [(_all(group), group) for group in groups.values()]


def _all(group: Sequence[Word]) -> Where:
    where = group[0].where
    for word in group[1:]:
        where = where | word.where
    return replace(where, ranks=()) if where.hosts else where


def _value(sheet: Sheet, key: Key) -> str | None:
    figure = sheet.words.get(key)
    return None if figure is None or figure.value is None else str(figure.value)


def _was_seen(sheet: Sheet, key: Key) -> bool:
    """True if the check observed this place, so that a missing word means absence."""
    if key in sheet.words:
        return True
    if key[0] in sheet.broken:
        return False
    there = hosts_of(key[2])
    return bool(there) and there <= sheet.seen.get(key[0], frozenset())
