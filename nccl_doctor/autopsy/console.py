"""Consoles of a job: lines about its end, exceptions, and the process that each of them is of.

A console of a large job has 100 MB, of which some hundred lines matter. So every piece of it is
searched for the words of messages.toml first, by `bytes.find`, and only lines around a hit are
parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from nccl_doctor.autopsy.messages import Message, message_rows, messages_in

_PIECE = 8 << 20
_LONGEST = 1 << 16
"""Bytes of a line that are read."""
_TRACEBACK_LINES = 400
_TRACEBACK_LINES_EACH = 50
"""Lines in which exceptions have to end, after the first line of the last one: lines of ranks that
end together are mixed, so there are more for each that is open."""
_MORE_LINES = 5
"""Lines behind the name of an exception that are read: NCCL says there what its error is."""

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIXES = tuple(
    re.compile(prefix)
    for prefix in (
        r"\[pod/(?P<host>[^/\]]+)/[^\]]*\] ?",  # kubectl logs --prefix
        r"(?P<host>[\w.-]+[-_]\d+) +\| ?",  # docker compose
        r"\((?P<actor>[\w:. -]+?) pid=(?P<pid>\d+)(?:, ip=(?P<host>[^)]+))?\) ?",  # Ray
        r"(?P<task>\d{1,6}): ",  # srun --label
        r"\[\d+,(?P<task>\d+)\]<std(?:err|out)>: ?",  # Open MPI 4
        r"\[prterun-[^\]]*@\d+,(?P<task>\d+)\](?:<std(?:err|out)>)?:? ?",  # Open MPI 5
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?\]? ",
        r"(?P<host>[\da-f]{8})(?: \[rank=(?P<rank>\d+)\])? \|\| ?",  # Determined
        r"std(?:err|out) F ",  # containerd's files
        r"\[(?!rank\d)(?P<role>[a-z_]+?)(?P<local>\d+)\]: ?",  # torchrun --tee
        r"\[rank(?P<rank>\d+)\]: ?",  # torch
    )
)
"""Prefixes that launchers and logs put before a line, in the order in which they stand."""

_TRACEBACK = "Traceback (most recent call last)"
_THREAD = "Exception in thread "
_CHAINED = ("During handling of the above", "The above exception was the direct cause")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>.*))?')
_STACKS = ("Current thread 0x", ': "MainThread"', "Thread 1 (")
"""Words of the first line of a main thread's stack: of faulthandler, of py-spy, and of gdb."""
_MAIN_THREADS = (
    re.compile(r"Current thread 0x"),
    re.compile(r'Thread (?P<pid>\d{1,10}) .*: "MainThread"'),
    re.compile(r"Thread 1 \((?:Thread 0x[\da-f]+ \()?(?:LWP|process) (?P<pid>\d{1,10})\)"),
)
_STACK_FRAMES = (
    re.compile(r"    (?P<name>\S.*) \((?P<file>[^()]+?)(?::(?P<line>\d{1,9}))?\)$"),  # py-spy
    re.compile(  # gdb
        r"#\d+ +(?:0x[\da-f]+ in )?(?P<name>\S.*) \(.*\)"
        r"(?: at (?P<file>\S+):(?P<line>\d{1,9})| from (?P<library>\S+))?$"
    ),
)
_WAITS = re.compile(r"(?:c10d|gloo)::|p?nccl[A-Z]")
"""Functions of torch, gloo and NCCL in which a thread waits for other ranks."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: |:?$)")
_ELSEWHERE = re.compile(r"\[|[EWIF]\d{4} |[=-]{3}|srun:|prterun|mpirun")
"""Beginnings of lines that do not belong to an exception any more."""
_PACKAGE = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3[.\d]*/|^<|(?:^|/)torch/"
    r"|/bin/(?:torchrun|accelerate|deepspeed)$"
)
_LAUNCHER = re.compile(
    r"/bin/(?:torchrun|accelerate|deepspeed)$|torch/distributed/(?:run|launcher)|accelerate/commands"
)


@dataclass(frozen=True)
class LineOrigin:
    """Process that printed a line, by its prefix: None and "" for what the prefix does not say.

    `task` is the number that srun or mpirun puts before it: a rank, or a launcher of several.
    """

    rank: int | None = None
    task: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    host: str = ""


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def is_own(self) -> bool:
        """True if it is of the job's own code, not of an installed package, and of Python."""
        return self.file.endswith(".py") and not _PACKAGE.search(self.file)

    def __str__(self) -> str:
        place = f"{self.file.rpartition('/')[2]}:{self.line}" if self.line else self.file
        return f"{place} in {self.function}"


@dataclass
class Stack:
    """Python stack of a process; `line` counts from 1, `frames` begin at the outermost."""

    line: int
    origin: LineOrigin
    frames: list[Frame] = field(default_factory=list)

    @property
    def own_frame(self) -> Frame | None:
        """The innermost frame of the job's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_own), None)

    @property
    def is_in_collective(self) -> bool:
        """True if it waits in a call of torch.distributed, or below it in gloo or NCCL."""
        return any(
            "torch/distributed/" in frame.file or _WAITS.match(frame.function)
            for frame in self.frames
        )


@dataclass
class Raised(Stack):
    """An exception, with the stack that its traceback shows.

    `error` is the line with its name, `more` are lines behind it. `cause` is the exception before
    it, where it was raised while that one was handled. `thread`: it ended a thread only.
    """

    error: str = ""
    more: list[str] = field(default_factory=list)
    thread: bool = False
    cause: Raised | None = None

    @property
    def name(self) -> str:
        """Name of the class, without its module."""
        return self.error.partition(":")[0].rpartition(".")[2].strip()

    @property
    def of_launcher(self) -> bool:
        """True if a launcher raised it, not a rank."""
        return any(_LAUNCHER.search(frame.file) for frame in self.frames[:4])

    @property
    def messages(self) -> list[Message]:
        """Known messages in its text, and in that of the exceptions before it."""
        found = list(messages_in("\n".join((self.error, *self.more)), inside=True))
        return found if self.cause is None else [*found, *self.cause.messages]


@dataclass(frozen=True)
class Told:
    """A message that stands by itself, with its line, which counts from 1."""

    line: int
    origin: LineOrigin
    message: Message


class Readable(Protocol):
    """Stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; none at the end."""
        ...


def read_console(stream: Readable) -> Iterator[Stack | Told]:
    """Exceptions, stacks and messages of a console, in the order in which they end."""
    reader = _ConsoleReader()
    for piece in _pieces(stream):
        yield from reader.piece(piece)
    yield from reader.end()


def parted(raw: bytes) -> tuple[LineOrigin, str]:
    """The process that a line is of, and its text without prefixes."""
    visible = _ANSI.sub(b"", raw.rstrip(b"\r")[-_LONGEST:]).rpartition(b"\r")[2]
    text = visible.decode("utf-8", "replace")
    at = 0
    found: dict[str, str] = {}
    for prefix in _PREFIXES:
        if match := prefix.match(text, at):
            at = match.end()
            found |= {name: value for name, value in match.groupdict().items() if value}
    origin = LineOrigin(
        rank=int(found["rank"]) if "rank" in found else None,
        task=int(found["task"]) if "task" in found else None,
        local_rank=int(found["local"]) if "local" in found else None,
        pid=int(found["pid"]) if "pid" in found else None,
        host=found.get("host", ""),
    )
    return origin, text[at:]


def _pieces(stream: Readable) -> Iterator[bytes]:
    """The text in pieces that end at the end of a line; a line without end is cut."""
    rest = b""
    while piece := stream.read(_PIECE):
        piece = rest + piece
        end = piece.rfind(b"\n") + 1 or len(piece)
        piece, rest = piece[:end], piece[end:]
        yield piece if piece.endswith(b"\n") else piece + b"\n"
    if rest:
        yield rest + b"\n"


def _frame_of_stack(text: str) -> Frame | None:
    """The frame that a line of a stack shows; it may be of a library, without file and line."""
    if match := _FRAME.match(text):
        return Frame(match["file"], int(match["line"]), (match["name"] or "").strip())
    for pattern in _STACK_FRAMES:
        if match := pattern.match(text):
            found = match.groupdict()
            file = found["file"] or (found.get("library") or "").rpartition("/")[2]
            return Frame(file, int(found["line"] or 0), found["name"].partition("(")[0].strip())
    return None


class _ConsoleReader:
    """State of one console between its lines."""

    def __init__(self) -> None:
        rows = [row for row in message_rows() if not row.inside]
        words = {_TRACEBACK, _THREAD, *_STACKS, *(row.word for row in rows)}
        self._words = [word.encode() for word in sorted(words)]
        self._wrapped = {row.word: row.lines for row in rows if row.lines > 1}
        self._number = 0
        self._lines_left = 0
        self._open: dict[LineOrigin, Raised] = {}
        self._stacks: dict[LineOrigin, Stack] = {}
        self._chained: set[LineOrigin] = set()
        self._threads: set[LineOrigin] = set()
        self._wrap: tuple[LineOrigin, str, int] | None = None

    def piece(self, piece: bytes) -> Iterator[Stack | Told]:
        """Exceptions and messages of the next lines."""
        hits = self._hits(piece)
        at = counted = index = 0
        while at < len(piece):
            is_open = self._open or self._stacks
            if not (self._lines_left and is_open) and self._wrap is None:
                while index < len(hits) and hits[index] < at:
                    index += 1
                if index == len(hits):
                    break
                at = hits[index]
            end = piece.find(b"\n", at)
            self._number += piece.count(b"\n", counted, end) + 1
            counted = end + 1
            self._lines_left -= 1
            yield from self._line(piece[at:end])
            at = end + 1
        self._number += piece.count(b"\n", counted)

    def end(self) -> Iterator[Stack]:
        """Exceptions and stacks with which the text ends."""
        yield from [raised for raised in self._open.values() if raised.error or raised.frames]
        yield from [stack for stack in self._stacks.values() if stack.frames]

    def _hits(self, piece: bytes) -> Sequence[int]:
        """Places at which lines begin that hold a word."""
        hits = set()
        for word in self._words:
            at = piece.find(word)
            while at >= 0:
                hits.add(piece.rfind(b"\n", 0, at) + 1)
                at = piece.find(word, piece.find(b"\n", at))
        return sorted(hits)

    def _line(self, raw: bytes) -> Iterator[Stack | Told]:
        origin, text = parted(raw)
        yield from self._of_stack(origin, text)
        yield from self._of_exception(origin, text)
        if self._wrap is not None:
            origin, before, left = self._wrap
            text = f"{before} {text.strip()}"
            self._wrap = (origin, text, left - 1) if left > 1 else None
        else:
            left = max((n for word, n in self._wrapped.items() if word in text), default=1) - 1
            self._wrap = (origin, text, left) if left else None
        if self._wrap is None:
            for message in messages_in(text):
                yield Told(self._number, origin, message)

    def _of_stack(self, origin: LineOrigin, text: str) -> Iterator[Stack]:
        now = self._stacks.get(origin)
        frame = None if now is None else _frame_of_stack(text)
        if now is not None and frame is not None:  # the innermost first
            now.frames.insert(0, frame)
        elif now is not None:
            del self._stacks[origin]
            if now.frames:
                yield now
        if found := next(filter(None, (each.match(text) for each in _MAIN_THREADS)), None):
            pid = found.groupdict().get("pid")
            self._stacks[origin] = Stack(
                self._number, replace(origin, pid=int(pid)) if pid else origin
            )
            self._lines_left = max(self._lines_left, _TRACEBACK_LINES)

    def _of_exception(self, origin: LineOrigin, text: str) -> Iterator[Raised]:
        now = self._open.get(origin)
        if _TRACEBACK in text:
            chained = origin in self._chained
            if now is not None and now.error and not chained:
                yield now
            open_ones = len(self._open)
            self._lines_left = _TRACEBACK_LINES + _TRACEBACK_LINES_EACH * open_ones
            self._open[origin] = Raised(
                self._number,
                origin,
                thread=origin in self._threads,
                cause=now if chained else None,
            )
            self._chained.discard(origin)
            self._threads.discard(origin)
        elif _THREAD in text:
            self._threads.add(origin)
        elif now is None:
            return
        elif now.error:
            if text.startswith(_CHAINED):
                self._chained.add(origin)
            elif len(now.more) >= _MORE_LINES or _ELSEWHERE.match(text):
                yield self._open.pop(origin)
            elif text.strip() and not text.startswith("frame #"):
                now.more.append(text)
        elif match := _FRAME.match(text):
            name = (match["name"] or "").strip()
            now.frames.append(Frame(match["file"], int(match["line"]), name))
        elif now.frames and _ERROR.match(text):
            now.error = text
