"""What the operating system says, beside what was made for it to say."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.system.shortage import NET_BIND_SERVICE, has_capability
from nccl_doctor.toolkit import host
from nccl_doctor.toolkit.net.interfaces import interfaces
from nccl_doctor.toolkit.net.ports import port_holder
from tests.support import fabrics
from tests.support.limited import HAS_NETLINK_FILTER
from tests.support.rows import each_row

ROOT = Path(__file__).resolve().parents[2]
NETWORK = """
ip link set lo up
ip link add low type veth peer name low1
ip link set low up mtu 9000
ip addr add 10.1.0.1/24 dev low label low:1
ip addr add 10.1.0.2/24 dev low
ip link add both type veth peer name both1
ip link set both up
ip link set both1 up
ip addr add fd00::1/64 dev both nodad
ip addr add 10.2.0.1/16 dev both1
ip tuntap add dev tun0 mode tun
ip tuntap add dev tun1 mode tun
ip addr add 10.3.0.1 peer 10.3.0.2 dev tun1
ip link set tun1 up
"""
LOOK = """
import json
from nccl_doctor.toolkit.nccl.interface_choice import subnet_prefixes
from nccl_doctor.model.codec import encode
from nccl_doctor.toolkit.net.interfaces import interfaces
print(json.dumps([[encode(nic) for nic in interfaces()], subnet_prefixes()]))
"""


NO_NETLINK = """
import json
from nccl_doctor.launch.identity import host_addresses
from nccl_doctor.toolkit.host import addresses, interface_names
from nccl_doctor.toolkit.net.rtnetlink import neighbours, way_to
from tests.support import limited

def look():
    return [sorted(addresses()), sorted(interface_names()), sorted(host_addresses())]

before = look()
limited.forbid_netlink()
import socket
try:
    socket.if_nameindex()
except OSError:
    print(json.dumps([before, look(), way_to("127.0.0.1"), neighbours()]))
"""


@pytest.mark.skipif(not HAS_NETLINK_FILTER, reason="the filter has not this machine's numbers")
def test_without_netlink_the_addresses_are_the_same() -> None:
    """SELinux, AppArmor and seccomp may forbid it: that must not end the run."""
    asks = [sys.executable, "-c", NO_NETLINK]
    done = subprocess.run(asks, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    before, after, way, known = json.loads(done.stdout)
    assert after == before
    assert after[1]
    assert (way, known) == (None, {})


def test_nothing_else_imports_psutil() -> None:
    files = [*(ROOT / "nccl_doctor").rglob("*.py"), *(ROOT / "checks").rglob("*.py")]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if "psutil" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and "psutil" in {*(alias.name for alias in node.names), getattr(node, "module", None)}
    }
    assert found == {"nccl_doctor/toolkit/host.py"}


def test_whoever_else_asks_psutil_gets_the_true_host(tmp_path: Path) -> None:
    """DeepSpeed does as it is imported, in the process of a check."""
    import psutil

    with contextlib.suppress(OSError):
        host.mounts(tmp_path)
    assert host.available_memory(tmp_path) is None
    assert host.ancestors(tmp_path) == []
    assert psutil.Process().memory_info().rss > 0


# Names --------------------------------------------------------------------------------------------

NAMED = r"""
import socket
from nccl_doctor.toolkit.host import host_name
for name in (b"nd\xff\xe9", "nöd".encode()):
    socket.sethostname(name)
    print(ascii(host_name()))
"""


def test_a_host_name_that_is_no_utf_8_can_be_written() -> None:
    unshare = ["unshare", "--uts"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("host names of their own cannot be given")
    command = [*unshare, sys.executable, "-X", "utf8", "-c", NAMED]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [r"'nd\\xff\\xe9'", r"'n\xf6d'"]


# Interfaces ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> tuple[dict[str, Any], dict[str, int]]:
    """What is seen of a network namespace with every kind of interface: in order, by name."""
    unshare = ["unshare", "--net"]
    may = shutil.which("unshare") and shutil.which("ip")
    if not may or subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("network namespaces cannot be made")
    script = f'set -e\n{NETWORK}\nexec "$0" -c "$1"'
    command = [*unshare, "sh", "-c", script, sys.executable, LOOK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    nics, prefixes = json.loads(done.stdout)
    return {nic.pop("name"): nic for nic in nics}, prefixes


def test_interfaces_with_ipv4_come_first_then_ipv6_then_none(network: Any) -> None:
    nics, _ = network
    assert set(list(nics)[:5]) == {"lo", "low:1", "low", "both1", "tun1"}
    assert list(nics)[5] == "both"
    assert set(list(nics)[6:]) >= {"tun0", "low1"}


def test_labels_point_to_point_and_zones(network: Any) -> None:
    nics, prefixes = network
    assert nics["low:1"]["addresses"] == ["10.1.0.1"]
    assert nics["low"]["addresses"] == ["10.1.0.2"]
    assert nics["tun1"]["addresses"] == ["10.3.0.1"]
    assert nics["both"]["addresses"][0] == "fd00::1"
    assert nics["both"]["addresses"][1].startswith("fe80::")
    assert "%" not in "".join(prefixes)
    assert prefixes["fd00::1"] == prefixes[nics["both"]["addresses"][1]] == 64
    assert (prefixes["10.1.0.1"], prefixes["10.2.0.1"], prefixes["10.3.0.1"]) == (24, 16, 32)


def test_state_and_mtu(network: Any) -> None:
    nics, _ = network
    state = {name: (nic["up"], nic["running"], nic["mtu"]) for name, nic in nics.items()}
    assert state["low"] == state["low:1"] == (True, False, 9000)  # no carrier: the peer is down
    assert state["both"] == (True, True, 1500)
    assert state["low1"] == state["tun0"] == (False, False, 1500)
    assert [name for name, nic in nics.items() if nic["loopback"]] == ["lo"]


def test_this_machine_has_what_the_kernel_lists() -> None:
    found = {nic.name: nic for nic in interfaces()}
    assert {name.partition(":")[0] for name in found} == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in found["lo"].addresses


@pytest.mark.parametrize("name", ["gone0", "a-name-longer-than-any-interface"])
def test_an_interface_that_is_gone_has_no_mtu_and_is_down(name: str) -> None:
    assert (host.interface_mtu(name), host.interface_flags(name)) == (0, 0)


# Sockets and processes ----------------------------------------------------------------------------


LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_the_arguments_of_who_holds_a_port_are_not_told(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(LISTEN)
    command = [sys.executable, str(script), "--api-key=hunter2", "hunter2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        held = port_holder(int(process.stdout.readline()))
        process.communicate(b"")
    assert held is not None
    if held["pid"] is not None:  # visible to this user
        assert held["command"] == f"{sys.executable} {script}"[:120]
    assert "hunter2" not in str(held)


@each_row(
    ("words", "told"),
    [
        (["python", "-u", "train.py", "--api-key=hunter2"], "python train.py"),
        (
            ["/usr/bin/python3", "-X", "dev", "-m", "http.server", "80"],
            "/usr/bin/python3 -m http.server",
        ),
        (["python3.12", "-Wignore", "a.py", "hunter2"], "python3.12 a.py"),
        (["python", "-c", "hunter2"], "python"),
        (["python", "-Ic", "hunter2"], "python"),
        (["bash", "-lc", "hunter2"], "bash"),
        (["sh", "-e", "run.sh", "hunter2"], "sh run.sh"),
        (["perl", "-I", "lib", "x.pl", "hunter2"], "perl x.pl"),
        (["perl", "-ne", "hunter2"], "perl"),
        (["node", "--eval", "hunter2"], "node"),
        (["etcd", "hunter2"], "etcd"),
        (["java", "-Dpassword=hunter2", "Main"], "java"),
        (["python train.py --token hunter2"], "python train.py"),  # by setproctitle
        (["ray::IDLE hunter2"], "ray::IDLE"),
        (["http://bob:hunter2@h/x"], "http://***@h/x"),
        (["python"], "python"),
        ([""], ""),
        ([], ""),
    ],
)
def test_of_a_foreign_process_program_and_script_are_told(words: list[str], told: str) -> None:
    assert host.program(words) == told


def test_who_holds_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert host.Socket(port, host.LISTEN, os.geteuid()) in set(host.tcp_sockets())
        assert host.socket_process(port, listening=True) == os.getpid()
        assert host.socket_process(port, listening=False) is None
        held = port_holder(port)
    assert held is not None
    assert held.pop("command") == host.program(host.command_line(os.getpid()))[:120]
    assert held == {"state": "listening", "uid": os.geteuid(), "pid": os.getpid()}
    assert port_holder(port) is None


def test_processes_above_this_one() -> None:
    assert host.ancestors()[0] == os.getppid()
    assert host.command_line(os.getppid())


def test_a_process_that_is_gone_has_no_words() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert host.command_line(child.pid) == []


def test_tasks_of_this_user_are_counted_with_their_threads() -> None:
    count = len(os.listdir("/proc/self/task"))
    assert count <= host.user_tasks() < 100_000


def test_open_files_are_counted() -> None:
    before = host.open_descriptors()
    with open(os.devnull, encoding="ascii"):
        assert host.open_descriptors() == before + 1


# A made-up machine --------------------------------------------------------------------------------


def test_mounts_are_those_of_the_kernel_whatever_etc_mtab_says(tmp_path: Path) -> None:
    text = "overlay / overlay rw 0 0\nfs1:/home /my\\040home nfs4 rw,vers=4.2 0 0\n"
    fabrics.write(tmp_path, "proc/self/mounts", text)
    assert host.mounts(tmp_path) == [
        ("/", "overlay", "rw", "overlay"),
        ("/my home", "nfs4", "rw,vers=4.2", "fs1:/home"),
    ]
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    assert len(host.mounts()) == len(lines)
    with pytest.raises(OSError, match="No such file"):
        host.mounts(tmp_path / "nowhere")


def test_memory_that_is_available(tmp_path: Path) -> None:
    assert host.available_memory(tmp_path) is None
    fabrics.write(tmp_path, "proc/meminfo", "MemAvailable: 2048 kB\n")
    assert host.available_memory(tmp_path) is None  # no kernel says so little
    said = "MemTotal: 4096 kB\nMemFree: 99 kB\nMemAvailable: 2048 kB\n"
    fabrics.write(tmp_path, "proc/meminfo", said)
    assert host.available_memory(tmp_path) == 2 << 20


def test_capabilities(tmp_path: Path) -> None:
    assert not has_capability(NET_BIND_SERVICE, tmp_path)
    fabrics.write(tmp_path, "proc/self/status", "Name:\tpython\nCapEff:\t0000000000000400\n")
    assert has_capability(NET_BIND_SERVICE, tmp_path)
    assert not has_capability(NET_BIND_SERVICE + 1, tmp_path)


def test_checks_read_the_machine_below_the_root_of_the_context() -> None:
    named = re.compile(r"""(Path|open|stat|glob)\(\s*f?["']/(proc|sys|dev|etc)\b""")
    files = (ROOT / "checks").rglob("*.py")
    found = [str(path.name) for path in files if named.search(path.read_text(encoding="utf-8"))]
    assert found == []
