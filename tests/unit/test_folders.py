"""Files of root, and of anybody, in folders where other users may put things in the way."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import json
import os
import re
import select
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nccl_doctor
from nccl_doctor.gather.views import HostReports
from nccl_doctor.report.redaction.cover import Cover, FolderRedaction, shared_key
from nccl_doctor.system import folders
from nccl_doctor.system.files import append, read_found, read_own, write_private, write_whole
from tests.unit.test_partial_reports import view

STRANGER = 65533
NO_ID = 0xFFFFFFFF
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, bits, who)
    for tag, bits, who in (  # <linux/posix_acl_xattr.h>: owner, a user, group, mask, all others
        *((0x01, 6, NO_ID), (0x02, 6, STRANGER), (0x04, 4, NO_ID)),
        *((0x10, 6, NO_ID), (0x20, 4, NO_ID)),
    )
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another user, in which they may do what they like."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    return folder


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


# --- modes ---


@pytest.mark.parametrize(("mask", "open_to"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o644)])
def test_the_umask_is_kept(tmp_path: Path, umask: None, mask: int, open_to: int) -> None:
    reader = HostReports(str(tmp_path), 10)
    os.umask(mask)
    write_whole(tmp_path / "report", "new")
    write_private(tmp_path / "map", "new")
    append(tmp_path / "log", lambda size: "new")
    assert mode(tmp_path / "report") == open_to
    assert mode(tmp_path / "map") == 0o600
    assert mode(tmp_path / "log") == open_to
    assert HostReports(str(tmp_path), 10).write(1, view("nd1")) == ""
    assert mode(tmp_path / "node1.json") == open_to
    assert len(reader.of([1], 0.0)) == 1


def test_no_mode_is_changed_by_a_path(tmp_path: Path) -> None:
    """While a stranger puts a link to a secret in the place of every new file."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    folder = tmp_path / "folder"
    folder.mkdir()
    swap = (
        "import os, sys, time\n"
        "folder, secret = sys.argv[1:]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    for name in os.listdir(folder):\n"
        "        if name.startswith('.report'):\n"
        "            try:\n"
        "                os.unlink(f'{folder}/{name}')\n"
        "                os.symlink(secret, f'{folder}/{name}')\n"
        "                print('swapped', flush=True)\n"
        "            except OSError:\n"
        "                pass\n"
        "    time.sleep(0.0005)\n"
    )
    command = [sys.executable, "-S", "-c", swap, str(folder), str(secret)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        try:
            for _ in range(10):
                with contextlib.suppress(OSError):
                    write_whole(folder / "report", "x" * (4 << 20))
                if select.select([stranger.stdout], [], [], 0)[0]:
                    break
            else:
                pytest.skip("the stranger was never fast enough")
        finally:
            stranger.kill()
    assert mode(secret) == 0o600
    assert secret.read_text() == "secret"


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("kept", [0o600, 0o640, 0o666])
def test_a_file_that_is_written_again_keeps_its_mode(
    tmp_path: Path, umask: None, kept: int, nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:  # a file system that knows no such file
        monkeypatch.setattr(os, "O_TMPFILE", 0)
    target = tmp_path / "report"
    target.write_text("old")
    target.chmod(kept)
    write_whole(target, "new")
    assert (target.read_text(), mode(target)) == ("new", kept)


# --- what is read because of where it is ---


def test_what_is_found_is_read_and_so_is_a_link_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("mine")
    (tmp_path / "link").symlink_to("real/file")
    for path in (tmp_path / "real" / "file", tmp_path / "link"):
        assert read_found(path, 10) == b"mine"
    with pytest.raises(FileNotFoundError):
        read_found(tmp_path / "none", 10)


def _of_another_user(folder: Path) -> None:
    give_away(folder / "file")


def _for_everybody(folder: Path) -> None:
    (folder / "file").chmod(0o666)


def _for_a_group(folder: Path) -> None:
    os.chown(folder / "file", -1, STRANGER)
    (folder / "file").chmod(0o664)


def _in_a_folder_for_everybody(folder: Path) -> None:
    folder.chmod(0o1777)


def _below_a_folder_for_everybody(folder: Path) -> None:
    folder.parent.chmod(0o777)


def _in_a_folder_of_theirs_below_one_for_everybody(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    give_away(folder)


def _by_a_link_of_theirs(folder: Path) -> None:
    (folder / "file").rename(folder / "mine")
    (folder / "file").symlink_to("mine")
    give_away(folder / "file")
    give_away(folder)


def _a_pipe(folder: Path) -> None:
    (folder / "file").unlink()
    os.mkfifo(folder / "file")


@as_root
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_of_another_user, f"file belongs to another user (uid {STRANGER})"),
        (_for_everybody, "others can write to file (mode 666)"),
        (_for_a_group, "others can write to file (mode 664)"),
        (_in_a_folder_for_everybody, "everybody may write to "),
        (_below_a_folder_for_everybody, "everybody may write to "),
        (_in_a_folder_of_theirs_below_one_for_everybody, "everybody may write to "),
        (_by_a_link_of_theirs, "file is a link of another user"),
        (_a_pipe, "file is not a file"),
    ],
)
def test_what_another_user_may_have_chosen_is_not_obeyed(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    (folder / "file").write_text("theirs?")
    assert read_found(folder / "file", 10) == b"theirs?"
    change(folder)
    with pytest.raises(PermissionError, match=re.escape(words)) as refused:
        read_found(folder / "file", 10)
    assert refused.value.errno == errno.EPERM


@as_root
def test_the_group_that_a_user_has_alone_is_no_other(tmp_path: Path) -> None:
    """Distributions give each user one, and a umask of 002."""
    file = tmp_path / "file"
    file.write_text("mine")
    file.chmod(0o664)
    assert read_found(file, 10) == b"mine"
    os.setxattr(file, "system.posix_acl_access", ACL)  # others, by name, have the bits of the group
    with pytest.raises(PermissionError, match="others can write to file"):
        read_found(file, 10)


# --- what stands at the path already ---


@as_root
@pytest.mark.parametrize("sticky", [False, True])
def test_a_link_of_another_user_to_a_device_or_pipe_is_replaced(
    theirs: Path, tmp_path: Path, sticky: bool
) -> None:
    if sticky:
        os.chown(theirs, 0, 0)
        theirs.chmod(0o1777)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    kept = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for name, what in (("device", "/dev/null"), ("pipe", str(pipe)), ("out", "/proc/self/fd/1")):
        target = theirs / name
        target.symlink_to(what)
        give_away(target)
        write_whole(target, "report")
        assert not target.is_symlink(), name
        assert target.read_text() == "report"
        assert target.stat().st_uid == os.geteuid()
    assert os.read(kept, 100) == b""
    os.close(kept)


@as_root
def test_a_pipe_of_another_user_is_replaced(theirs: Path) -> None:
    target = theirs / "report"
    os.mkfifo(target)
    give_away(target)
    write_whole(target, "report")
    assert target.read_text() == "report"


@pytest.mark.parametrize("sticky", [False, True])
def test_a_link_of_ones_own_to_a_device_is_used(tmp_path: Path, sticky: bool) -> None:
    tmp_path.chmod(0o1777 if sticky else 0o700)
    target = tmp_path / "report"
    target.symlink_to("/dev/null")
    write_whole(target, "report")
    assert target.is_symlink()
    target.unlink()


@as_root
@pytest.mark.parametrize("how", ["symlink", "link"])
def test_a_file_elsewhere_is_not_written_over_where_no_new_one_can_be_made(how: str) -> None:
    """The folder is closed to us, and what has the name of the report leads to a file of ours."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        Path(made).chmod(0o755)
        mine, theirs = Path(made, "bashrc"), Path(made, "theirs")
        mine.write_text("mine")
        os.chown(mine, STRANGER + 1, STRANGER + 1)
        theirs.mkdir()
        target = theirs / "report"
        if how == "symlink":
            target.symlink_to(mine)
            give_away(target)
        else:
            target.hardlink_to(mine)
        give_away(theirs)
        code = (
            "import os, sys; from nccl_doctor.system.files import write_whole\n"
            f"os.setuid({STRANGER + 1})\n"
            "write_whole(sys.argv[1], 'report')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(target)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "PermissionError" in done.stderr, done
        assert mine.read_text() == "mine"


@as_root
def test_a_summary_is_not_added_to_a_file_that_another_user_chose(
    theirs: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "authorized_keys"
    mine.write_text("mine")
    (theirs / "summary").symlink_to(mine)
    give_away(theirs / "summary")
    with pytest.raises(OSError, match=r"symbolic links|another user"):
        append(theirs / "summary", lambda size: "report")
    (theirs / "summary").unlink()
    (theirs / "summary").hardlink_to(mine)
    with pytest.raises(PermissionError, match="another user could have chosen"):
        append(theirs / "summary", lambda size: "report")
    assert mine.read_text() == "mine"
    plain = theirs / "plain"  # a runner's own file, and we are root in a container
    plain.write_text("before")
    give_away(plain)
    append(plain, lambda size: f" and {size}")
    assert plain.read_text() == "before and 6"


def test_the_new_file_goes_where_the_folder_was_opened(tmp_path: Path) -> None:
    """The folder is replaced by a link to another one while the file is being written."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    with folders.opened(folder) as handle:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(other)
        folders.put(handle, "report", b"new", 0o644)
    assert (tmp_path / "moved" / "report").read_text() == "new"
    assert list(other.iterdir()) == []


def test_who_is_killed_while_writing_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from nccl_doctor.system.files import write_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "write_whole(Path(sys.argv[1]), 'x' * (4 << 20))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "report.json")], check=False, timeout=30
    )
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full", [True, False])
def test_what_is_not_finished_is_taken_away(tmp_path: Path, full: bool) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "inside").touch()
    with pytest.raises(OSError, match=r"directory|empty"):
        (write_whole if full else write_private)(tmp_path / "report", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


# --- files that are believed ---


@as_root
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (give_away, "another user"),
        (lambda path: path.chmod(0o666), "others can write"),
        (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "is a link"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not a file"),
        (lambda path: path.write_bytes(b"x" * 1025), "longer than"),
        (lambda path: path.unlink(), "No such file"),
    ],
    ids=["foreign", "open", "link", "pipe", "long", "gone"],
)
def test_a_file_that_others_may_have_written_is_not_read(tmp_path: Path, spoil, words) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert read_own(path, 1024) == b"mine"
    spoil(path)
    with pytest.raises(OSError, match=words):
        read_own(path, 1024)


@as_root
def test_a_partial_report_of_a_stranger_is_not_believed(tmp_path: Path) -> None:
    """In a folder of all users, as /tmp, where each can only take away what is its own."""
    tmp_path.chmod(0o1777)
    views = HostReports(str(tmp_path), 10)
    for node in (1, 2, 3):
        assert views.write(node, view(f"nd{node}")) == ""
    give_away(tmp_path / "node1.json")
    (tmp_path / "elsewhere").write_bytes((tmp_path / "node2.json").read_bytes())
    (tmp_path / "node2.json").unlink()
    (tmp_path / "node2.json").symlink_to("elsewhere")
    (found,) = views.of([1, 2, 3], 0.0)
    assert found.cluster.hosts[0].name == "nd3"


@contextlib.contextmanager
def squashed(user: int) -> Iterator[None]:
    """As on a file server that takes root for another user: what root makes there is that user's,
    and root has no more rights than that user; setfsuid(2).
    """
    libc = ctypes.CDLL(None)
    libc.setfsuid(user)
    try:
        yield
    finally:
        libc.setfsuid(0)


@as_root
def test_who_is_root_believes_its_own_user_name_on_the_file_server(umask: None) -> None:
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        folder = Path(made)
        folder.chmod(0o777)
        with squashed(STRANGER):
            (folder / "file").write_text("ours")
            assert (folder / "file").stat().st_uid == STRANGER != os.geteuid()
            assert read_own(folder / "file", 100) == b"ours"
            key = shared_key(folder)
            assert shared_key(folder) == key
        with pytest.raises(PermissionError, match="another user"):
            read_own(folder / "file", 100)
        os.chown(folder / "file", STRANGER + 1, STRANGER + 1)
        with squashed(STRANGER), pytest.raises(PermissionError, match="another user"):
            read_own(folder / "file", 100)


# --- the private folder ---


def private_of(folder: Path) -> Path:
    return folder / ".private"


def refusal(folder: Path) -> str:
    with pytest.raises(PermissionError) as caught:
        shared_key(folder)
    return str(caught.value.strerror)


@as_root
def test_a_private_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    private_of(tmp_path).mkdir(0o700)
    give_away(private_of(tmp_path))
    assert refusal(tmp_path) == (f".private belongs to another user (uid {STRANGER}); remove it")
    views = HostReports(str(tmp_path), 10, FolderRedaction(None))
    assert "belongs to another user" in views.write(0, view("gandalf"))
    assert "belongs to another user" in views.leave(0, view("gandalf"), heard=True)
    assert [path.name for path in tmp_path.rglob("*")] == [".private"]


def test_a_private_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    private_of(tmp_path).mkdir()
    private_of(tmp_path).chmod(0o750)
    assert refusal(tmp_path) == "others can enter .private (mode 750); remove it"


def test_a_link_in_place_of_the_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(0o700)
    private_of(tmp_path).symlink_to("mine")
    assert refusal(tmp_path) == ".private is a link or a file, not a folder; remove it"
    assert list((tmp_path / "mine").iterdir()) == []


def test_hosts_that_start_together_get_one_key(tmp_path: Path) -> None:
    keys: set[bytes] = set()
    code = (
        "import sys; from nccl_doctor.report.redaction.cover import shared_key\n"
        "print(shared_key(sys.argv[1]).hex())"
    )
    many = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    keys = {process.communicate(timeout=60)[0] for process in many}
    assert len(keys) == 1
    assert mode(private_of(tmp_path)) == 0o700
    assert [(path.name, mode(path)) for path in private_of(tmp_path).iterdir()] == [("key", 0o600)]


# --- keys and maps ---


@as_root
def test_a_map_of_another_user_gives_no_key(tmp_path: Path) -> None:
    """Whoever knows the key finds the name behind every pseudonym."""
    path = tmp_path / "report.json.map.json"
    path.write_text(json.dumps({"key": "00" * 32, "pseudonyms": {}}))
    assert Cover(path).key == bytes(32)
    give_away(path)
    for make in (lambda: Cover(path), lambda: Cover(tmp_path / "x", beside=[str(path)])):
        with pytest.raises(PermissionError, match=r"another user .*--redact-key"):
            make()
    assert Cover(None, str(path)).key == bytes(32), "it was asked for by name"


# --- all of them, nowhere else ---

MAKES = {
    "chmod",
    "chown",
    "hardlink_to",
    "link",
    "makedirs",
    "mkdir",
    "mkdtemp",
    "mkstemp",
    "removedirs",
    "rename",
    "renames",
    "rmdir",
    "rmtree",
    "symlink",
    "symlink_to",
    "touch",
    "truncate",
    "unlink",
    "write_bytes",
    "write_text",
    "NamedTemporaryFile",
    "TemporaryDirectory",
    "TemporaryFile",
}
ALLOWED = {
    ("nccl_doctor/system/folders.py", "mkdir"),
    ("nccl_doctor/system/folders.py", "link"),
    ("nccl_doctor/system/folders.py", "unlink"),
    ("nccl_doctor/system/files.py", "makedirs"),
    ("nccl_doctor/system/files.py", "unlink"),
    ("nccl_doctor/system/kept.py", "rename"),
    ("nccl_doctor/cli/from_python.py", "TemporaryDirectory"),
    ("nccl_doctor/cli/from_python.py", "open"),
    ("nccl_doctor/gather/views.py", "unlink"),
    ("nccl_doctor/report/vendor.py", "TemporaryFile"),
    ("nccl_doctor/cli/help.py", "write_text"),
    ("nccl_doctor/system/terminal.py", "open"),
    ("nccl_doctor/observe/child.py", "rename"),
    ("nccl_doctor/system/forks.py", "TemporaryFile"),
    ("nccl_doctor/system/forks.py", "rename"),
    ("nccl_doctor/system/leaving.py", "unlink"),
    ("nccl_doctor/toolkit/storage/steps.py", "unlink"),
    ("checks/temp_dir.py", "TemporaryFile"),
    ("checks/temp_dir.py", "TemporaryDirectory"),
}
"""By a descriptor; in the folder that was asked for, or one of its own; a file without a name; no
file at all; NCCL's own; what the check is for.
"""


def test_files_are_made_in_one_place() -> None:
    root = Path(nccl_doctor.__file__).parent.parent
    may_make = re.compile(rf"\b({'|'.join([*MAKES, 'open'])})\b")
    found = set()
    for path in [*root.glob("nccl_doctor/**/*.py"), *root.glob("checks/**/*.py")]:
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if may_make.search(text) else ():
            if isinstance(node, ast.Call):
                called = node.func
                word = getattr(called, "attr", None) or getattr(called, "id", "")
                if word in MAKES:
                    found.add((name, word))
                if word == "open" and any(
                    isinstance(each, ast.Constant)
                    and isinstance(each.value, str)
                    and set(each.value) & set("wax+")
                    and set(each.value) <= set("rwaxbt+")
                    for each in node.args[:2]
                ):
                    found.add((name, "open"))
    assert found - ALLOWED == set(), "nccl_doctor.system.files makes files, and nobody else"
