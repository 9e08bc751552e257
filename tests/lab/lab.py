"""A cluster on one machine: hosts made of namespaces, joined by a bridge.

Every host has its own network (eth0 192.168.77.x, its own firewall, its own ephemeral ports), host
name, /etc/hosts, /etc/resolv.conf, machine id, /dev/shm and process table; all share the file
system. Nothing has a name on the machine itself: the bridge lives in a namespace of its own, and
all namespaces are held by processes that end when this one does, however it ends.

Works as root, and without root where user namespaces are allowed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TOOLS = {
    "ip": "iproute2",
    "nft": "nftables",
    "ethtool": "ethtool",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
SUBNET = "192.168.77"
MASTER_PORT = 29500
EPHEMERAL = (32768, 60999)
JOIN_S = 6.0
COLLECTIVE_S = 3.0
TOTAL_S = 40.0

_PATH = os.pathsep.join(
    [str(Path(sys.executable).parent), "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
)
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

# PID 1 of a host. What needs no network is set up here.
_INIT = """
hostname "$LAB_NAME"
for name in hosts resolv.conf nsswitch.conf machine-id; do
    if [ -e "/etc/$name" ]; then mount --bind "$LAB_ETC/$name" "/etc/$name"; fi
done
if [ -e /proc/sys/kernel/random/boot_id ]; then
    mount --bind "$LAB_ETC/boot-id" /proc/sys/kernel/random/boot_id
fi
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir "$LAB_ETC/cgroup"
if mount --rbind /sys/fs/cgroup "$LAB_ETC/cgroup"; then
    mount -t sysfs sysfs /sys
    mount --rbind "$LAB_ETC/cgroup" /sys/fs/cgroup
    umount -l "$LAB_ETC/cgroup"
fi
ip link set lo up
exec "$LAB_PYTHON" -I -S -c "$LAB_HOLD"
"""

# It then holds the namespaces until its standard input closes. Orphans are reaped by the kernel,
# as SIGCHLD is ignored (the trap of a shell would not survive exec everywhere).
_HOLD = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""

_SWITCH = "echo ready; exec cat > /dev/null"


class LabError(RuntimeError):
    """A command of the lab itself failed: not the fault of what is tested."""


def trouble(path: str = _PATH) -> str | None:
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
            ["unshare", *_user_namespace(), *_NAMESPACES, *_FORK, "sh", "-ec", _TRIAL],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={"PATH": _PATH},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the lab cannot make namespaces here: {error}"
    if done.returncode == 0:
        return None
    how = (
        "run it as root" if os.geteuid() else "it needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
    ) + " (in Docker: --privileged)"
    return f"the lab cannot make namespaces here ({done.stderr.strip()}); {how}"


def _user_namespace() -> list[str]:
    return ["--user", "--map-root-user"] if os.geteuid() else []


@dataclass(frozen=True)
class Line:
    """One line of output: seconds after the start of the process, `stdout` or `stderr`, text."""

    seconds: float
    stream: str
    text: str


class Process:
    """A command on a host. Output goes to two files, and to `lines` with the time of each line."""

    def __init__(self, host: Host, argv: Sequence[str], env: Mapping[str, str], folder: Path):
        self.host = host
        self.argv = list(argv)
        self.env = dict(env)
        self.lines: list[Line] = []
        self.returncode: int | None = None
        self.seconds: float | None = None
        self.started = time.monotonic()
        self._outer = subprocess.Popen(
            [*host.enter, "env", "-C", str(folder), *argv],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        stem = f"{host.name}.{self._outer.pid}"
        self._files = {name: folder / f"{stem}.{name}" for name in ("stdout", "stderr")}
        self._readers = []
        for name, stream in (("stdout", self._outer.stdout), ("stderr", self._outer.stderr)):
            assert stream is not None
            reader = threading.Thread(target=self._read, args=(name, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, name: str, stream: IO[str]) -> None:
        with self._files[name].open("w") as copy:
            for text in stream:
                self.lines.append(Line(time.monotonic() - self.started, name, text.rstrip("\n")))
                copy.write(text)
                copy.flush()

    @property
    def pid(self) -> int:
        """Process id on the machine (not in the host's table) of the command itself.

        Raises:
            LabError: it is over, or did not start within two seconds.
        """
        end = time.monotonic() + 2
        while self._outer.poll() is None and time.monotonic() < end:
            children = [pid for pid in self.host.pids() if _parent(pid) == self._outer.pid]
            if children:
                return children[0]
            time.sleep(0.002)
        raise LabError(f"{self.argv} does not run")

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._outer.poll() is not None:
            self.seconds = time.monotonic() - self.started
            self.returncode = self._outer.returncode
            for reader in self._readers:
                reader.join(1.0)  # a stray child may hold the pipe: then leave the rest
        return self.returncode

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it still runs after `timeout_s` seconds (it is left running)."""
        end = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the command and wait for it; its own children are left to the host's end."""
        if self.poll() is None:
            with suppress(LabError, ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._outer.kill()  # nsenter stops itself when its child is stopped
            self._outer.wait(5)
            self.poll()

    def _text(self, name: str) -> str:
        return "\n".join(line.text for line in list(self.lines) if line.stream == name)

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._text("stderr")

    def wait_for(self, text: str, timeout_s: float) -> float:
        """Seconds after the start at which a line with `text` came.

        Raises:
            LabError: it did not come within `timeout_s` seconds from now.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for line in list(self.lines):
                if text in line.text:
                    return line.seconds
            time.sleep(0.005)
        raise LabError(f"{text!r} was not printed by {self.argv}:\n{self.stdout}\n{self.stderr}")


@dataclass
class Host:
    """One host. `init` is the process id, on the machine, of the PID 1 that holds it."""

    lab: Lab
    name: str
    index: int
    etc: Path
    holder: subprocess.Popen[str]
    init: int
    pid_namespace: str

    @property
    def address(self) -> str:
        """IPv4 address of eth0."""
        return f"{SUBNET}.{self.index + 1}"

    @property
    def enter(self) -> list[str]:
        """Command prefix that runs a command on this host."""
        user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        return ["nsenter", "--target", str(self.init), *user, *_NAMESPACES, "--"]

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
        return _call([*self.enter, *argv], stdin, timeout_s)

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


def _address(text: str) -> str:
    """One address of /proc/net/tcp: hexadecimal, little-endian words, then the port."""
    words, port = text.split(":")
    raw = b"".join(int(words[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(words), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, raw)}:{int(port, 16)}"


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


def _call(argv: Sequence[str], stdin: str = "", timeout_s: float = 10.0) -> str:
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PATH": _PATH},
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{argv} took longer than {timeout_s} s") from error
    if done.returncode:
        raise LabError(f"{argv} failed ({done.returncode}): {done.stderr.strip()}\n{stdin}")
    return done.stdout


_LOCALHOST = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
_INHERITED = ("HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "COVERAGE_PROCESS_START")


@dataclass(frozen=True)
class Done:
    """How one process of a run ended. `code` is None where the lab had to kill it."""

    host: str
    rank: int | None
    code: int | None
    seconds: float
    stdout: str
    stderr: str
    lines: tuple[Line, ...]


@dataclass
class Run:
    """What a run of the doctor left behind.

    `report` is the coordinator's; `partial` maps node rank (or what stands for it) to the report of
    a participant that never got in; `leftovers` says what was not cleaned up: nothing, if all is
    well.
    """

    folder: Path
    done: list[Done] = field(default_factory=list)
    report: dict[str, Any] | None = None
    partial: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall time of the slowest process."""
        return max(done.seconds for done in self.done)

    @property
    def codes(self) -> list[int | None]:
        """Exit codes, in the order in which the processes were started."""
        return [done.code for done in self.done]

    def __str__(self) -> str:
        """Everything that a person would want to see when a test fails."""
        parts = []
        for done in self.done:
            parts.append(
                f"--- {done.host} rank {done.rank}: exit {done.code}, {done.seconds:.1f} s"
            )
            parts += [f"{line.seconds:7.2f} {line.stream[3:]} {line.text}" for line in done.lines]
        for name, report in {"coordinator": self.report, **self.partial}.items():
            if report is not None:
                parts.append(f"--- report of {name}: {report.get('verdict')}")
                parts += [
                    f"{found['severity']} {found['code']} {found['where']}"
                    f" by {found['explained_by']}: {found['message']}"
                    for found in report.get("findings", ())
                ]
                parts += [
                    f"check {check['name']}: {check['status']} {check['reason']}"
                    for check in report.get("checks", ())
                ]
        return "\n".join([*parts, f"leftovers: {self.leftovers}"])


class Lab:
    """A cluster, as a context manager. `lab["nd1"]` and `lab.hosts[1]` are the same host."""

    def __init__(self, hosts: Sequence[str] = ("nd0", "nd1"), folder: Path | None = None):
        self.names = tuple(hosts)
        self.hosts: list[Host] = []
        self.processes: list[Process] = []
        self._folder = folder
        self._switch: subprocess.Popen[str] | None = None
        self._runs = 0
        self._namespaces: dict[int, tuple[str, str]] = {}

    def __enter__(self) -> Lab:
        self._own_folder = self._folder is None
        self.folder = self._folder or Path(tempfile.mkdtemp(prefix="nccl-doctor-lab-"))
        self.env = {
            **{name: os.environ[name] for name in _INHERITED if name in os.environ},
            "PATH": _PATH,
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PYTHONUNBUFFERED": "1",
        }
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[self.names.index(name)]

    def _build(self) -> None:
        self._switch = self._hold(["unshare", *_user_namespace(), "--net"], {}, _SWITCH)
        self._in_switch = ["nsenter", "--target", str(self._switch.pid), "--net"] + (
            ["--user", "--preserve-credentials"] if os.geteuid() else []
        )
        self.in_switch("ip", "-batch", "-", stdin="link add br0 type bridge\nlink set br0 up\n")
        for index, name in enumerate(self.names):
            self.hosts.append(self._host(index, name))
        self.restore_names()
        batch = "".join(
            f"link add p{host.index} type veth peer name eth0 netns {host.init}\n"
            f"link set p{host.index} master br0 up\n"
            for host in self.hosts
        )
        self.in_switch("ip", "-batch", "-", stdin=batch)
        for host in self.hosts:
            host.call(
                *("ip", "-batch", "-"),
                stdin=f"addr add {host.address}/24 dev eth0\nlink set eth0 up\n",
            )

    def _host(self, index: int, name: str) -> Host:
        etc = self.folder / f"etc-{name}"
        etc.mkdir()
        for file, text in {
            "hosts": _LOCALHOST,
            "resolv.conf": "",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
            "machine-id": f"{uuid.uuid4().hex}\n",
            "boot-id": f"{uuid.uuid4()}\n",
        }.items():
            (etc / file).write_text(text)
        user = ["nsenter", "--target", str(self._switch_pid), "--user", "--preserve-credentials"]
        holder = self._hold(
            [*(user if os.geteuid() else []), "unshare", *_NAMESPACES, *_FORK],
            {
                "LAB_NAME": name,
                "LAB_ETC": str(etc),
                "LAB_PYTHON": sys.executable,
                "LAB_HOLD": _HOLD,
            },
            _INIT,
        )
        init = next(
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdigit() and _parent(int(entry)) == holder.pid
        )
        return Host(self, name, index, etc, holder, init, os.readlink(f"/proc/{init}/ns/pid"))

    @property
    def _switch_pid(self) -> int:
        assert self._switch is not None
        return self._switch.pid

    def _hold(
        self, prefix: Sequence[str], env: Mapping[str, str], script: str
    ) -> subprocess.Popen[str]:
        holder = subprocess.Popen(
            [*prefix, "sh", "-ec", script],
            env={"PATH": _PATH, **env},
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

    def in_switch(self, *argv: str, stdin: str = "") -> str:
        """Run a command where the bridge br0 and the ports p0, p1, ... of the hosts are."""
        return _call([*self._in_switch, *argv], stdin)

    def restore_names(self) -> None:
        """Give every host the /etc/hosts of a healthy cluster."""
        for host in self.hosts:
            host.set_hosts(self.names_text())

    def names_text(self, **other: str) -> str:
        """Lines of /etc/hosts, with other addresses for some names (empty: leave it out)."""
        addresses = {host.name: host.address for host in self.hosts} | other
        return "".join(f"{address} {name}\n" for name, address in addresses.items() if address)

    def namespace_of(self, pid: int) -> str:
        """PID namespace of a process, remembered as long as the same process has the number."""
        try:
            started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            known = self._namespaces.get(pid)
            if known is None or known[0] != started:
                known = (started, os.readlink(f"/proc/{pid}/ns/pid"))
                self._namespaces[pid] = known
        except OSError:
            return ""
        return known[1]

    def close(self) -> None:
        """End every process of every host; namespaces, links and rules go with them."""
        for holder in [host.holder for host in self.hosts] + (
            [self._switch] if self._switch else []
        ):
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert holder.stderr is not None
            holder.stdin.close()
            try:
                holder.wait(5)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait(5)
            holder.stdout.close()
            holder.stderr.close()
        for process in self.processes:
            process.kill()
        gone = time.monotonic() + 5
        while any(host.pids() for host in self.hosts) and time.monotonic() < gone:
            time.sleep(0.01)
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._own_folder = False

    def new_folder(self) -> Path:
        """A fresh folder for one run."""
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        (folder / "tmp").mkdir(parents=True)
        return folder

    def wait(self, processes: Sequence[Process], timeout_s: float) -> bool:
        """Wait until all have ended; after `timeout_s` kill the rest. Returns: nobody was late."""
        end = time.monotonic() + timeout_s
        running = list(processes)
        while running and time.monotonic() < end:
            time.sleep(0.01)
            running = [process for process in running if process.poll() is None]
        late = [process for process in processes if process.poll() is None]
        for process in late:
            process.kill()
            process.returncode = None
        return not late

    def torchrun(
        self,
        command: Sequence[str],
        *,
        nproc: int = 2,
        env: Mapping[str, str] | None = None,
        hosts: Sequence[str] | None = None,
        per_host: Mapping[str, Sequence[str]] | None = None,
        per_host_env: Mapping[str, Mapping[str, str]] | None = None,
        folder: Path | None = None,
    ) -> list[Process]:
        """Start the static torchrun of a job on each host; `per_host` adds or overrides options."""
        processes = []
        for host in self.hosts:
            if hosts is None or host.name in hosts:
                args = ["--nnodes", str(len(self.hosts)), "--nproc-per-node", str(nproc)]
                args += ["--node-rank", str(host.index), "--master-addr", self.names[0]]
                args += ["--master-port", str(MASTER_PORT), *(per_host or {}).get(host.name, ())]
                more = {**(env or {}), **(per_host_env or {}).get(host.name, {})}
                processes.append(host.torchrun([*args, *command], more, folder))
        return processes

    def plain(
        self,
        command: Sequence[str],
        *,
        nproc: int = 1,
        env: Mapping[str, str] | None = None,
        per_host: Mapping[str, Mapping[str, str]] | None = None,
        hosts: Sequence[str] | None = None,
        folder: Path | None = None,
    ) -> dict[int, Process]:
        """Start one process per rank with nothing but the plain variables.

        `per_host` changes variables of the ranks of a host. Returns: starting number → process.
        """
        started = {}
        for host in self.hosts:
            if hosts is not None and host.name not in hosts:
                continue
            for local in range(nproc):
                rank = host.index * nproc + local
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(self.hosts) * nproc),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(nproc),
                    "NODE_RANK": str(host.index),
                    "NNODES": str(len(self.hosts)),
                    "MASTER_ADDR": self.names[0],
                    "MASTER_PORT": str(MASTER_PORT),
                    **(env or {}),
                    **(per_host or {}).get(host.name, {}),
                }
                started[rank] = host.run([sys.executable, *command], variables, folder)
        return started

    def torchrun_doctor(
        self, *options: str, nproc: int = 2, timeout_s: float = TOTAL_S + 20, **more: Any
    ) -> Run:
        """Run the doctor under torchrun on every host, and read what it left."""
        folder = self.new_folder()
        command = ["-m", "nccl_doctor", *_options(folder, options)]
        more["env"] = {"TMPDIR": str(folder / "tmp"), **more.get("env", {})}
        processes = self.torchrun(command, nproc=nproc, folder=folder, **more)
        self.wait(processes, timeout_s)
        return self._collect(folder, {None: processes})

    def plain_doctor(
        self,
        *options: str,
        nproc: int = 1,
        timeout_s: float = TOTAL_S + 10,
        awaited: Sequence[int] | None = None,
        **more: Any,
    ) -> Run:
        """Run the doctor with plain variables, one process per rank, and read what it left.

        Once the `awaited` ranks (default: all) have ended, the others are killed.
        """
        folder = self.new_folder()
        command = ["-m", "nccl_doctor", *_options(folder, options)]
        more["env"] = {"TMPDIR": str(folder / "tmp"), **more.get("env", {})}
        started = self.plain(command, nproc=nproc, folder=folder, **more)
        self.wait([started[rank] for rank in awaited or started], timeout_s)
        self.wait(list(started.values()), 0.0)
        return self._collect(folder, {rank: [process] for rank, process in started.items()})

    def _collect(self, folder: Path, started: Mapping[int | None, Sequence[Process]]) -> Run:
        run = Run(folder)
        for rank, processes in started.items():
            for process in processes:
                run.done.append(
                    Done(
                        process.host.name,
                        rank,
                        process.returncode,
                        process.seconds or 0.0,
                        process.stdout,
                        process.stderr,
                        tuple(sorted(process.lines, key=lambda line: line.seconds)),
                    )
                )
        if (folder / "report.json").exists():
            run.report = json.loads((folder / "report.json").read_text())
        for path in folder.glob("report.node*.json"):
            number = path.stem.rpartition("node")[2]
            run.partial[int(number) if number.isdigit() else number] = json.loads(path.read_text())
        run.leftovers = self.leftovers(folder)
        return run

    def leftovers(self, folder: Path, grace_s: float = 2.0) -> list[str]:
        """What a finished run left behind: processes, sockets, shared memory, temporary files.

        What belongs to the processes that the test itself still runs (`foreign`) does not count.
        """
        end = time.monotonic() + grace_s
        while (found := self._leftovers(folder)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _leftovers(self, folder: Path) -> list[str]:
        found = []
        foreign = {p.pid: p for p in self.processes if p.poll() is None}
        for host in self.hosts:
            for pid in host.pids():
                if pid not in foreign:
                    found.append(f"process {_command(pid)} on {host.name}")
            if not any(process.host is host for process in foreign.values()):
                found += [f"socket {text} on {host.name}" for text in host.listeners()]
            found += [f"shared memory {name} on {host.name}" for name in host.shared_memory()]
        # The agent of torchrun keeps a folder for the error files of its workers.
        found += [
            f"file {path.name}"
            for path in (folder / "tmp").iterdir()
            if not path.name.startswith("torchelastic_")
        ]
        unknown = [
            path.name
            for path in folder.iterdir()
            if path.name != "tmp" and path.suffix not in (".stdout", ".stderr", ".json")
        ]
        return found + [f"file {name}" for name in unknown]

    @contextmanager
    def strike(
        self, rank: int, number: int, comm: str = "ncd:collectives", *, parent: bool = False
    ) -> Iterator[Strike]:
        """Send a signal to the first process named `comm` of this rank, as soon as it appears.

        `parent`: to the supervisor that forked it instead.
        """
        struck = Strike(self, rank, number, comm[:15], parent)
        struck.thread.start()
        try:
            yield struck
        finally:
            struck.over.set()
            struck.thread.join(5)


class Strike:
    """A signal on its way to a probe child. `pid`, as the host sees it, is set once it was sent."""

    def __init__(self, lab: Lab, rank: int, number: int, comm: str, parent: bool):
        self.lab, self.rank, self.number, self.comm, self.parent = lab, rank, number, comm, parent
        self.pid: int | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        # The child lives for some 50 ms: on a busy machine this thread must not queue for a core.
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        tables = [Path(f"/proc/{host.init}/root/proc") for host in self.lab.hosts]
        while self.pid is None and not self.over.wait(0.001):
            for table in tables:
                for entry in os.listdir(table):
                    if entry.isdigit() and entry != "1" and self._hit(table / entry):
                        self.pid = int(entry)
                        return

    def _hit(self, process: Path) -> bool:
        """Signal a process, given its folder in /proc, if it is the one."""
        wanted = f"RANK={self.rank}".encode()
        try:
            if (process / "comm").read_text().strip() != self.comm:
                return False
            # A fork shows the environment that its supervisor was started with.
            if wanted not in (process / "environ").read_bytes().split(b"\0"):
                return False
            if self.parent:
                stat = (process / "stat").read_text()
                process = process.parent / stat.rpartition(")")[2].split()[1]
            handle = os.open(process, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            signal.pidfd_send_signal(handle, self.number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} {comm} [{state}] {line}"


def _options(folder: Path, options: Sequence[str]) -> list[str]:
    return [
        *("run", "--json", str(folder / "report.json"), "--backend", "gloo"),
        *("--join-timeout", f"{JOIN_S:g}", "--collective-timeout", f"{COLLECTIVE_S:g}"),
        *("--timeout", f"{TOTAL_S:g}", *options),
    ]
