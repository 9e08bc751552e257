"""The lab does what it says: hosts are apart, faults bite, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.hosts import Host, trouble
from tests.lab.lab import Lab
from tests.lab.processes import LabError, Process, describe
from tests.support.waiting import until

_ECHO = """
import socket, sys, threading
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("listening", flush=True)
def serve(client):
    while data := client.recv(65536):
        client.sendall(data)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""

# Prints connected/refused/timeout/errno, then how much of the payload came back.
_DIAL = """
import errno, socket, sys
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sock = socket.socket()
sock.settimeout(2.0)
try:
    sock.connect((address, port))
except TimeoutError:
    print("dropped")
    sys.exit()
except OSError as error:
    print(errno.errorcode.get(error.errno, error.errno))
    sys.exit()
try:
    sock.sendall(b"x" * size)
    left = size
    while left and (data := sock.recv(min(left, 65536))):
        left -= len(data)
    print("echoed" if not left else "closed")
except TimeoutError:
    print("mute")
"""

PORT = 45678


def echo(host: Host, port: int = PORT) -> Process:
    process = host.python(_ECHO, str(port))
    process.wait_for("listening", 5)
    return process


def dial(source: Host, target: Host, port: int = PORT, size: int = 100) -> str:
    process = source.python(_DIAL, target.address, str(port), str(size))
    assert process.wait(10) == 0, process.stderr
    return process.stdout.strip()


def test_the_uptime_of_a_host_can_differ(make_lab: Callable[..., Lab]) -> None:
    with Lab(("nd0", "nd1"), clocks={"nd1": 1_000_000}) as lab:
        code = "import time; print(time.monotonic())"
        here, there = (host.python(code) for host in lab.hosts)
        assert (here.wait(10), there.wait(10)) == (0, 0)
        assert 999_000 < float(there.stdout) - float(here.stdout) < 1_001_000
        asks = [lab.python, "-m", "nccl_doctor", "--version"]  # forked, and on the host as well
        assert lab["nd1"].run(asks).wait(30) == 0


def test_hosts_have_their_own_identity(lab: Lab) -> None:
    assert [host.call("hostname").strip() for host in lab.hosts] == ["nd0", "nd1"]
    assert len({host.call("cat", "/etc/machine-id") for host in lab.hosts}) == 2
    assert len({host.call("cat", "/proc/sys/kernel/random/boot_id") for host in lab.hosts}) == 2
    ports = lab["nd0"].call("cat", "/proc/sys/net/ipv4/ip_local_port_range").split()
    assert ports == ["32768", "60999"]
    lab["nd0"].call("sh", "-c", "echo there > /dev/shm/segment")
    assert lab["nd0"].shared_memory() == ["segment"]
    assert lab["nd1"].shared_memory() == []
    assert "segment" not in os.listdir("/dev/shm")


def test_names_are_those_of_the_host(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0="192.168.77.99"))
    assert lab["nd0"].call("getent", "ahostsv4", "nd1").startswith("192.168.77.2 ")
    assert lab["nd1"].call("getent", "ahostsv4", "nd0").startswith("192.168.77.99 ")
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    with pytest.raises(LabError):
        lab["nd1"].call("getent", "ahostsv4", "nd0")
    lab.restore_names()
    assert lab["nd1"].call("getent", "ahostsv4", "nd0").startswith("192.168.77.1 ")


def test_ports_are_dropped_and_rejected(lab: Lab) -> None:
    nd0, nd1 = lab.hosts
    for port in (5001, 5002, 5003, PORT):
        echo(nd0, port)
    assert dial(nd1, nd0) == "echoed"
    assert dial(nd1, nd0, 5009) == "ECONNREFUSED"
    faults.drop_master_port(nd0, 5001)
    faults.reject_master_port(nd0, "icmp type admin-prohibited", 5002)
    faults.reject_master_port(nd0, "tcp reset", 5003)
    assert dial(nd1, nd0, 5001) == "dropped"
    assert dial(nd1, nd0, 5002) == "EHOSTUNREACH"
    assert dial(nd1, nd0, 5003) == "ECONNREFUSED"
    assert dial(nd0, nd0, 5001) == "echoed"
    assert dial(nd1, nd0) == "echoed"


def test_ephemeral_ports_are_dropped_one_way(lab: Lab) -> None:
    nd0, nd1 = lab.hosts
    echo(nd0)
    echo(nd1)
    faults.drop_ephemeral(nd0)
    assert dial(nd1, nd0) == "dropped"
    assert dial(nd0, nd1) == "echoed"


def test_one_pair_of_three_is_broken(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    for host in lab.hosts:
        echo(host)
    faults.break_pair(lab, lab["nd1"], lab["nd2"])
    works = {
        (a.name, b.name): dial(a, b) == "echoed" for a in lab.hosts for b in lab.hosts if a is not b
    }
    assert {pair for pair, good in works.items() if not good} == {("nd1", "nd2"), ("nd2", "nd1")}


def test_a_proxy_accepts_and_never_answers(lab: Lab) -> None:
    nd0, nd1 = lab.hosts
    echo(nd0)
    faults.intercept_ephemeral(nd0)
    assert dial(nd1, nd0) == "mute"
    assert dial(nd1, nd0, 5009) == "ECONNREFUSED"


def test_large_packets_vanish(lab: Lab) -> None:
    nd0, nd1 = lab.hosts
    echo(nd0)
    assert dial(nd1, nd0, size=1 << 20) == "echoed"
    faults.black_hole_large_packets(lab)
    assert dial(nd1, nd0, size=500) == "echoed"
    assert dial(nd1, nd0, size=1 << 20) == "mute"
    assert dial(nd0, nd0, size=1 << 20) == "echoed"


def test_a_signal_hits_the_named_child(lab: Lab) -> None:
    code = "import os, time; open('/proc/self/comm', 'w').write('ncd:collectives'); time.sleep(30)"
    innocent = lab["nd0"].python(code, env={"RANK": "0"})
    with lab.strike(1, signal.SIGKILL) as strike:
        victim = lab["nd1"].python(code, env={"RANK": "1"})
        assert victim.wait(5) == 128 + signal.SIGKILL or victim.returncode == -signal.SIGKILL
    assert strike.pid
    assert innocent.poll() is None


def test_leftovers_are_seen(lab: Lab) -> None:
    folder = lab.new_folder()
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]])"
    stray = "import socket, time; s = socket.create_server(('0.0.0.0', 5001)); time.sleep(30)"
    assert lab["nd0"].python(code, stray).wait(5) == 0
    lab["nd1"].call("touch", "/dev/shm/segment")
    (folder / "tmp" / "file").touch()
    until(lambda: any(":5001 " in text for text in lab["nd0"].listeners()))
    found = lab.leftovers(folder, grace_s=0.1)
    assert sorted(text.split()[0] for text in found) == ["file", "process", "shared", "socket"]


def test_nothing_outlives_the_lab(tmp_path: Path, make_lab: Callable[..., Lab]) -> None:
    make_lab()  # asks first whether a lab can be built here
    before = set(os.listdir("/sys/class/net"))
    with Lab(("nd0", "nd1"), tmp_path) as lab:
        lab["nd1"].run(["sleep", "300"])
        lab["nd0"].run(["sh", "-c", "trap '' TERM; sleep 300"])
        inits = [host.init for host in lab.hosts]
        running = until(lambda: _asleep(lab))
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*inits, *running])
    assert set(os.listdir("/sys/class/net")) == before


def _asleep(lab: Lab) -> list[int]:
    """All processes of the hosts, once each host has its `sleep 300`."""
    running = [[(pid, describe(pid)) for pid in host.pids()] for host in lab.hosts]
    asleep = [any(line.endswith("] sleep 300") for _, line in each) for each in running]
    return [pid for each in running for pid, _ in each] if all(asleep) else []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its capabilities away")
@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_where_no_lab_can_be_built(tmp_path: Path, ci: str, outcome: str) -> None:
    root = Path(__file__).parents[2]
    test = "tests/lab/test_lab_itself.py::test_hosts_have_their_own_identity"
    done = subprocess.run(
        [
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test),
            # Else it would clean up behind earlier runs, which may take minutes.
            *("--basetemp", str(tmp_path / "inner")),
        ],
        cwd=root,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome in done.stdout, done.stdout
    assert "the lab cannot make namespaces here" in done.stdout
    assert (done.returncode == 0) is (not ci)


def test_missing_tools_are_named(tmp_path: Path) -> None:
    reason = trouble(path=str(tmp_path))
    assert reason is not None
    assert "apt-get install -y ethtool iproute2 mount nftables util-linux" in reason
