"""Hostfiles of DeepSpeed and Open MPI, good and bad."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nccl_doctor.launch.ssh.hostfile import (
    MAX_BYTES,
    Entry,
    HostfileError,
    parse,
    ranks_per_host,
    read,
)
from tests.support.rows import each_row


def hosts(text: str) -> list[tuple[str, int | None]]:
    return [(entry.destination, entry.slots) for entry in parse(text, "hosts")]


GOOD = {
    "worker-0 slots=4\nworker-1 slots=8\n": [("worker-0", 4), ("worker-1", 8)],
    "# the cluster\n\n  nd0\tslots=2  # head\r\n#nd1 slots=2\n": [("nd0", 2)],
    "nd0 slots=2 max_slots=4\nnd1 max-slots=4 slots=2": [("nd0", 2), ("nd1", 2)],
    "nd0\nnd1 slots=1": [("nd0", None), ("nd1", 1)],
    "bob@nd0.example.org slots=8": [("bob@nd0.example.org", 8)],
    "192.168.7.1 slots=1\nfd00::7 slots=1\nfe80::1%eth0 slots=1": [
        ("192.168.7.1", 1),
        ("fd00::7", 1),
        ("fe80::1%eth0", 1),
    ],
    "node_7 slots=08": [("node_7", 8)],
}


@pytest.mark.parametrize("text", GOOD)
def test_what_launchers_read(text):
    assert hosts(text) == GOOD[text]


def test_the_user_is_no_part_of_the_name():
    (entry,) = parse("bob@nd0 slots=8", "hosts")
    assert entry == Entry("nd0", 8, 1, "bob")


BAD = {
    "": 'names no host; write lines like "node1 slots=8"',
    "\n# nothing\n": "names no host",
    "nd0 slots=0": "line 1: \"nd0 slots=0\": slots is '0', not a number from 1 to 10000",
    "nd0 slots=-1": "slots is '-1'",
    "nd0 slots=two": "slots is 'two'",
    "nd0 slots=²": "slots is '²'",
    "nd0 slots=99999999999": "slots is '99999999999'",
    "nd0 slots=20000": "slots is '20000'",
    "nd0 slots=": 'write "slots=8", without spaces',
    "nd0 slots = 8": 'write "slots=8", without spaces',
    "nd0 slots=1 slots=2": "slots is given twice",
    "nd0 max_slots=no": "max_slots is 'no'",
    "nd0 slts=8": '"slts=8" is not known; did you mean "slots"?',
    "nd0 8": '"8" is not known; write "nd0 slots=8"',
    "nd0 nd1": '"nd1" is not known; write "nd0 slots=8"',
    "nd0:8": 'write "nd0 slots=8"',
    "nd0 user=bob slots=2": 'write "user@nd0"',
    "slots=8": "it does not begin with a host name",
    "-oProxyCommand=evil slots=8": "it does not begin with a host name",
    "-v slots=8": "it does not begin with a host name",
    "bob@-v slots=8": "it does not begin with a host name",
    "nd0;reboot slots=8": "it does not begin with a host name",
    "[fd00::7] slots=8": "it does not begin with a host name",
    "nd0,nd1 slots=8": "it does not begin with a host name",
    "\x00 slots=8": "it does not begin with a host name",
    "nd0 slots=1\nnd1 slots=1\nND0 slots=1": 'line 3: "ND0" is already on line 1',
    "nd0 slots=1\nbob@nd0 slots=1": 'line 2: "nd0" is already on line 1',
    f"{'x' * 200} slots=0": f'line 1: "{"x" * 59}…": slots is',
}


@each_row("text", BAD)
def test_a_bad_line_is_named_with_what_to_write(text):
    with pytest.raises(HostfileError) as caught:
        parse(text, "my/hosts")
    words = str(caught.value)
    assert words.startswith("--hostfile my/hosts: ")
    assert BAD[text] in words
    assert "\n" not in words


def test_all_bad_lines_are_named_but_not_a_thousand():
    with pytest.raises(HostfileError) as caught:
        parse("nd0 slots=x\nnd1 slots=2\nnd2:3\n", "hosts")
    assert "line 1: " in str(caught.value)
    assert "; line 3: " in str(caught.value)
    with pytest.raises(HostfileError, match=r"; and 995 more$"):
        parse("nd0 slots=0\n" * 1000, "hosts")


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(HostfileError, match="cannot be read: No such file or directory"):
        read(str(tmp_path / "none"))
    with pytest.raises(HostfileError, match="cannot be read: Is a directory"):
        read(str(tmp_path))
    with pytest.raises(HostfileError, match="cannot be read: longer than 1 MiB"):
        read("/dev/zero")
    binary = tmp_path / "binary"
    binary.write_bytes(b"nd0 slots=1\n\xff\xfe")
    with pytest.raises(HostfileError, match=r"not UTF-8 text \(byte 12\)"):
        read(str(binary))
    large = tmp_path / "large"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(HostfileError, match="cannot be read: longer than 1 MiB"):
        read(str(large))
    with pytest.raises(HostfileError, match="--hostfile : "):
        read("")


def test_a_file_with_a_byte_order_mark(tmp_path: Path):
    """It is ours to read, but deepspeed asks ssh for a host of a name that begins with it."""
    file = tmp_path / "my hosts"
    file.write_bytes(b"\xef\xbb\xbfnd0 slots=1\r\n")
    assert [entry.name for entry in read(str(file))] == ["nd0"]
    with pytest.raises(HostfileError, match="begins with a byte order mark") as caught:
        read(str(file), of_deepspeed=True)
    subprocess.run(["sh", "-c", str(caught.value).rpartition("without: ")[2]], check=True)
    assert [entry.name for entry in read(str(file), of_deepspeed=True)] == ["nd0"]


OF_DEEPSPEED = {  # deepspeed 0.19.8, launcher/runner.py: ^(\S+)\s+slots=(\d+)
    "nd0 slots=2 max_slots=4": [("nd0", 2)],
    "Nd0 slots=2\nnd0 slots=2": [("Nd0", 2), ("nd0", 2)],
    "bob@nd0 slots=1\nnd0 slots=1": [("bob@nd0", 1), ("nd0", 1)],
    "nd0 slots=0": [("nd0", 0)],
    "nd0 slots=2x": [("nd0", 2)],
    "nd0 slots=2 slots=3 # two": [("nd0", 2)],
    "nd0 max_slots=4 slots=2": 'behind the name; write "nd0 slots=2 max_slots=4"',
    "nd0": 'write "nd0 slots=8"',
    "nd0:8": 'write "nd0 slots=8"',
    "nd0 slots = 8": 'write "nd0 slots=8"',
    "nd0 slots=1\nnd0 slots=1": '"nd0" is already on line 1',
    "-oProxyCommand=evil slots=8": "does not begin with a host name",
    "nd0 slots=20000": "more than 10000",
    "# nothing": "names no host",
}


@each_row("text", OF_DEEPSPEED)
def test_the_lines_as_deepspeed_reads_them(text: str):
    expected = OF_DEEPSPEED[text]
    if isinstance(expected, list):
        found = parse(text, "hosts", of_deepspeed=True)
        assert [(entry.destination, entry.slots) for entry in found] == expected
        return
    with pytest.raises(HostfileError) as caught:
        parse(text, "hosts", of_deepspeed=True)
    assert expected in str(caught.value)


def test_ranks_are_the_slots_unless_told_otherwise():
    uneven = parse("nd0 slots=4\nnd1 slots=8", "hosts")
    assert ranks_per_host(uneven, None, "hosts") == ("4", "8")
    assert ranks_per_host(uneven, "2", "hosts") == ("2", "2")
    assert ranks_per_host(uneven, "auto", "hosts") == ("auto", "auto")
    with pytest.raises(HostfileError, match='line 1: "nd0" has slots=4, fewer than') as caught:
        ranks_per_host(uneven, "8", "hosts")
    assert "nd1" not in str(caught.value)


def test_without_slots_the_number_must_be_given():
    bare = parse("nd0\nnd1 slots=8", "hosts")
    with pytest.raises(HostfileError, match='line 1: "nd0" has no slots; write "nd0 slots=N"'):
        ranks_per_host(bare, None, "hosts")
    assert ranks_per_host(bare, "8", "hosts") == ("8", "8")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_one_that_nobody_named_and_another_user_wrote(tmp_path):
    """As /job/hostfile, which deepspeed reads where it is: ssh goes to the hosts that it names."""
    theirs = tmp_path / "hostfile"
    theirs.write_text("nd0 slots=2")
    os.chown(theirs, 65533, 65533)
    with pytest.raises(HostfileError, match=r"belongs to another user .*name it with --hostfile"):
        read(str(theirs), found=True)
    assert read(str(theirs)) == (Entry("nd0", 2, 1),)
