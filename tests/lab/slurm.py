"""Real Slurm on the hosts of a lab: slurmctld on the first, a slurmd on each, munge between them.

The hosts have names, networks and boot ids of their own, so to Slurm and to the doctor they are
machines. Everything is in the lab's folder and in namespaces, and ends with the lab.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.lab import HEALTHY_S, PATIENT, Lab
from tests.lab.processes import PATH, LabError, Process
from tests.lab.run import Run
from tests.support.waiting import comes

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
}
CPUS = 4
"""Of every node, whatever the machine has: tasks are placed by them, and bound to none."""
START_S = 20.0
_ETC = "/etc/slurm"
"""Of every host; what slurmd calls has no SLURM_CONF, so slurm.conf stands where it is expected."""
_CONFIG = """
ClusterName=lab
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName={names} CPUs={cpus} State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What to install for these tests, or None."""
    packages = {p for name, p in PROGRAMS.items() if not shutil.which(name, path=PATH)}
    if packages:
        return f"needs {' '.join(sorted(packages))}: apt-get install"
    return None if Path(_ETC).is_dir() else f"this Slurm looks for slurm.conf elsewhere than {_ETC}"


def impossible() -> str | None:
    """Why no installation can help, or None."""
    return "slurmd needs root: it becomes other users" if os.geteuid() else None


class Slurm:
    """Slurm on all hosts of a lab, up and idle."""

    def __init__(self, lab: Lab) -> None:
        """Start it.

        Raises:
            LabError: the nodes were not idle within `START_S` seconds.
        """
        self.lab = lab
        self.folder = lab.folder / "slurm"
        (self.folder / "state").mkdir(parents=True)
        self.etc = self.folder / "etc"
        self.etc.mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.configure("")
        self.daemons: list[Process] = []
        for host in lab.hosts:
            host.call("mount", "--bind", str(self.etc), _ETC)
            host.call("mount", "-t", "tmpfs", "tmpfs", "/run")
            host.call("mkdir", "-m", "755", "/run/munge")
            log = self.folder / f"munge.{host.name}.log"
            seed = self.folder / f"munge.{host.name}.seed"
            self._start(
                host.name,
                *("munged", "--foreground", "--force", f"--key-file={key}", f"--log-file={log}"),
                *("--pid-file=/run/munge/pid", f"--seed-file={seed}"),
            )
        self._start(lab.names[0], "slurmctld", "-D", "-i")
        for host in lab.hosts:
            self._start(host.name, "slurmd", "-D", "-N", host.name)
        self._await_nodes()

    def configure(self, more: str) -> None:
        """Write slurm.conf, with these lines too; `reconfigure` makes running daemons read it."""
        lab = self.lab
        (self.etc / "slurm.conf").write_text(
            _CONFIG.format(
                first=lab.names[0], folder=self.folder, names=",".join(lab.names), cpus=CPUS
            )
            + more
        )

    def reconfigure(self, more: str) -> None:
        """Give all daemons a slurm.conf with these lines.

        Raises:
            LabError: they were not told.
        """
        self.configure(more)
        done = self.client("scontrol", "reconfigure")
        if done.poll() != 0:
            raise LabError(f"scontrol reconfigure: {done.stderr}\n{self.logs()}")

    def _start(self, host: str, *command: str) -> None:
        self.daemons.append(self.lab[host].run(command))

    def _await_nodes(self) -> None:
        def states() -> list[str]:
            return self.client("sinfo", "--noheader", "--Node", "--format", "%T").stdout.split()

        def ended() -> list[Process]:
            return [daemon for daemon in self.daemons if daemon.poll() is not None]

        idle = ["idle"] * len(self.lab.hosts)
        comes(lambda: states() == idle or ended(), every_s=0.2)
        if gone := ended():
            raise LabError(f"{gone[0].argv} ended: {gone[0].stderr}\n{self.logs()}")
        if (found := states()) != idle:
            raise LabError(f"no idle nodes: {found}\n{self.logs()}")

    def logs(self) -> str:
        """The last words of all daemons."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def client(
        self,
        *command: str,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> Process:
        """Run one of Slurm's commands on the first host, to its end."""
        process = self.lab.hosts[0].run(command, env, folder)
        if not self.lab.wait([process], timeout_s):
            raise LabError(f"{command} took longer than {timeout_s} s: {process.stderr}")
        return process

    def state_of(self, node: str) -> str:
        """`scontrol show node`."""
        return self.client("scontrol", "show", "node", node).stdout

    def doctor(
        self, srun: Sequence[str], *options: str, env: Mapping[str, str] | None = None
    ) -> Run:
        """`srun … python -m nccl_doctor run`, and what it left; `env`: of all tasks."""
        folder = self.lab.new_folder()
        command = ["srun", *srun, self.lab.python, "-m", "nccl_doctor", "run"]
        command += ["--json", str(folder / "report.json"), "--backend", "gloo"]
        command += [*PATIENT, *options]
        variables = {"TMPDIR": str(folder / "tmp"), **(env or {})}
        process = self.client(*command, folder=folder, env=variables, timeout_s=HEALTHY_S + 20)
        return Run.read(folder, {None: [process]})

    def rest(self) -> list[str]:
        """Command lines of processes of the doctor that are still there."""
        found = []
        for host in self.lab.hosts:
            for pid in host.pids():
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if "nccl_doctor" in line or "ncd:" in line:
                    found.append(line)
        return found
