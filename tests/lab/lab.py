"""A cluster on one machine: hosts made of namespaces, joined by a bridge.

Every host has its own network (eth0 192.168.77.x, its own firewall, its own ephemeral ports), host
name, /etc/hosts, /etc/resolv.conf, machine id, /dev/shm and process table; all share the file
system. Nothing has a name on the machine itself: the bridge lives in a namespace of its own, and
all namespaces are held by processes that end when this one does, however it ends.

Works as root, and without root where user namespaces are allowed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab.hosts import SWITCH, Host, hold, new_host, user_namespace
from tests.lab.processes import PATH, Process, Strike, call, describe, wait_for_one
from tests.lab.run import Run
from tests.support.forkserver import quick_python_path
from tests.support.waiting import comes

MASTER_PORT = 29500
EPHEMERAL = (32768, 60999)
JOIN_S = 8.0
"""As short as may be, for tests in which somebody is waited for in vain."""
HEALTHY_S = 90.0
PATIENT = ("--join-timeout", "30", "--timeout", f"{HEALTHY_S:g}")
"""For those in which all come, and are measured, however slow a busy machine makes them."""
MEET = ("--select", "launch_record,own_name,port,ranks,collectives")
"""Few checks: for tests of how a run starts, spreads and ends; others run all of them."""
COLLECTIVE_S = 3.0
TOTAL_S = 40.0
_OF_TORCHRUN = ("torchelastic_", "torchinductor_")
"""Temporary folders of its agent: error files of its workers, and what its log imports with the
first exception.
"""
_INHERITED = ("HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "COVERAGE_PROCESS_START")


class Lab:
    """A cluster, as a context manager. `lab["nd1"]` and `lab.hosts[1]` are the same host.

    `clocks`: by how many seconds the uptime of a host differs, in a time namespace.
    `fresh`: whether the doctor is started on its hosts as a user would, or may be forked from a
    process that has imported torch. `frozen`: hosts that nobody waits for.
    """

    def __init__(
        self,
        hosts: Sequence[str] = ("nd0", "nd1"),
        folder: Path | None = None,
        clocks: Mapping[str, int] | None = None,
    ):
        self.names = tuple(hosts)
        self._clocks = clocks or {}
        self.fresh = False
        self.frozen: set[str] = set()
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
            "PATH": PATH,
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

    @property
    def python(self) -> str:
        """Python for launchers: one that has torch imported as it starts, if that may be."""
        return sys.executable if self.fresh else quick_python_path()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[self.names.index(name)]

    def _build(self) -> None:
        self._switch = hold(["unshare", *user_namespace(), "--net"], {}, SWITCH)
        self._in_switch = ["nsenter", "--target", str(self._switch.pid), "--net"] + (
            ["--user", "--preserve-credentials"] if os.geteuid() else []
        )
        self.in_switch("ip", "-batch", "-", stdin="link add br0 type bridge\nlink set br0 up\n")
        for index, name in enumerate(self.names):
            clock_s = self._clocks.get(name, 0)
            self.hosts.append(new_host(self, index, name, self._switch.pid, clock_s))
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

    def in_switch(self, *argv: str, stdin: str = "") -> str:
        """Run a command where the bridge br0 and the ports p0, p1, ... of the hosts are."""
        return call([*self._in_switch, *argv], stdin)

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
        comes(lambda: not any(host.pids() for host in self.hosts), 5)
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
        """Wait until all have ended but those of frozen hosts; after `timeout_s` kill the rest.

        Returns: nobody was late.
        """
        end = time.monotonic() + timeout_s
        running = list(processes)
        while (left := end - time.monotonic()) > 0:
            running = [process for process in running if process.poll() is None]
            if all(process.host.name in self.frozen for process in running):
                break
            wait_for_one(running, left)
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
        **more: Any,
    ) -> list[Process]:
        """Start the static torchrun of a job on each host; `per_host` adds or overrides options."""
        processes = []
        for host, args, wrap in self._topology(nproc, hosts, per_host, **more):
            variables = {**(env or {}), **(per_host_env or {}).get(host.name, {})}
            argv = [*wrap, self.python, "-m", "torch.distributed.run", *args, *command]
            processes.append(host.run(argv, variables, folder))
        return processes

    def _topology(
        self,
        nproc: int,
        hosts: Sequence[str] | None,
        per_host: Mapping[str, Sequence[str]] | None,
        *,
        late_s: Mapping[str, float] | None = None,
        after: Mapping[str, Callable[[], object]] | None = None,
        wrap: Mapping[str, Sequence[str]] | None = None,
    ) -> Iterator[tuple[Host, list[str], list[str]]]:
        """Each host when it is due to start, its options, and what stands before the command.

        `per_host` adds or overrides options; `late_s` is how much later a host starts, and `after`
        is called before it does.
        """
        due = {name: (late_s or {}).get(name, 0.0) for name in hosts or self.names}
        begin = time.monotonic()
        for name in sorted(due, key=lambda name: due[name]):
            time.sleep(max(0.0, begin + due[name] - time.monotonic()))  # who is late is the test
            (after or {}).get(name, lambda: None)()
            host = self[name]
            args = ["--nnodes", str(len(self.hosts)), "--nproc-per-node", str(nproc)]
            args += ["--node-rank", str(host.index), "--master-addr", self.names[0]]
            args += ["--master-port", str(MASTER_PORT), *(per_host or {}).get(name, ())]
            yield host, args, list((wrap or {}).get(name, ()))

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
        self, *options: str, nproc: int = 2, timeout_s: float = HEALTHY_S + 20, **more: Any
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
        timeout_s: float = HEALTHY_S + 20,
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

    def own_doctor(
        self,
        *options: str,
        nproc: int = 2,
        timeout_s: float = HEALTHY_S + 20,
        hosts: Sequence[str] | None = None,
        per_host: Mapping[str, Sequence[str]] | None = None,
        per_host_env: Mapping[str, Mapping[str, str]] | None = None,
        env: Mapping[str, str] | None = None,
        job: Sequence[str] = (),
        rendezvous: str = "static",
        **more: Any,
    ) -> Run:
        """Run the doctor's own launcher on every host, and read what it left.

        `job`: script and arguments of a torchrun to become in the end, which then tells the
        topology; with `rendezvous` c10d, no node ranks.
        """
        folder = self.new_folder()
        started: dict[int | None, list[Process]] = {}
        for host, args, wrap in self._topology(nproc, hosts, per_host, **more):
            variables = {"TMPDIR": str(folder / "tmp"), **(env or {})}
            variables |= (per_host_env or {}).get(host.name, {})
            python = self.python if wrap else sys.executable
            argv = [*wrap, python, "-m", "nccl_doctor", *_options(folder, options)]
            if rendezvous == "c10d":
                endpoint = f"{self.names[0]}:{MASTER_PORT}"
                args = [*args[:4], "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            torchrun = ["--", self.python, "-m", "torch.distributed.run"] if job else []
            argv += [*torchrun, *args, *job]
            started[host.index] = [host.run(argv, variables, folder)]
        self.wait([process for each in started.values() for process in each], timeout_s)
        return self._collect(folder, dict(sorted(started.items())))

    def _collect(self, folder: Path, started: Mapping[int | None, Sequence[Process]]) -> Run:
        run = Run.read(folder, started)
        run.leftovers = self.leftovers(folder)
        return run

    def leftovers(self, folder: Path, grace_s: float = 2.0) -> list[str]:
        """What a finished run left behind: processes, sockets, shared memory, temporary files.

        What belongs to processes that the test itself still runs does not count.
        """
        end = time.monotonic() + grace_s
        # What processes hold goes with them: until then nothing else is looked at.
        comes(lambda: not self._processes(), grace_s)
        comes(lambda: not self._leftovers(folder), end - time.monotonic())
        return self._leftovers(folder)

    def _processes(self) -> list[str]:
        foreign = {process.pid for process in self.processes if process.poll() is None}
        return [
            f"process {describe(pid)} on {host.name}"
            for host in self.hosts
            for pid in host.pids()
            if pid not in foreign
        ]

    def shared_memory(self) -> list[str]:
        """Segments of all hosts, in words."""
        return [
            f"shared memory {name} on {host.name}"
            for host in self.hosts
            for name in host.shared_memory()
        ]

    def _leftovers(self, folder: Path) -> list[str]:
        found = self._processes()
        busy = {process.host.name for process in self.processes if process.poll() is None}
        for host in self.hosts:
            if host.name not in busy:
                found += [f"socket {text} on {host.name}" for text in host.listeners()]
        found += self.shared_memory()
        found += [
            f"file {path.name}"
            for path in (folder / "tmp").iterdir()
            if not path.name.startswith(_OF_TORCHRUN)
        ]
        unknown = [
            path.name
            for path in folder.iterdir()
            if path.name != "tmp" and path.suffix not in (".stdout", ".stderr", ".json")
        ]
        return found + [f"file {name}" for name in unknown]

    @contextmanager
    def strike(
        self,
        rank: int | None,
        number: int,
        comm: str = "ncd:collectives",
        *,
        parent: bool = False,
        hosts: Sequence[str] | None = None,
        act: Callable[[], None] | None = None,
    ) -> Iterator[Strike]:
        """Send a signal to the first process named `comm` of this rank, as soon as it appears.

        `parent`: to the supervisor that forked it instead. Ranks of the own launcher are forked and
        show no RANK: then `rank` is None, and `hosts` tells where. `act`: call this instead.
        """
        where = [host for host in self.hosts if hosts is None or host.name in hosts]
        struck = Strike(where, rank, number, comm[:15], parent, act=act)
        struck.thread.start()
        try:
            yield struck
        finally:
            struck.over.set()
            struck.thread.join(5)


def _options(folder: Path, options: Sequence[str]) -> list[str]:
    return [
        *("run", "--json", str(folder / "report.json"), "--backend", "gloo"),
        *("--join-timeout", f"{JOIN_S:g}", "--collective-timeout", f"{COLLECTIVE_S:g}"),
        *("--timeout", f"{TOTAL_S:g}", *options),
    ]
