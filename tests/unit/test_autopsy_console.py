"""Lines of consoles: whose they are, and which of them are read."""

from __future__ import annotations

import io
import re
import tracemalloc
from pathlib import Path

import pytest

from nccl_doctor.autopsy import console, ranks, rules
from nccl_doctor.autopsy.console import LineOrigin, Raised, Told, parted, read_console
from nccl_doctor.autopsy.messages import message_rows, messages_in
from tests.support.consoles import CLOSED, raised

TEXT = "Killed process 7"


@pytest.mark.parametrize(
    ("prefix", "origin"),
    [
        ("", LineOrigin()),
        ("[rank3]: ", LineOrigin(rank=3)),
        ("[rank3]:", LineOrigin(rank=3)),
        ("[default2]:", LineOrigin(local_rank=2)),
        ("[default2]:[rank10]: ", LineOrigin(rank=10, local_rank=2)),
        ("[trainer0]: ", LineOrigin(local_rank=0)),
        ("5: ", LineOrigin(task=5)),
        ("5: [rank5]: ", LineOrigin(rank=5, task=5)),
        ("[1,2]<stderr>:", LineOrigin(task=2)),
        ("[prterun-node0-22@1,2]<stderr>: ", LineOrigin(task=2)),
        ("(RayTrainWorker pid=41, ip=10.0.0.3) ", LineOrigin(pid=41, host="10.0.0.3")),
        ("\x1b[36m(RayTrainWorker pid=41)\x1b[0m ", LineOrigin(pid=41)),
        ("[pod/train-0/pytorch] ", LineOrigin(host="train-0")),
        ("[pod/train-0/pytorch] [rank1]: ", LineOrigin(rank=1, host="train-0")),
        ("trainer-1  | [rank1]: ", LineOrigin(rank=1, host="trainer-1")),
        ("2026-11-27T10:00:00.123456789Z [rank1]: ", LineOrigin(rank=1)),
        ("2026-11-27T10:00:00.123456789Z stderr F [rank1]: ", LineOrigin(rank=1)),
        ("[2026-11-27 10:00:00,123] ", LineOrigin()),
        ("[2024-02-27T21:35:32.106Z] fa88a9df || ", LineOrigin(host="fa88a9df")),
        ("[2024-02-27T21:35:32.106Z] fa88a9df [rank=3] || ", LineOrigin(rank=3, host="fa88a9df")),
        ("\r 50%|#####     | 1/2\r", LineOrigin()),
    ],
)
def test_a_prefix_tells_whose_a_line_is(prefix: str, origin: LineOrigin) -> None:
    assert parted(f"{prefix}{TEXT}".encode()) == (origin, TEXT)


def read(text: str | bytes) -> list[Raised | Told]:
    data = text if isinstance(text, bytes) else text.encode()
    return [*read_console(io.BytesIO(data))]


def test_exceptions_of_ranks_whose_lines_are_mixed_are_told_apart() -> None:
    first = raised(0, "KeyError: 'a'").splitlines(keepends=True)
    second = raised(1, "ValueError: b").splitlines(keepends=True)
    mixed = "".join(line for pair in zip(first, second, strict=True) for line in pair)
    found = [each for each in read(mixed) if isinstance(each, Raised)]
    assert [(each.origin.rank, each.error) for each in found] == [
        (0, "KeyError: 'a'"),
        (1, "ValueError: b"),
    ]
    assert str(found[0].own_frame) == "job.py:47 in train"


def test_exceptions_of_a_thousand_ranks_that_are_mixed_are_all_read() -> None:
    texts = [raised(rank, "KeyError: 'a'").splitlines(keepends=True) for rank in range(1000)]
    mixed = "".join(line for lines in zip(*texts, strict=True) for line in lines)
    assert {each.origin.rank for each in read(mixed)} == {*range(1000)}


def test_a_line_that_a_piece_ends_in_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * 50 + "\n" + raised(2, "KeyError: 'a'") + "tail\n" * 40
    for size in (128, 200, 301, 1 << 20):
        monkeypatch.setattr(console, "_PIECE", size)
        found = read(text)
        assert [(each.line, each.origin.rank) for each in found] == [(2, 2)], size


def test_text_without_a_newline_costs_no_more_memory_than_some_pieces() -> None:
    class OneLine:
        """A file of one line of 200 MB."""

        left = 200 << 20

        def read(self, size: int, /) -> bytes:
            given = min(size, self.left)
            self.left -= given
            return b"x" * given

    tracemalloc.start()
    try:
        assert [*read_console(OneLine())] == []
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_only_lines_with_a_known_word_are_parsed() -> None:
    filler = "[rank0]: step 1 loss 0.5 exit early out of the loop\n" * 1000
    found = read(filler + "Killed process 4711 (python3)\n" + filler)
    assert [(type(each), each.line) for each in found] == [(Told, 1001)]


def test_bytes_that_are_no_text_are_read_over() -> None:
    noise = bytes(range(256)) * 4
    found = read(noise + b"\n" + raised(1, CLOSED).encode() + noise)
    assert [each.origin.rank for each in found if isinstance(each, Raised)] == [1]


def test_an_exception_that_is_cut_off_is_told_as_far_as_it_goes() -> None:
    text = "".join(raised(3, "KeyError: 'a'").splitlines(keepends=True)[:2])
    (found,) = read(text)
    assert isinstance(found, Raised)
    assert (found.error, str(found.own_frame)) == ("", "job.py:47 in train")


def test_a_traceback_behind_a_progress_bar_is_read() -> None:
    text = "\r 10%|#         | 1/10 [00:01]" + raised(None, "KeyError: 'a'")
    (found,) = read(text)
    assert isinstance(found, Raised)
    assert found.error == "KeyError: 'a'"


def test_the_rules_know_the_names_of_all_messages_and_no_others() -> None:
    code = "".join(Path(module.__file__ or "").read_text() for module in (ranks, rules))
    asked = re.findall(r'(?:says\(|all\(|case |says == |says in \(|\| )((?:"[\w-]+",? ?)+)', code)
    used = {name for names in asked for name in re.findall(r'"([\w-]+)"', names)}
    plain = {"barrier-lost", "store-lost"}  # words of victims, read as such
    assert {row.says for row in message_rows()} - plain == used - plain


def test_a_message_has_its_values() -> None:
    text = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, "
    (found,) = messages_in(text + "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran")
    assert (found.says, found.number("number"), found.values["operation"]) == (
        "watchdog",
        3,
        "ALLREDUCE",
    )
    assert found.number("group") is None
