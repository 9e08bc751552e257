"""Answers of NCCL's RAS service (`ncclras`), as text or JSON: processes that are gone, and ranks
that have launched fewer operations than the others of their communicator. Pure.

Source: src/ras/client_support.cc of NCCL 2.24.3 (text), 2.27.7, and 2.30.7 (with JSON). Not
validated on hardware.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.autopsy import kinds
from nccl_doctor.model.findings import Confidence, Finding, Where, numbered
from nccl_doctor.toolkit.nccl.ras import parsed_status

_MOST_RANKS = 1 << 17
_TEXT = b"Job summary\n==========="
_GROUP = re.compile(r"\s*(?P<group>\d+)  +\d+  +\d+  +[\d-]+  +(?P<size>\d{1,9})  +\d+  +[A-Z]")
_COMMUNICATOR = re.compile(r"#(?P<group>\d+)-\d+ \((?P<hash>[\da-f]+)\)")
_OPERATION = re.compile(r"  Communicator ranks have different (?P<name>\w+) operation counts")
_SEVERAL = re.compile(
    r"  (?P<ranks>\d{1,9}) ranks have (?:launched up to operation (?P<count>\d{1,18})|not launched)"
)
_RANK = re.compile(
    r"  Rank (?P<rank>\d{1,6})(?: has (?:launched up to operation (?P<count>\d{1,18})|not launched"
    r"(?P<none> )any operations))? -- (?:GPU \S+ managed by process (?P<pid>\d{1,10}) on node "
    r"(?P<host>\S+)|\[process)"
)
_PROCESS = re.compile(r"  Process (?P<pid>\d{1,10}) on node (?P<host>\S+) managing GPU")
_GONE = {"DEAD": "is dead for RAS: its host cannot be reached", "INCOMPLETE": "did not answer RAS"}


@dataclass(frozen=True)
class RasProcess:
    """Process of the job. `rank` is that in the communicator; None if unknown."""

    pid: int | None
    host: str
    rank: int | None = None


@dataclass
class Communicator:
    """Ranks of one communicator, as one answer shows them.

    `launched` is, by operation, the number that each rank has launched; `others` are how many
    ranks, of which the text gives no number, have launched how many. `size` is 0 if unknown.
    """

    name: str
    size: int = 0
    launched: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    others: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    processes: dict[int, RasProcess] = field(default_factory=dict)

    def behind(self) -> Iterator[tuple[str, int, int, list[int]]]:
        """Operation, lower and usual number, and the ranks that have the lower one: fewer than
        half.
        """
        for operation, launched in self.launched.items():
            counts = Counter(launched.values()) + self.others[operation]
            usual, ranks = counts.most_common(1)[0]
            late = sorted(rank for rank, count in launched.items() if count < usual)
            if late and 2 * ranks > counts.total():
                yield operation, launched[late[0]], usual, late


@dataclass
class RasAnswer:
    """One answer: `gone` are processes by what RAS says of them, `largest` is the most ranks that a
    communicator has.
    """

    name: str
    communicators: list[Communicator] = field(default_factory=list)
    gone: dict[str, list[RasProcess]] = field(default_factory=lambda: defaultdict(list))
    largest: int = 0

    @property
    def ranks(self) -> dict[tuple[int | None, str], int]:
        """Rank in the largest communicator, which is the world of the job, by process and host."""
        every = [
            process
            for one in self.communicators
            if one.size == self.largest
            for process in one.processes.values()
        ]
        often = Counter((each.pid, each.host) for each in every)
        return {
            (each.pid, each.host): each.rank
            for each in every
            if each.rank is not None and often[each.pid, each.host] == 1
        }

    def place_of(self, processes: Iterable[RasProcess]) -> Where:
        """Hosts of these processes, and those of their ranks that are known."""
        processes, ranks = [*processes], self.ranks
        known = {ranks[key] for each in processes if (key := (each.pid, each.host)) in ranks}
        hosts = {each.host for each in processes} - {""}
        return Where(hosts=tuple(sorted(hosts)), ranks=tuple(sorted(known)))


def is_ras(head: bytes) -> bool:
    """True for the first bytes of an answer of RAS."""
    if head.lstrip()[:1] == b"{":
        return b'"nccl_version"' in head and b'"communicators' in head
    return _TEXT in head


def read_ras(data: bytes, name: str) -> RasAnswer:
    """An answer of RAS.

    Raises:
        ValueError: it is JSON that is cut off, or of another form.
    """
    text = data.decode("utf-8", "replace")
    if text.lstrip()[:1] != "{":
        return _of_text(text.splitlines(), name)
    status = parsed_status(text)
    if status is None:
        raise ValueError(f"{name}: the JSON of this answer of NCCL's RAS is cut off or damaged")
    answer = RasAnswer(name)
    for each in _tables(status.get("communicators")):
        answer.communicators.append(_communicator(each, answer))
    return answer


def findings_of_ras(answers: Sequence[RasAnswer]) -> list[Finding]:
    """Findings on processes that are gone; else on ranks that are behind the others.

    What is behind in one answer may only be late: two that agree are better than one.
    """
    for words in _GONE.values():
        for answer in reversed(answers):
            if words in answer.gone:
                return [_gone(answer, words, answer.gone[words])]
    for answer in reversed(answers):
        for one in sorted(answer.communicators, key=lambda one: -one.size):
            for operation, count, usual, late in one.behind():
                same = sum((operation, count, usual, late) in other for other in _behind(answers))
                words = f"it has launched {count} {operation}, most have launched {usual}"
                confidence = Confidence.LIKELY if same > 1 else Confidence.POSSIBLE
                if same < 2:
                    words += "; in one answer of RAS, so it may only be late: ask it twice"
                return [
                    Finding(
                        kinds.COLLECTIVE_MISSING,
                        f"{numbered('rank', late)} of {_of(one)}: {words} ({answer.name})",
                        answer.place_of(one.processes[rank] for rank in late),
                        {"rule": "behind by RAS", "communicator": one.name},
                        confidence=confidence,
                    )
                ]
    return []


def _behind(answers: Sequence[RasAnswer]) -> Iterator[list[tuple[str, int, int, list[int]]]]:
    for answer in answers:
        yield [late for one in answer.communicators for late in one.behind()]


def _gone(answer: RasAnswer, words: str, processes: Sequence[RasProcess]) -> Finding:
    pids = ", ".join(str(each.pid) for each in processes[:4] if each.pid)
    return Finding(
        kinds.RANK_SILENT,
        f"process {pids} {words} ({answer.name})",
        answer.place_of(processes),
        {"rule": "gone by RAS"},
        confidence=Confidence.LIKELY,
    )


def _of(one: Communicator) -> str:
    return f"communicator {one.name}" + (f" ({one.size} ranks)" if one.size else "")


def _of_text(lines: Sequence[str], name: str) -> RasAnswer:
    answer = RasAnswer(name)
    one, operation, group, words = Communicator(""), "", None, ""
    sizes: dict[str, int] = {}
    for line in lines:
        if found := _GROUP.match(line):
            sizes[found["group"]] = int(found["size"])
            answer.largest = max(answer.largest, int(found["size"]))
        elif found := _COMMUNICATOR.match(line):
            one, operation, words = (
                Communicator(found["hash"], sizes.get(found["group"], 0)),
                "",
                "",
            )
            answer.communicators.append(one)
            if line.endswith("INCOMPLETE"):
                words = _GONE["INCOMPLETE"]
        elif line in _GONE:
            words, operation = _GONE[line], ""
        elif found := _OPERATION.match(line):
            operation, group = found["name"], None
        elif words and (found := _PROCESS.match(line)):
            answer.gone[words].append(RasProcess(int(found["pid"]), found["host"]))
        elif operation and (found := _SEVERAL.match(line)):
            group = int(found["count"] or 0)
            one.others[operation][group] += int(found["ranks"])
        elif found := _RANK.match(line):
            rank = int(found["rank"])
            pid = int(found["pid"]) if found["pid"] else None
            one.processes[rank] = RasProcess(pid, found["host"] or "", rank)
            if words:
                answer.gone[words].append(one.processes[rank])
            elif operation and (found["count"] or found["none"]):
                one.launched[operation][rank] = int(found["count"] or 0)
            elif operation and group is not None:  # one of the ranks that were counted above
                one.launched[operation][rank] = group
                one.others[operation][group] -= 1
        elif not line.strip():
            operation = words = ""
    return answer


def _communicator(each: Mapping[str, Any], answer: RasAnswer) -> Communicator:
    size = each.get("size")
    one = Communicator(str(each.get("hash", ""))[:40], size if isinstance(size, int) else 0)
    answer.largest = max(answer.largest, one.size)
    for table in _tables(each.get("ranks")):
        rank = table.get("rank")
        if not isinstance(rank, int) or not 0 <= rank < _MOST_RANKS:
            continue
        one.processes[rank] = _process(table, rank)
        counts = table.get("collective_counts")
        for operation, count in counts.items() if isinstance(counts, Mapping) else ():
            if isinstance(count, int):
                one.launched[str(operation)[:40]][rank] = count
    for table in _tables(each.get("missing_ranks")):
        rank, status = table.get("rank"), table.get("status")
        if not isinstance(rank, int) or not isinstance(status, Mapping):
            continue
        words = _GONE["DEAD" if status.get("considered_dead") is True else "INCOMPLETE"]
        process = _process(table, rank)
        if all((each.pid, each.host) != (process.pid, process.host) for each in answer.gone[words]):
            answer.gone[words].append(process)
    return one


def _process(table: Mapping[str, Any], rank: int) -> RasProcess:
    pid, host = table.get("pid"), table.get("host")
    return RasProcess(
        pid if isinstance(pid, int) else None, host[:253] if isinstance(host, str) else "", rank
    )


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
