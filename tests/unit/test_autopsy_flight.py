"""Reading of flight-recorder dumps: what torch writes, and what nobody should have written."""

from __future__ import annotations

import contextlib
import pickle
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.autopsy.flight import LARGEST, Collective, is_dump, read_dump
from tests.support.dumps import Entry, entry, form, recorded


@pytest.mark.parametrize("kind", ["torch", "python", "json"])
def test_what_torch_writes_is_read(kind: str) -> None:
    frames = [
        {
            "name": "all_reduce",
            "filename": "/venv/torch/distributed/distributed_c10d.py",
            "line": 3,
        },
        {"name": "step", "filename": "/job/train.py", "line": 41},
    ]
    data = form(kind, recorded([entry(8), entry(9, state="started", retired=False, frames=frames)]))
    assert is_dump(data[:300])
    dump = read_dump(data, "/x/nccl_trace_rank_3")
    assert (dump.rank, dump.version) == (3, "2.10")
    assert dump.groups["0"].ranks == (0, 1, 2, 3)
    assert (dump.groups["0"].description, dump.groups["0"].enqueued) == ("default_pg", 9)
    assert dump.entries[1] == Collective(
        group="0",
        number=9,
        p2p_number=0,
        is_p2p=False,
        operation="all_reduce",
        backend="nccl",
        input_sizes=((1024, 8),),
        input_dtypes=("Float",),
        output_sizes=((1024, 8),),
        output_dtypes=("Float",),
        state="started",
        retired=False,
        created_ns=entry(9)["time_created_ns"],
        started_ns=None,
        completed_ns=entry(9)["time_discovered_completed_ns"],
        timeout_ms=600_000,
    )
    assert dump.entries[1].frame == "step (/job/train.py:41)"


def test_both_forms_of_a_dump_are_equal() -> None:
    """JSON has lists for tuples, 0 for no time, and text for the numbers of a group."""
    pickled = recorded([entry(n, time_discovered_completed_ns=None) for n in range(1, 4)])
    as_json = recorded([entry(n, time_discovered_completed_ns=0) for n in range(1, 4)])
    as_json["pg_status"] = {"0": {"last_enqueued_collective": "9"}}
    read = [read_dump(form("torch", pickled), "d_1"), read_dump(form("json", as_json), "d_1.json")]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("/tmp/x/_dump_14", 14),
        ("comm_lib_trace_rank_12.json", 12),
        ("_dump_fr_trace_json_0", 0),
        ("all.tar:node1/nccl_trace_rank_1023", 1023),
        ("trace", None),
        ("rank_3.txt", None),
        ("rank_123456789", None),
    ],
)
def test_the_rank_is_in_the_name(name: str, rank: int | None) -> None:
    assert read_dump(form("torch", recorded([])), name).rank == rank


@pytest.mark.parametrize("kind", ["torch", "python", "json"])
def test_a_dump_without_entries(kind: str) -> None:
    empty = recorded([])
    del empty["entries"]
    assert read_dump(form(kind, empty), "d_0").entries == ()


def test_text_that_would_move_the_cursor_is_shown_as_question_marks() -> None:
    made = form("torch", recorded([entry(1, ("0", "a\x1b[2Jb\n"), profiling_name="nccl:x\r")]))
    assert read_dump(made, "d_0").entries[0].operation == "x?"


def test_the_oldest_format() -> None:
    old = entry(5)
    for key in ("collective_seq_id", "p2p_seq_id", "input_dtypes", "timeout_ms", "is_p2p", "pg_id"):
        del old[key]
    old |= {"seq_id": 5, "duration_ms": 1.5}
    data = form("python", {"version": "2.1", "entries": [old]})
    assert is_dump(data[:300])
    read = read_dump(data, "d_0")
    assert (read.version, read.entries[0].number, read.entries[0].timeout_ms) == ("2.1", 5, None)


def test_gloo_has_no_group_in_its_dump() -> None:
    own = {"pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}}
    dump = read_dump(
        form("torch", recorded([entry(1, profiling_name="gloo:barrier")], **own)), "d_0"
    )
    assert dump.groups.keys() == {"0"}
    assert (dump.groups["0"].ranks, dump.groups["0"].description) == ((), "default_pg")
    assert (dump.entries[0].backend, dump.entries[0].operation) == ("gloo", "barrier")


def test_the_numbers_of_a_group_without_entries_are_found_by_the_order_of_groups() -> None:
    names = ("0", "7", "35", "112")
    dump = read_dump(
        form(
            "torch",
            recorded(
                [],
                pg_config={
                    n: {"name": n, "desc": f"G{n}", "ranks": "[0, 1]"} for n in sorted(names)
                },
                pg_status={str(i): {"last_enqueued_collective": 10 * i} for i in (12, 0, 4, 5)},
            ),
        ),
        "d_0",
    )
    assert {name: dump.groups[name].enqueued for name in names} == {
        "0": 0,
        "7": 40,
        "35": 50,
        "112": 120,
    }


def test_numbers_that_fit_no_order_are_not_guessed() -> None:
    config = {n: {"name": n, "desc": "", "ranks": "[0]"} for n in ("0", "7")}
    status = {str(i): {"last_enqueued_collective": 5 + i} for i in (0, 1)}
    made = recorded([entry(1, ("7", ""), pg_id=0)], pg_config=config, pg_status=status)
    groups = read_dump(form("torch", made), "d_0").groups
    assert (groups["7"].enqueued, groups["0"].enqueued) == (5, None)


def long_dump(count: int = 2000, hang: int = 1200, seed: int = 1) -> Entry:
    """Many entries of several groups: since `hang`, one of them has ended nothing."""
    chance = random.Random(seed)
    kinds = [("0", "default_pg"), ("1", "TP"), ("2", "DP"), ("3", "PP")]
    numbers = dict.fromkeys(kinds, 0)
    entries = []
    for i in range(count):
        group = kinds[0] if i == 3 else chance.choice(kinds[1:])
        numbers[group] += 1
        over = group != kinds[2] or i < hang
        entries.append(
            entry(
                numbers[group],
                group,
                profiling_name=f"nccl:operation{i % 300}",
                state="completed" if over else "scheduled",
                is_p2p=group == kinds[3],
                p2p_seq_id=numbers[group] if group == kinds[3] else 0,
                frames=[{"name": f"f{i % 7}", "filename": f"/job/{i // 100}.py", "line": i % 90}],
            )
        )
    return recorded(entries)


@pytest.mark.parametrize("kind", ["torch", "python", "json"])
def test_of_many_entries_those_of_interest_are_kept(kind: str) -> None:
    made = long_dump()
    kept = read_dump(form(kind, made), "d_0").entries
    assert len(kept) < 600
    every = [
        read_dump(form("python", recorded([each])), "d_0").entries[0] for each in made["entries"]
    ]
    assert set(kept) <= set(every)
    for group in ("0", "1", "2", "3"):
        assert [e for e in kept if e.group == group][-1] == [e for e in every if e.group == group][
            -1
        ]
    first_open = next(each for each in every if each.state == "scheduled")
    assert first_open == next(each for each in kept if each.state == "scheduled")
    frames = {(each.group, each.number): each.frame for each in every}
    assert all(each.frame == frames[each.group, each.number] for each in kept)
    assert [each.created_ns for each in kept] == [e.created_ns for e in every if e in set(kept)]


def test_many_dumps_are_read_soon_and_need_little_memory() -> None:
    """1,024 dumps of 2,000 entries are to take 5 s on an idle core, so 50 take 0.25 s; the bound is
    ten times that, of the time of this process."""
    data = form("torch", long_dump())
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dumps = [read_dump(data, f"d_{rank}") for rank in range(50)]
    assert time.process_time() - begin < 2.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert len({dump.entries for dump in dumps}) == 1


# What nobody should have written.


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


HEAD = (
    b"\x80\x02}(X\x07\x00\x00\x00versionq\x00X\x03\x00\x00\x002.9q\x01X\x07\x00\x00\x00entriesq\x02"
)
NESTED_PAIRS = b"N" + b"q\x05h\x05\x86" * 1 + b"h\x05\x86" * 300_000
BAD = {
    "a class": pickle.dumps(recorded([{"x": Evil()}]), protocol=2),
    "a class alone": pickle.dumps(Evil(), protocol=2),
    "another protocol": pickle.dumps(recorded([entry(1)]), protocol=4),
    "a global in text": b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an end in the middle": HEAD + b".u.",
    "only an end": b"\x80\x02.",
    "no end": HEAD + b"]u",
    "half": form("torch", recorded([entry(n) for n in range(50)]))[:3000],
    "half of many": form("torch", long_dump())[:200_000],
    "a string that is too long": HEAD + b"X\xff\xff\xff\x7fabcu.",
    "a place far out in the memo": HEAD + b"](K\x01r\xff\xff\xff\x7feu.",
    "a place out in the memo": HEAD + b"](K\x01r\xff\xff\xff\x00eu.",
    "nothing at a place": HEAD + b"](h\x77eu.",
    "pairs in pairs as a key": HEAD + NESTED_PAIRS + b"Nu.",
    "containers": HEAD + b"](" + b"}" * 1_000_000 + b"eu.",
    "lists in lists": HEAD + b"](" * 100_000 + b"e" * 100_000 + b"u.",
    "a list as a key": HEAD + b"]]Nu.",
    "text to append to": HEAD + b"X\x01\x00\x00\x00a(Neu.",
    "entries of another type": form("torch", recorded([]) | {"entries": "none"}),
    "no version": form("torch", {"entries": []}),
    "a version of another type": form("torch", {"version": 2, "entries": []}),
    "a list": form("torch", [1, 2]),
    "one entry again and again": HEAD + b"]}q\x05(" + b"h\x05" * 100_000 + b"eu.",
    "JSON: half": form("json", recorded([entry(1)]))[:400],
    "JSON: deep": b'{"version": "2.9", "pg_config": ' + b"[" * 200_000,
    "JSON: a deep object": b'{"pg_config":' * 100_000,
    "JSON: no version": b'{"entries": []}',
    "JSON: entries of another type": b'{"version": "2.9", "entries": {"a": 1}}',
    "JSON: a number of many digits": b'{"version": "2.9", "entries": ' + b"9" * 100_000 + b"}",
    "JSON: a list": b"[1]",
    "JSON: not UTF-8": b'{"version": "\xff\xfe", "entries": []}',
    "nothing": b"",
    "zeros": bytes(1000),
    "too large": bytes(LARGEST + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_dumps_are_refused_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^/x/d_0: no flight-recorder dump: \S") as caught:
        read_dump(BAD[name], "/x/d_0")
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 300
    assert not capsys.readouterr().out


ODD: dict[str, object] = {
    "entries that are none": [None, 1, "x", [], {}],
    "no text": [entry(1, profiling_name=7, state=None, thread_name=[], process_group="0")],
    "no numbers": [entry(1, collective_seq_id="x", time_created_ns=[], timeout_ms={}, pg_id=[[]])],
    "large numbers": [entry(1, collective_seq_id=1 << 62, input_sizes=[[1 << 62] * 100] * 100)],
    "odd sizes": [entry(1, input_sizes=[1, [None, "x"], {}], input_dtypes=[1, [2]])],
    "odd frames": [entry(1, frames=[1, {}, {"filename": 3, "line": "x"}])],
    "odd groups": [entry(1, process_group=[])],
}


@pytest.mark.parametrize("kind", ["python", "json"])
@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_read_as_if_they_were_not_there(name: str, kind: str) -> None:
    dump = read_dump(form(kind, recorded([]) | {"entries": ODD[name]}), "d_0")
    for each in dump.entries:
        assert isinstance(each.number, int)
        hash(each)
    odd = {"pg_config": [1], "pg_status": {"0": 5, "x": {}}}
    assert read_dump(form(kind, recorded([], **odd)), "d_0").groups == {}


def test_a_shared_text_does_not_grow_with_each_mention() -> None:
    """A thousand groups name the same list of a hundred thousand ranks."""
    ranks = ", ".join(map(str, range(100_000)))
    config = {str(n): {"name": str(n), "desc": "", "ranks": ranks} for n in range(1000)}
    data = form("torch", recorded([], pg_config=config, pg_status={}))
    groups = read_dump(data, "d_0").groups
    assert len({id(group.ranks) for group in groups.values()}) == 1


def test_chance_bytes_never_do_more_than_be_refused() -> None:
    chance = random.Random(7)
    whole = [recorded([entry(n) for n in range(4)]), long_dump(300, 200)]
    for data in [form(kind, each) for each in whole for kind in ("torch", "python", "json")]:
        for _ in range(60):
            broken = bytearray(data)
            for _ in range(chance.choice((1, 3, 30))):
                broken[chance.randrange(len(broken))] = chance.randrange(256)
            end = chance.choice((len(broken), len(broken) // 2))
            with contextlib.suppress(ValueError):
                read_dump(bytes(broken[:end]), "d_0")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a": 1}',
        b'{"summary": {}, "version": 1}',
        b"\x80\x02}q\x00X\x05\x00\x00\x00modelq\x01.",
        b"\x80\x04\x95",
        b"[rank0]: RuntimeError: collective_seq_id",
        b"version 2.9 pg_config",
    ],
)
def test_other_files_are_no_dumps(data: bytes) -> None:
    assert not is_dump(data)


def test_reading_needs_no_torch() -> None:
    code = "import sys, nccl_doctor.autopsy.flight; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
