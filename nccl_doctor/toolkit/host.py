"""The system of this host: addresses, sockets, processes, memory, mounts, open files, load.

For `observe` only. It comes from psutil, and nothing else in nccl-doctor imports psutil: what a
check needs more of it goes here. psutil is imported at the first call, so `--help` does not pay for
it. What `root` is given is read below that folder, as below `Context.root`.

By hand is what psutil does not say, or says at a price that a check may not pay:

* flags and MTU of an interface: `psutil.net_if_stats` also asks every driver for its speed, which
  on a sick NIC takes long or fails, and then says nothing of the others; it knows no labels.
* the table of sockets: psutil does not say whose a socket is, and for each one looks through the
  open files of every process.
* mapped files (`nccl_doctor.toolkit.libraries`): psutil reads `smaps`, for which the kernel walks
  all pages: 0.2 to 0.6 s in a process with torch, in place of 1 ms.
* state and wait channel of a process (`nccl_doctor.observe`, check `stuck_processes`): psutil gives
  words in place of the kernel's letters and has no flags and no wait channel.
* limits (`resource`) and file systems (`os.statvfs`): Python has them.
* control groups, ARP, capabilities: `nccl_doctor.toolkit.cgroup`, `.privileges`.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from nccl_doctor.system.masking import masked

ROOT = Path("/")
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_SIOCGIFCONF, _SIOCGIFNETMASK = 0x8912, 0x891B
_IFREQ = 40
"""Bytes of a `struct ifreq` with pointers of 64 bits."""
_MOST_ADDRESSES = 256
_MOST_FILES = 4096
LISTEN, TIME_WAIT = "0A", "06"
"""States of a `Socket`, as the kernel writes them (include/net/tcp_states.h)."""
_INTERPRETERS = tuple(
    (re.compile(name), re.compile(code), tuple(takes.split()))
    for name, code, takes in (
        (r"(?:python|pypy)[\d.]*t?", r"-[A-Za-z]*c|-$", "-X -W --check-hash-based-pycs"),
        (r"-?(?:ba|da|z|k)?sh", r"-[A-Za-z]*[cs]", "-o +o -O +O --rcfile --init-file"),
        (r"perl[\d.]*|ruby[\d.]*", r"-[A-Za-z]*[eE]|-$", "-I -r"),
        (r"node(?:js)?", r"-[A-Za-z]*[ep]|--eval|--print|-$", "-r --require --import --loader -C"),
    )
)
"""Programs that run a script; which option says that the next word is the program itself; and those
that take the next word for something else."""


class Address(NamedTuple):
    """An address of an interface, numeric and without a zone.

    `prefix` is the length of its subnet prefix in bits, None where there is none.
    """

    interface: str
    address: str
    prefix: int | None


class Socket(NamedTuple):
    """A TCP socket of this network namespace: local port, state, and the user that owns it."""

    port: int
    state: str
    uid: int


class Mount(NamedTuple):
    """A mounted file system; `options` are separated by commas, `source` is a device or server."""

    folder: str
    kind: str
    options: str
    source: str = ""


def text_of(path: Path) -> str:
    """Content of a small file of the kernel, without blanks at its ends; empty if unreadable."""
    try:
        # Without the buffers of `read_text`, which cost four times as much: a host with thirty
        # RDMA devices has six hundred such files, and several checks read them.
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def is_first_namespace(proc: Path) -> bool:
    """True if all processes of the machine can be seen: no container has its kernel threads."""
    return text_of(proc / "2/comm") == "kthreadd"


def host_name() -> str:
    """The name that this host calls itself; bytes that are no UTF-8 are written as numbers.

    The kernel takes any bytes, and Python gives them as text that cannot be written.
    """
    return os.fsencode(socket.gethostname()).decode(errors="backslashreplace")


# Interfaces ---------------------------------------------------------------------------------------


def addresses() -> list[Address]:
    """IPv4 addresses, then IPv6 addresses, each in the order of getifaddrs(3), by which NCCL and
    gloo choose.

    An address with a label (`eth0:1`) has the label for its interface. Where netlink is forbidden
    (SELinux, AppArmor, seccomp), so that NCCL and gloo learn nothing, they are read without it.
    """
    try:
        with _psutil() as psutil:
            interfaces = psutil.net_if_addrs()
    except OSError:
        return _addresses_without_netlink()
    # psutil groups by interface, those with IPv4 first; the kernel lists IPv6 as it lists links.
    links = {name: index for index, name in enumerate(interface_names())}
    found = [
        (entry.family, Address(name, entry.address.partition("%")[0], _prefix(entry.netmask)))
        for name, entries in interfaces.items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]

    def order(pair: tuple[int, Address]) -> tuple[int, int]:
        family, address = pair
        is_v6 = family == socket.AF_INET6
        return family, links.get(address.interface, len(links)) if is_v6 else 0

    return [address for _, address in sorted(found, key=order)]


def interface_names() -> list[str]:
    """Names of all interfaces, with an address or without, up or down."""
    try:
        return [name for _, name in socket.if_nameindex()]
    except OSError:  # netlink is forbidden
        return _interfaces_of_proc()


def _interfaces_of_proc() -> list[str]:
    lines = text_of(Path("/proc/net/dev")).splitlines()[2:]
    return [line.partition(":")[0].strip() for line in lines]


def _addresses_without_netlink() -> list[Address]:
    """The same by ioctl and /proc, which know IPv4 by one address for each name or label."""
    found = []
    for name, packed in _configured():
        mask = _ask_interface(name, _SIOCGIFNETMASK, "4xI")
        found.append(Address(name, socket.inet_ntoa(packed), mask.bit_count()))
    for line in text_of(Path("/proc/net/if_inet6")).splitlines():
        words = line.split()
        if len(words) == 6:
            address = str(ipaddress.IPv6Address(int(words[0], 16)))
            found.append(Address(words[5], address, int(words[2], 16)))
    return found


def _configured() -> list[tuple[str, bytes]]:
    """(name or label, packed IPv4 address) of SIOCGIFCONF, netdevice(7)."""
    answer = ctypes.create_string_buffer(_MOST_ADDRESSES * _IFREQ)
    request = struct.pack("iP", len(answer), ctypes.addressof(answer))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            used, _ = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, request))
    except OSError:
        return []
    rows = (answer.raw[start : start + _IFREQ] for start in range(0, used, _IFREQ))
    return [(row[:16].partition(b"\0")[0].decode(errors="replace"), row[20:24]) for row in rows]


def interface_flags(name: str) -> int:
    """IFF_UP, IFF_RUNNING and the other flags of netdevice(7); 0 where there is no such interface.

    IFF_RUNNING: administratively up, and with a carrier.
    """
    return int(_ask_interface(name, _SIOCGIFFLAGS, "H"))


def interface_mtu(name: str) -> int:
    """Bytes that an interface takes in one packet; 0 where there is no such interface."""
    return int(_ask_interface(name, _SIOCGIFMTU, "i"))


def _ask_interface(name: str, question: int, form: str) -> int:
    request = struct.pack("16s24x", os.fsencode(name)[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, question, request)
    except OSError:
        return 0
    return int(struct.unpack_from(form, answer, 16)[0])


def _prefix(netmask: str | None) -> int | None:
    if not netmask:
        return None
    return int(ipaddress.ip_address(netmask.partition("%")[0])).bit_count()


def cpu_list(path: Path) -> list[int]:
    """The numbers of a file with `0-31,64-95`; none where it cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return []
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return []
        found |= set(range(int(first), int(last or first) + 1))
    return sorted(found)


# Sockets ------------------------------------------------------------------------------------------


def tcp_sockets(root: Path = ROOT) -> Iterator[Socket]:
    """Every TCP socket of this network namespace; none where that cannot be read."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if len(words) > 7:
                yield Socket(int(words[1].rpartition(":")[2], 16), words[3], int(words[7]))


def socket_process(port: int, *, listening: bool, root: Path = ROOT) -> int | None:
    """Process id of the holder of a TCP port; None where this user cannot see it."""
    with _psutil(root) as psutil:
        connections = psutil.net_connections("tcp")
    for one in connections:
        mine = one.laddr and one.laddr.port == port and one.pid is not None
        if mine and (one.status == psutil.CONN_LISTEN) == listening:
            return int(one.pid)
    return None


# Processes ----------------------------------------------------------------------------------------


def command_line(pid: int, root: Path = ROOT) -> list[str]:
    """Words of the command of a process; empty where it is gone or may not be seen."""
    with _psutil(root) as psutil:
        try:
            return list(psutil.Process(pid).cmdline())
        except (psutil.Error, OSError):
            return []


def program(words: Sequence[str]) -> str:
    """Program and script in the command line of another process: its arguments may hold secrets.

    `python -u train.py --key=X` gives `python train.py`, `bash -c "…"` gives `bash`.
    """
    if len(words) == 1:
        words = words[0].split()  # a process that gave itself a name of its own
    if not words:
        return ""
    shown = [words[0]]
    name = words[0].rpartition("/")[2]
    for known, code, takes in _INTERPRETERS:
        if known.fullmatch(name):
            shown += _script(words[1:], code, takes)
    return masked(" ".join(" ".join(shown).split()))


def _script(words: Sequence[str], code: re.Pattern[str], takes: Sequence[str]) -> list[str]:
    """The script, or `-m` and the module, behind the options of an interpreter; none where the
    program itself stands in the command line.
    """
    rest = iter(words)
    for word in rest:
        if code.match(word):
            break
        if word == "-m":
            return [word, next(rest, "")]
        if not word.startswith(("-", "+")):
            return [word]
        if word in takes:
            next(rest, None)
    return []


def ancestors(root: Path = ROOT) -> list[int]:
    """Process ids of those that started this process: its parent, the parent of that, and so on."""
    with _psutil(root) as psutil:
        try:
            return [process.pid for process in psutil.Process().parents()]
        except (psutil.Error, OSError):
            return []


def user_tasks(root: Path = ROOT) -> int:
    """Processes and threads of this process's user, by its real id, that can be seen."""
    mine, count = os.getuid(), 0
    with _psutil(root) as psutil:
        try:
            pids = psutil.pids()
        except (OSError, IndexError):  # psutil's own, where no process can be seen at all
            return 0
        for pid in pids:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    count += process.num_threads() if process.uids().real == mine else 0
            except (psutil.Error, OSError):  # gone by now
                continue
    return count


def open_descriptors() -> int:
    """Number of files that this process has open, with sockets and pipes."""
    with _psutil() as psutil:
        try:
            return int(psutil.Process().num_fds())
        except psutil.Error:  # no /proc, or that of another PID namespace
            return sum(map(_is_open, range(_MOST_FILES)))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# The machine --------------------------------------------------------------------------------------


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that a program can get without swapping; None where that cannot be read."""
    with _psutil(root) as psutil:
        try:
            return int(psutil.virtual_memory().available)
        except (OSError, LookupError, ValueError):  # a table without what every kernel has in it
            return None


def mounts(root: Path = ROOT) -> list[Mount]:
    """Mounted file systems, the last of one folder lies on top.

    Raises:
        OSError: that cannot be read.
    """
    with _psutil(root) as psutil:
        found = psutil.disk_partitions(all=True)
    return [Mount(each.mountpoint, each.fstype, each.opts, each.device) for each in found]


def load_average() -> float | None:
    """Processes that wanted to run in the last minute; None where the kernel does not say."""
    with _psutil() as psutil:
        try:
            return float(psutil.getloadavg()[0])
        except OSError:
            return None


def import_psutil() -> None:
    """Import psutil now: before processes are forked, once for all of them. One that is missing is
    reported by a check that needs it.
    """
    with suppress(ImportError), _psutil():
        pass


@contextmanager
def _psutil(root: Path = ROOT) -> Iterator[Any]:
    """Psutil that reads below `root`: for this call only, for DeepSpeed asks it too."""
    import psutil

    before = psutil.PROCFS_PATH
    # "//proc" for the real one: psutil takes the mounts of "/proc" from /etc/mtab, which an image
    # may have as a file of its own.
    psutil.PROCFS_PATH = f"{root}/proc"
    try:
        yield psutil
    finally:
        psutil.PROCFS_PATH = before
