"""Hosts made of namespaces, held by processes that end when this one does, however it ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.processes import PATH, LabError, Process, call, first_child

if TYPE_CHECKING:
    from tests.lab.lab import Lab

TOOLS = {
    "ip": "iproute2",
    "nft": "nftables",
    "ethtool": "ethtool",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
SUBNET = "192.168.77"
_LOCALHOST = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
_NAMESPACES = ["--net", "--uts", "--ipc", "--mount", "--pid"]
_FORK = ["--propagation", "private", "--fork", "--kill-child", "--mount-proc"]

_TRIAL = """
mount -t tmpfs tmpfs /dev/shm
ip link add trial0 type veth peer name trial1
ip link add trial2 type bridge
nft -f - <<END
table bridge trial {
    chain forward {
        type filter hook forward priority 0;
    }
}
table inet trial {
    chain prerouting {
        type nat hook prerouting priority -100;
    }
}
END
"""

# PID 1 of a host. What needs no network is set up here, by system calls: a program for each step
# takes three times as long. It then holds the namespaces until its standard input closes. Orphans
# are reaped by the kernel, as SIGCHLD is ignored.
_INIT = """
import _socket, ctypes, fcntl, os, signal, struct, sys

BIND, RECURSIVE, DETACH = 4096, 16384, 2
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
libc = ctypes.CDLL(None, use_errno=True)
etc = os.environ["LAB_ETC"]

def mount(source, target, kind=None, flags=0, options=None):
    words = [word and word.encode() for word in (source, target, kind, options)]
    if libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]):
        raise OSError(ctypes.get_errno(), "mount", target)

_socket.sethostname(os.environ["LAB_NAME"])
for name in ("hosts", "resolv.conf", "nsswitch.conf", "machine-id"):
    if os.path.exists(f"/etc/{name}"):
        mount(f"{etc}/{name}", f"/etc/{name}", flags=BIND)
if os.path.exists("/proc/sys/kernel/random/boot_id"):
    mount(f"{etc}/boot-id", "/proc/sys/kernel/random/boot_id", flags=BIND)
mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")
kept = f"{etc}/cgroup"
os.mkdir(kept)
try:
    mount("/sys/fs/cgroup", kept, flags=BIND | RECURSIVE)
except OSError:
    pass
else:
    mount("sysfs", "/sys", "sysfs")
    mount(kept, "/sys/fs/cgroup", flags=BIND | RECURSIVE)
    libc.umount2(kept.encode(), DETACH)
door = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
lo = fcntl.ioctl(door, GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
(flags,) = struct.unpack_from("h", lo, 16)
fcntl.ioctl(door, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | UP))
door.close()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""

# The namespaces of hosts come from this one: their tables of connections are small, as each look at
# the connections of a host goes through all of its table (Linux 6.1).
_SWITCH = """
sizes=/proc/sys/net/ipv4/tcp_child_ehash_entries
if [ -w $sizes ]; then echo 256 > $sizes; fi
echo ready
exec cat > /dev/null
"""
SWITCH = ["sh", "-ec", _SWITCH]


def trouble(path: str = PATH) -> str | None:
    """Why no lab can be built here and what to do about it, or None where one can."""
    missing = sorted(
        {package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)}
    )
    if sys.platform != "linux":
        return "the lab needs Linux (network namespaces)"
    if missing:
        return f"the lab needs {', '.join(missing)}: apt-get install -y {' '.join(missing)}"
    try:
        done = subprocess.run(
            ["unshare", *user_namespace(), *_NAMESPACES, *_FORK, "sh", "-ec", _TRIAL],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={"PATH": PATH},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the lab cannot make namespaces here: {error}"
    if done.returncode == 0:
        return None
    how = (
        "run it as root" if os.geteuid() else "it needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
    ) + " (in Docker: --privileged)"
    return f"the lab cannot make namespaces here ({done.stderr.strip()}); {how}"


def user_namespace() -> list[str]:
    """Options of unshare that let it work without root."""
    return ["--user", "--map-root-user"] if os.geteuid() else []


@dataclass(eq=False)
class Host:
    """One host. `init` is the process id, on the machine, of the PID 1 that holds it."""

    lab: Lab
    name: str
    index: int
    etc: Path
    holder: subprocess.Popen[str]
    init: int
    pid_namespace: str
    clock_s: int = 0
    """By how many seconds its uptime differs, and so the clocks that only count."""

    @property
    def address(self) -> str:
        """IPv4 address of eth0."""
        return f"{SUBNET}.{self.index + 1}"

    @property
    def enter(self) -> list[str]:
        """Command prefix that runs a command on this host."""
        user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        time = ["--time"] if self.clock_s else []
        return ["nsenter", "--target", str(self.init), *user, *_NAMESPACES, *time, "--"]

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> Process:
        """Start a command in `folder` (default: the lab's), with the lab's clean environment."""
        process = Process(self, argv, {**self.lab.env, **(env or {})}, folder or self.lab.folder)
        self.lab.processes.append(process)
        return process

    def call(self, *argv: str, stdin: str = "", timeout_s: float = 10.0) -> str:
        """Run a command to its end and return its standard output.

        Raises:
            LabError: it failed or took longer than `timeout_s` seconds.
        """
        return call([*self.enter, *argv], stdin, timeout_s)

    def python(self, code: str, *args: str, **options: Any) -> Process:
        """Start Python code that needs nothing but the standard library."""
        return self.run([sys.executable, "-S", "-u", "-c", code, *args], **options)

    def nft(self, rules: str) -> None:
        """Add nftables rules, as in a file for `nft -f`."""
        self.call("nft", "-f", "-", stdin=rules)

    def set_hosts(self, text: str) -> None:
        """Replace /etc/hosts; the lines for localhost stay."""
        (self.etc / "hosts").write_text(_LOCALHOST + text)

    def torchrun(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> Process:
        """Start torchrun with these arguments."""
        return self.run([sys.executable, "-m", "torch.distributed.run", *args], env, folder)

    def pids(self) -> list[int]:
        """Process ids, on the machine, of all that runs here but PID 1."""
        init = Path(f"/proc/{self.init}")
        try:
            is_up = os.readlink(init / "ns/pid") == self.pid_namespace
            inside = [entry for entry in os.listdir(init / "root/proc") if entry.isdigit()]
        except OSError:
            is_up = False
        if not is_up or inside == ["1"]:  # the kernel ends all others before PID 1 is gone
            return []
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.init:
                pid = int(entry)
                if self.lab.namespace_of(pid) == self.pid_namespace:
                    found.append(pid)
        return found

    def listeners(self) -> list[str]:
        """Listening and established TCP sockets, `local -> remote state`, loopback included."""
        states = {"01": "established", "0A": "listening"}
        found = []
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{self.init}/net/{table}").read_text().splitlines()[1:]
            for line in lines:
                _, local, remote, state = line.split()[:4]
                if state in states:
                    found.append(f"{_address(local)} -> {_address(remote)} {states[state]}")
        return found

    def shared_memory(self) -> list[str]:
        """Names under /dev/shm."""
        return sorted(os.listdir(f"/proc/{self.init}/root/dev/shm"))


def new_host(lab: Lab, index: int, name: str, switch: int, clock_s: int = 0) -> Host:
    """Start a host, below the namespaces of the process `switch`; it has no eth0 yet."""
    etc = lab.folder / f"etc-{name}"
    etc.mkdir()
    for file, text in {
        "hosts": _LOCALHOST,
        "resolv.conf": "",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "machine-id": f"{uuid.uuid4().hex}\n",
        "boot-id": f"{uuid.uuid4()}\n",
    }.items():
        (etc / file).write_text(text)
    user = ["--user", "--preserve-credentials"] if os.geteuid() else []
    above = ["nsenter", "--target", str(switch), *user, "--net"]
    time = ["--time", "--monotonic", str(clock_s), "--boottime", str(clock_s)] if clock_s else []
    holder = hold(
        [*above, "unshare", *_NAMESPACES, *time, *_FORK],
        {"LAB_NAME": name, "LAB_ETC": str(etc)},
        [sys.executable, "-I", "-S", "-c", _INIT],
    )
    init = first_child(holder.pid)
    assert init is not None
    space = os.readlink(f"/proc/{init}/ns/pid")
    return Host(lab, name, index, etc, holder, init, space, clock_s)


def hold(
    prefix: Sequence[str], env: Mapping[str, str], command: Sequence[str]
) -> subprocess.Popen[str]:
    """Start what holds namespaces until its standard input closes.

    Raises:
        LabError: it did not get ready.
    """
    holder = subprocess.Popen(
        [*prefix, *command],
        env={"PATH": PATH, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline().strip() != "ready":
        holder.wait(5)
        raise LabError(f"no namespace: {holder.stderr.read().strip()}")
    return holder


def _address(text: str) -> str:
    """One address of /proc/net/tcp: hexadecimal, little-endian words, then the port."""
    words, port = text.split(":")
    raw = b"".join(int(words[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(words), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, raw)}:{int(port, 16)}"
