"""Real ssh between the hosts of a lab: a server on each, and root's keys in a home of the lab's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.lab.hosts import Host
from tests.lab.lab import COLLECTIVE_S, JOIN_S, TOTAL_S, Lab
from tests.lab.processes import PATH, LabError
from tests.lab.run import Run
from tests.support.waiting import comes

PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
_CONFIG = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
StrictModes no
UsePAM no
UseDNS no
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
LogLevel ERROR
"""


def missing() -> str | None:
    """What to install for these tests, or None."""
    packages = {p for name, p in PROGRAMS.items() if not shutil.which(name, path=PATH)}
    return f"needs {' '.join(sorted(packages))}: apt-get install" if packages else None


def impossible() -> str | None:
    """Why no installation can help, or None."""
    return "sshd needs root: it becomes other users" if os.geteuid() else None


class Ssh:
    """ssh on the hosts of a lab: every host may log in on every other, as soon as it serves."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.folder / "ssh"
        self.home = lab.folder / "home"
        keys = self.home / ".ssh"
        self.folder.mkdir()
        keys.mkdir(parents=True)
        for key in (self.folder / "host_key", keys / "id_ed25519"):
            _keygen("-t", "ed25519", "-N", "", "-C", "lab", "-f", str(key))
        shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")
        public = (self.folder / "host_key.pub").read_text()
        hosts = [name for host in lab.hosts for name in (host.name, host.address)]
        (keys / "known_hosts").write_text("".join(f"{name} {public}" for name in hosts))
        # What a person would have in their shell there: the lab's own environment.
        self.exports = self.home / ".deepspeed_env"
        self.export()
        passwd = self.folder / "passwd"
        lines = Path("/etc/passwd").read_text().splitlines()
        passwd.write_text("".join(f"{_at(line, str(self.home))}\n" for line in lines))
        (self.folder / "sshd_config").write_text(_CONFIG.format(folder=self.folder, home=self.home))
        for host in lab.hosts:  # ssh asks the table of users for the home, not the environment
            host.call("mount", "--bind", str(passwd), "/etc/passwd")

    def export(self, **variables: str) -> None:
        """Variables of all hosts, besides the lab's own."""
        names = ("OMP_NUM_THREADS", "RES_OPTIONS", "NO_COLOR")
        every = {**{name: self.lab.env[name] for name in names}, **variables}
        self.exports.write_text("".join(f"{k}={v}\n" for k, v in every.items()))

    def serve(self, *names: str, keys: str = "", env: Mapping[str, str] | None = None) -> None:
        """Start the servers of these hosts, which let in the keys of the file `keys` (default:
        those of the lab), and wait until they answer. `env` is what programs there start with.
        """
        more = ["-o", f"AuthorizedKeysFile={keys}"] if keys else []
        if env:
            more += ["-o", f"SetEnv={' '.join(f'{name}={value}' for name, value in env.items())}"]
        program = str(shutil.which("sshd", path=PATH))
        for host in (self.lab[name] for name in names):
            host.call("mount", "-t", "tmpfs", "tmpfs", "/run")
            host.call("mkdir", "-m", "755", "/run/sshd")
            server = host.run([program, "-D", "-e", "-f", str(self.folder / "sshd_config"), *more])
            comes(lambda h=host, s=server: _serves(h) or s.poll() is not None)
            if not _serves(host):
                raise LabError(f"no sshd on {host.name}: {server.stderr}")

    def run(
        self,
        *options: str,
        lines: Sequence[str] = (),
        at: Host | None = None,
        env: Mapping[str, str] | None = None,
        join_s: float = JOIN_S,
        total_s: float = TOTAL_S,
        during: Callable[[], None] | None = None,
        grace_s: float = 2.0,
    ) -> Run:
        """Run the doctor with a hostfile of all hosts (or these lines), and read what it left, if
        need be after `grace_s` seconds. `during` is called while it runs.
        """
        lab = self.lab
        folder = lab.new_folder()
        self.export(TMPDIR=str(folder / "tmp"), **(env or {}))
        hosts = self.folder / "hosts"
        hosts.write_text("\n".join(lines or [f"{host.name} slots=1" for host in lab.hosts]) + "\n")
        command = [lab.python, "-m", "nccl_doctor", "run", "--hostfile", str(hosts)]
        command += ["--json", str(folder / "report.json"), "--backend", "gloo"]
        command += ["--join-timeout", f"{join_s:g}", "--collective-timeout", f"{COLLECTIVE_S:g}"]
        command += ["--timeout", f"{total_s:g}", *options]
        here = {"HOME": str(self.home), "TMPDIR": str(folder / "tmp")}
        process = (at or lab.hosts[0]).run(command, here, folder)
        if during is not None:
            during()
        lab.wait([process], total_s + 20)
        lab.leftovers(folder, grace_s)
        return lab._collect(folder, {None: [process]})


def _serves(host: Host) -> bool:
    return ":22 " in " ".join(host.listeners())


def _at(line: str, home: str) -> str:
    """A line of /etc/passwd, with another home for root."""
    words = line.split(":")
    if words[0] == "root":
        words[5], words[6] = home, "/bin/sh"
    return ":".join(words)


def _keygen(*words: str) -> None:
    done = subprocess.run(
        ["ssh-keygen", "-q", *words],
        env={"PATH": PATH},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if done.returncode:
        raise LabError(f"ssh-keygen: {done.stderr}")
