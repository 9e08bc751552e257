"""Fixes as data: what to type, on which hosts, and how to take it back.

A fix is text, for whoever wants one line, and knows the steps that it is made of. A command comes
from facts of other hosts: `shell` quotes whatever is not this program's own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.codec import Node, decode
from nccl_doctor.model.commands import UNKNOWN, Command, shell, unknown_in
from nccl_doctor.model.findings import Finding, Where

_UNKNOWN = re.compile(rf"\b(?:{'|'.join(UNKNOWN)})\b")
_QUOTED_OR_UNKNOWN = re.compile(rf"""('[^']*'|"[^"]*"|\b(?:{"|".join(UNKNOWN)})\b)""")
_NOTHING = Command()


class On(str, Enum):
    """Hosts on which a step is typed: those of the finding, every one, every one but those."""

    HERE = "here"
    EVERY = "every host"
    OTHERS = "the other hosts"


@dataclass(frozen=True)
class Step:
    """One command of a fix.

    A text is no command: a `TypeError` says how to make one of it.

    Attributes:
        command: one line that bash and zsh take as it is, made by `shell`. Where a value is not
            known, it is named in capitals (ADDRESS, NIC), and the line begins with `# `, so that
            no shell runs it.
        on: which hosts, or their names.
        undo: the command that takes it back; empty if there is none, or it needs none.
        note: a few words for the line above the command.
        persists: whether it lasts when the host starts again.
        shows: whether it changes nothing: it shows what a person has to know to go on.
    """

    command: Command
    on: On | tuple[str, ...] = On.HERE
    undo: Command = _NOTHING
    note: str = ""
    persists: bool = False
    shows: bool = False

    def __post_init__(self) -> None:
        for line in (self.command, self.undo):
            if not isinstance(line, Command):
                raise TypeError(f"a step takes a command, not the text {line!r}: use shell(...)")


class Fix(str):
    """A fix that can be typed: its text on one line, its steps, and other ways to the same end.

    Without `text`, the line is made of the steps. What is made of a fix by adding text is only
    text.
    """

    steps: tuple[Step, ...]
    alternatives: tuple[Fix, ...]

    def __new__(cls, *steps: Step, text: str = "", alternatives: Iterable[str] = ()) -> Fix:
        """See the class; an alternative may be words only."""
        others = tuple(each for way in alternatives for each in _ways(way))
        self = super().__new__(cls, text or _in_words(steps, others))
        self.steps, self.alternatives = steps, others
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Fix):
            mine = (str(self), self.steps, self.alternatives)
            return mine == (str(other), other.steps, other.alternatives)
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _ways(way: str) -> tuple[Fix, ...]:
    """One way of a fix, with the ways inside of it beside it."""
    if not isinstance(way, Fix):
        return (Fix(text=way),)
    if not way.alternatives:
        return (way,)
    own = str(way) != _in_words(way.steps, way.alternatives)
    return (Fix(*way.steps, text=str(way) if own else ""), *way.alternatives)


def ways_of(fix: Fix) -> tuple[Fix, ...]:
    """The first way of a fix, and its alternatives, each as a fix without others."""
    return (_ways(fix)[0], *fix.alternatives)


def join_ways(ways: Sequence[Fix]) -> Fix:
    """The fix of these ways, the first one before the others; inverse of `ways_of`."""
    first, *others = ways
    own = not first.steps or str(first) != _in_words(first.steps, ())
    return Fix(*first.steps, text=str(first) if own else "", alternatives=others)


def _made(steps: tuple[Step, ...], text: str, alternatives: tuple[Fix, ...]) -> Fix:
    return Fix(*steps, text=text, alternatives=alternatives)


def _in_words(steps: Iterable[Step], alternatives: Iterable[Fix]) -> str:
    parts = []
    for step in steps:
        where = step.on.value if isinstance(step.on, On) else ", ".join(step.on)
        head = "" if step.on is On.HERE else f"on {where}: "
        parts.append(head + step.command + (f" ({step.note})" if step.note else ""))
    parts += [f"or {each}" for each in alternatives]
    return "; ".join(parts)


def export(**variables: str) -> Step:
    """The step that sets variables in the shell that starts the job, on every host."""
    given = [shell("{:variable}={}", name, value) for name, value in variables.items()]
    undo = shell("unset {:variable}", list(variables))
    return Step(shell("export {}", given), On.EVERY, undo=undo)


def look(command: Command, note: str = "", *, on: On | tuple[str, ...] = On.HERE) -> Step:
    """The step that only shows something; `note`: what, and what a person does then.

    A comment where a word of `UNKNOWN` is left in it.
    """
    shown = Command(f"# {command}") if unknown_in(command) else command
    return Step(shown, on, note=note, shows=True)


def fill(fix: str, *, on: On | tuple[str, ...] | None = None, **values: str | Sequence[str]) -> str:
    """A fix with values for words of `UNKNOWN`, and typed on other hosts if `on` is given.

    A comment in which no such word is left becomes a command, if it is a whole one.
    """
    text = _put(fix, values)
    if not isinstance(fix, Fix):
        return text
    if str(fix) == _in_words(fix.steps, fix.alternatives):
        text = ""

    def step(old: Step) -> Step:
        command, is_whole = _put_words(old.command, values)
        is_part = command.startswith("# -")  # options, which no shell takes alone
        if is_whole and command != old.command and not is_part:
            command = Command(command.removeprefix("# "))
        where = old.on if on is None else on
        undo, note = _put_words(old.undo, values)[0], _put(old.note, values)
        return replace(old, command=command, on=where, undo=undo, note=note)

    others = [fill(other, on=on, **values) for other in fix.alternatives]
    return Fix(*map(step, fix.steps), text=text, alternatives=others)


def fill_each(fix: str, places: Iterable[tuple[str, Mapping[str, str]]]) -> str:
    """The steps of a fix once for each place: a host, and the values there."""
    filled = [fill(fix, on=(host,), **values) for host, values in places]
    steps = [step for each in filled if isinstance(each, Fix) for step in each.steps]
    others = fix.alternatives if isinstance(fix, Fix) else ()
    return Fix(*steps, alternatives=others) if steps else fix


def _put(text: str, values: Mapping[str, str | Sequence[str]]) -> str:
    def said(found: re.Match[str]) -> str:
        value = values.get(found[0], found[0])
        return value if isinstance(value, str) else " ".join(value)

    return _UNKNOWN.sub(said, text)


def _put_words(line: str, values: Mapping[str, str | Sequence[str]]) -> tuple[Command, bool]:
    """A command with values, and whether all are known and no program takes one for an option;
    with an option, it is a comment. What stands in quotes is a value already.
    """
    left = {name: shell("{}", value) for name, value in values.items() if name in line}
    parts = _QUOTED_OR_UNKNOWN.split(line)
    fits = not any(left[part].startswith("# ") for part in parts if part in left)
    said = "".join(left[part].removeprefix("# ") if part in left else part for part in parts)
    is_whole = fits and all(part in left or part not in UNKNOWN for part in parts)
    return Command(said if fits or said.startswith("# ") else f"# {said}"), is_whole


class StepHosts:
    """Hosts of a cluster by their labels, as steps need them."""

    def __init__(self, cluster: Cluster) -> None:
        self.every = tuple(dict.fromkeys(host.label for host in cluster.hosts))
        self._of_rank: dict[int, list[str]] = defaultdict(list)
        self._of_node: dict[int, list[str]] = defaultdict(list)
        for rank in cluster.ranks:
            if rank.rank is not None:
                self._of_rank[rank.rank].append(rank.host.label)
        for host in cluster.hosts:
            if host.node_rank is not None:
                self._of_node[host.node_rank].append(host.label)

    def of(self, step: Step, where: Where) -> tuple[str, ...]:
        """Labels of the hosts on which a step of a finding at that place is typed."""
        if not isinstance(step.on, On):
            return step.on
        if step.on is On.EVERY:
            return self.every
        here = self._at(where)
        if step.on is On.OTHERS:
            return tuple(name for name in self.every if name not in here)
        return tuple(here) or self.every

    def has(self, step: Step, where: Where, host: str) -> bool:
        """True if a step is typed on one host, of those of the cluster."""
        if step.on is On.EVERY:
            return True
        if step.on is On.OTHERS:
            return host not in self._at(where)
        return host in self.of(step, where)

    def _at(self, where: Where) -> dict[str, None]:
        """The hosts that a place names; of ranks, nodes and links only where it names none."""
        ranks = (name for rank in where.ranks for name in self._of_rank.get(rank, ()))
        nodes = (
            name for node in where.nodes for name in self._of_node.get(node, (f"node {node}",))
        )
        links = (end for link in where.links for end in link)
        for names in (where.hosts, ranks, nodes, links):
            found = dict.fromkeys(names)
            if found:
                return found
        return {}


def steps_on(cluster: Cluster, finding: Finding, host: str) -> list[Step]:
    """Steps that the first way to fix a finding has for one host, in their order."""
    fix, hosts = finding.fix or finding.kind.fix, StepHosts(cluster)
    steps = fix.steps if isinstance(fix, Fix) else ()
    return [step for step in steps if host in hosts.of(step, finding.where)]


def fix_to_json(finding: Finding, hosts: StepHosts) -> dict[str, Any]:
    """The keys of a finding that hold its fix: one line, the steps, and other ways."""
    fix = finding.fix or finding.kind.fix
    data: dict[str, Any] = {"fix": str(fix), "fix_steps": [], "fix_alternatives": []}
    if isinstance(fix, Fix):
        data["fix_steps"] = _steps_json(fix, finding.where, hosts)
        data["fix_alternatives"] = [
            {"fix": str(each), "fix_steps": _steps_json(each, finding.where, hosts)}
            for each in fix.alternatives
        ]
    return data


def _steps_json(fix: Fix, where: Where, hosts: StepHosts) -> list[dict[str, Any]]:
    return [
        {
            "hosts": list(hosts.of(step, where)),
            "command": step.command,
            "undo": step.undo,
            "note": step.note,
            "persists": step.persists,
            "shows": step.shows,
        }
        for step in fix.steps
    ]


def fix_from_json(node: Node) -> str:
    """Inverse of `fix_to_json`; a report of an older version has text only."""
    text = node.get("fix", str)
    steps, others = _steps_of(node), tuple[Fix, ...]()
    if "fix_alternatives" in node.data:
        others = node.each("fix_alternatives", lambda n: _made(_steps_of(n), n.get("fix", str), ()))
    return _made(steps, text, others) if steps or others else text


def _steps_of(node: Node) -> tuple[Step, ...]:
    return node.each("fix_steps", _step) if "fix_steps" in node.data else ()


def _step(node: Node) -> Step:
    """A step as the file has it; `judge.own_fixes` says which of them are this program's."""
    return decode(Step, node, on=node.get("hosts", tuple[str, ...], ()))
