"""Readers of what others wrote: any text is read, or refused by the reader's own error, in time."""

from __future__ import annotations

import copy
import gzip
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_doctor.checks import bonds, kernel_access, kernel_limits, link_flaps
from nccl_doctor.checks.cpus.governors import read_governors
from nccl_doctor.checks.gpu_affinity.gpu_places import place_on_host
from nccl_doctor.checks.gpu_state.kernel_log import read_kernel_log
from nccl_doctor.checks.links.timed import nic_speed
from nccl_doctor.checks.neighbours.room import read_table
from nccl_doctor.checks.rail_reach.neighbours import neighbour
from nccl_doctor.checks.stuck_processes.stuck import remote_mounts
from nccl_doctor.checks.uplink import look
from nccl_doctor.cli import config, job
from nccl_doctor.cli.saving import read_report
from nccl_doctor.launch.command_line import accelerate_config
from nccl_doctor.launch.command_line.job_line import JobLineError
from nccl_doctor.launch.ssh import hostfile
from nccl_doctor.model.report import Report
from nccl_doctor.report import facts, profiles, text
from nccl_doctor.report.formats import formats, renderer
from nccl_doctor.report.formats import json as json_format
from nccl_doctor.report.redaction.cover import Cover
from nccl_doctor.system import shortage
from nccl_doctor.toolkit import cgroup, host, memory_errors, pcie_errors
from nccl_doctor.toolkit.fabric import counters, direct, gids, ports, rails
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules
from nccl_doctor.toolkit.firewall.rulesets import parse_iptables, parse_nft
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.nccl import conf
from nccl_doctor.toolkit.net import dial, routes
from nccl_doctor.toolkit.net import ports as tcp_ports
from nccl_doctor.toolkit.peers.drops import read_counts
from tests.support import fabrics, hardware
from tests.support.big_reports import RECORDED
from tests.support.unsent import unsent
from tests.unit.test_hostile_report import ends, whole

SOON_S = 5.0
"""More than any of them takes on a busy machine, and less than one that has no end."""
MOST = 1 << 30
"""Bytes that all of them together may take."""
here = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

ODD = st.sampled_from(["", "\0", "\ud800", "-1", "9" * 5000, "1e999", "::", "/", "..", "é", "\r"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory() -> Iterator[None]:
    """A reader that takes more fails with MemoryError, which is none of its own errors."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limits = {pages * resource.getpagesize() + MOST, *before} - {resource.RLIM_INFINITY}
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_memory_is_bounded() -> None:
    with pytest.raises(MemoryError):
        bytearray(2 * MOST)


def mutated(text: str) -> st.SearchStrategy[str]:
    """The text with pieces of it left out, doubled, or replaced; or another text altogether."""

    @st.composite
    def one(draw: st.DrawFn) -> str:
        words = text
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(words)))
            end = min(len(words), at + draw(st.integers(0, 12)))
            new = draw(ODD | st.text(max_size=5) | st.just(words[at:end] * 2))
            words = words[:at] + new + words[end:]
        return words

    return one() | st.text(max_size=40)


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def in_time(read: Callable[[], object], *own: type[Exception]) -> object:
    """What it reads; None where it refuses with an error of its own."""
    started = time.monotonic()
    try:
        return read()
    except own:
        return None
    finally:
        assert time.monotonic() - started < SOON_S


# --- reports ---


WHOLE = whole()
FOLDED = json.loads(gzip.decompress(RECORDED.with_name("two-hosts-v2.json.gz").read_bytes()))


def places_in(data: Any) -> list[tuple[Any, ...]]:
    """The way to every text in it, and to every key."""
    return [tuple(step for step in path if step is not None) for path in ends(data)]


PLACES = places_in(WHOLE)
FORMS = [path for path in places_in(FOLDED) if path[0] in ("shared", "hosts", "ranks")]


@st.composite
def reports(draw: st.DrawFn, whole: Any = WHOLE, places: Sequence[Any] = PLACES) -> Any:
    """A good report with some values of other types, or without them."""
    data = copy.deepcopy(whole)
    for *way, last in draw(st.lists(st.sampled_from(places), min_size=1, max_size=4)):
        place = data
        try:
            for step in way:
                place = place[step]
            if draw(st.booleans()):
                place[last] = draw(VALUES)
            else:
                del place[last]
        except (LookupError, TypeError):
            continue  # an earlier one took it away
    return data


@here
@given(reports(FOLDED, FORMS))
def test_a_folded_report_is_read_or_refused(data: Any) -> None:
    report = in_time(lambda: Report.from_json(data), ValueError)
    if isinstance(report, Report):
        in_time(lambda: "".join(json_format.in_lines(report)))


@here
@given(reports())
def test_a_report_is_read_and_shown_or_refused(data: Any) -> None:
    report = in_time(lambda: Report.from_json(data), ValueError)
    if isinstance(report, Report):
        for name in formats():
            in_time(lambda name=name: renderer(name)(report))
        in_time(lambda: text.render(report, verbose=2))
        in_time(lambda: facts.render(report))
        for profile in profiles.PROFILES:
            in_time(lambda profile=profile: profiles.tell(report, profile, report.exit_code))


@here
@given(
    data=st.binary(max_size=64)
    | mutated(json.dumps(WHOLE)).map(lambda t: t.encode("utf-8", "surrogatepass"))
)
@example(data=b"[" * 200_000)
@example(data=b'{"a":' * 200_000)
@example(data=b"9" * 10_000)
def test_a_file_that_may_be_no_report(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "report.json").write_bytes(data)
    in_time(lambda: read_report(str(unsent(tmp_path / "report.json"))), click.UsageError)


MAP = json.dumps({"what": "x", "key": "00" * 32, "pseudonyms": {"host": {"host-1": "nd0"}}})


@here
@given(mutated(MAP) | VALUES.map(lambda value: json.dumps({"key": "00" * 32, "pseudonyms": value})))
@example(json.dumps({"key": "00" * 32, "pseudonyms": {"host": 5}}))
@example(json.dumps({"key": "00" * 32, "pseudonyms": {"host": {"host-1": ["nd0"]}}}))
def test_a_file_that_may_be_no_map(tmp_path: Path, words: str) -> None:
    path = tmp_path / "report.json.map.json"
    path.write_bytes(raw(words))
    cover = in_time(lambda: Cover(path))
    assert isinstance(cover, Cover)
    report = Report.from_json(WHOLE)
    in_time(lambda: cover.text_of(report))
    in_time(lambda: Cover(None, str(path)), ValueError)


# --- files of the user ---

HOSTS = "# ours\nnode1 slots=8\nroot@node2 slots=4 max-slots=8\n10.0.0.3 slots=1\n"
CONF = "# ours\nNCCL_DEBUG=INFO\nNCCL_IB_HCA==mlx5_0:1\n NCCL_X =1\n"
DS = '{"train_batch_size": 8, # comment\n "fp16": {"enabled": true}}'
ACCELERATE = "compute_environment: LOCAL_MACHINE\nfsdp_config:\n  a: 'b' # c\n- x\n"
OURS = '[expected]\ngpus_per_host = 8\n\ntimeout = 60\nselect = ["ranks"]\n'


def put(folder: Path, name: str, words: str) -> Path:
    path = folder / name
    path.write_bytes(raw(words))
    return unsent(path)


@here
@given(mutated(HOSTS))
@example("a slots=" + "9" * 5000)
@example("a" * 100_000)
@example("=:" * 50_000)
def test_a_hostfile(tmp_path: Path, words: str) -> None:
    path = put(tmp_path, "hosts", words)
    found = in_time(lambda: hostfile.read(str(path)), hostfile.HostfileError)
    if found:
        in_time(lambda: hostfile.ranks_per_host(found, None, "hosts"), hostfile.HostfileError)


@here
@given(mutated(CONF))
def test_a_configuration_of_nccl(tmp_path: Path, words: str) -> None:
    path = put(tmp_path, "nccl.conf", words)
    env = {"NCCL_CONF_FILE": str(path)}
    in_time(lambda: conf.nccl_settings(env, tmp_path, tmp_path))
    in_time(lambda: list(conf.conf_faults(env, tmp_path, tmp_path)))


@here
@given(mutated(DS))
@example("[" * 100_000)
@example("{a: " * 20_000)
@example('{"a": ' + "9" * 5000 + "}")
def test_a_configuration_of_deepspeed(tmp_path: Path, words: str) -> None:
    path = put(tmp_path, "ds.json", words)
    in_time(lambda: job.read(str(path)), job.DsConfigError)


@here
@given(mutated(ACCELERATE) | VALUES.map(json.dumps), st.sampled_from(["yaml", "json"]))
@example("a: " + "'#" * 20_000, "yaml")
@example("[" * 100_000, "json")
@example('{"a": ' * 2_000 + "1" + "}" * 2_000, "json")
def test_a_configuration_of_accelerate(tmp_path: Path, words: str, form: str) -> None:
    path = put(tmp_path, f"config.{form}", words)
    in_time(lambda: accelerate_config.load(path), JobLineError)


@here
@given(mutated(OURS))
@example("a = " + "[" * 100_000)
@example("timeout = " + "9" * 5000)
def test_a_configuration_of_ours(tmp_path: Path, words: str) -> None:
    path = put(tmp_path, "nccl-doctor.toml", words)
    in_time(lambda: config.load(str(path), tmp_path), config.ConfigError)


# --- listings of the packet filter ---

NFT = """table inet filter { # handle 1
  set peers {
    type ipv4_addr
    elements = { 10.0.0.1, 10.0.0.2,
                 10.0.0.3 }
  }
  chain input { # handle 2
    type filter hook input priority filter; policy drop;
    ct state vmap { invalid : drop, established : accept } # handle 3
    tcp flags & (fin | syn) == syn tcp dport { 22, 29500-29600 } counter packets 1 bytes 2 accept
    ip saddr @peers iifname "eth0" tcp dport != 80 jump more
    meta length > 1400 drop # handle 9
  }
  chain more {
    goto input
    jump more
  }
}
"""
IPTABLES = """*filter
:INPUT DROP [0:0]
:mine - [0:0]
-A INPUT -i eth0 -p tcp -m tcp --dport 29500:29600 ! -s 10.0.0.0/8 -j DROP
-A INPUT -p tcp --tcp-flags FIN,SYN SYN -m length --length 0:1400 -j mine
-A mine -m comment --comment "it's" -g INPUT
-A mine -j mine
COMMIT
"""
PACKET = Packet(True, "eth0", "10.0.0.2", "10.0.0.1", (1024, 65535), (29500, 29500))
PACKET_6 = Packet(False, "eth0", "fd00::2", "fd00::1", (29500, 29500), (1024, 65535), "established")


@here
@given(mutated(NFT), mutated(IPTABLES))
@example(nft="", saved="*filter\n-A \n")
def test_rules(nft: str, saved: str) -> None:
    chains = [*parse_nft(nft), *parse_iptables(saved), *parse_iptables(saved, "ip6tables", 6)]
    rules = Rules(True, chains=tuple(chains))
    for packet in (PACKET, PACKET_6):
        in_time(lambda packet=packet: [hit.to_json() for hit in rules.hits(packet)])
    in_time(rules.dropping)


def test_very_long_lists_of_rules() -> None:
    elements = ",\n".join(f"  10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(50_000))
    long = f"table inet x {{\n set s {{\n elements = {{ {elements} }}\n }}\n}}\n"
    in_time(lambda: parse_nft(long))
    in_time(lambda: parse_nft("chain x {\n" + "tcp flags & (" * 1_000))
    in_time(lambda: parse_nft("table a b {\n chain c {\n" + "x " * 30_000 + "\n}\n}\n"))
    in_time(lambda: parse_nft("table a b {\n chain c {\n" + " vmap { " * 5_000 + "\n}\n}\n"))
    in_time(lambda: parse_iptables("*filter\n:INPUT ACCEPT\n" + "-A INPUT -j DROP\n" * 20_000))
    chains = "".join(f"-A c{i} -j c{i + 1}\n-A c{i} -j c{i + 1}\n" for i in range(40))
    names = "".join(f":c{i} - [0:0]\n" for i in range(41))
    many = parse_iptables(f"*filter\n:INPUT ACCEPT\n{names}-A INPUT -j c0\n{chains}")
    in_time(lambda: Rules(True, chains=many).hits(PACKET))


# --- files of the kernel ---

PROC = {
    "proc/net/tcp": "  sl local rem st\n   0: 0100007F:733C 00000000:0000 0A 0:0 0:0 0 1000 0 1\n",
    "proc/net/tcp6": "  sl\n",
    "proc/net/arp": "IP HW Flags HW Mask Device\n10.0.0.2 0x1 0x2 aa:bb:cc:dd:ee:ff * eth0\n",
    "proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    "eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\n",
    "proc/net/bonding/bond0": "Bonding Mode: IEEE 802.3ad Dynamic link aggregation\n\n"
    "Slave Interface: eth0\nMII Status: up\nSpeed: 25000 Mbps\nAggregator ID: 1\n",
    "proc/net/stat/arp_cache": "entries allocs table_fulls\n00000003 00000007 00000000\n",
    "proc/net/softnet_stat": "00000003 00000001 00000000 00000000\n",
    "proc/sys/net/ipv4/neigh/default/gc_thresh3": "1024\n",
    "sys/class/net/eth0/statistics/rx_dropped": "5\n",
    "proc/net/ipv6_route": f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000400 1 0 3 eth0\n",
    "proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff\n",
    "proc/self/uid_map": "         0          0 4294967295\n",
    "proc/self/cgroup": "0::/a/b\n4:memory:/c\n",
    "proc/self/mountinfo": "1 2 3:4 / /data rw - nfs4 server:/x rw\n",
    "proc/self/mounts": "server:/x /data nfs4 rw 0 0\n",
    "proc/vmstat": "oom_kill 3\n",
    "proc/meminfo": "MemTotal: 100 kB\nMemFree: 50 kB\nMemAvailable: 70 kB\n",
    "proc/modules": "nvidia_peermem 16384 0 - Live 0\n",
    "proc/cpuinfo": "flags : fpu hypervisor\n",
    "proc/cmdline": "iommu=pt\n",
    "proc/uptime": "1234.5 22.1\n",
    "proc/self/attr/current": "docker-default (enforce)\n",
    "proc/sys/kernel/yama/ptrace_scope": "1\n",
    "dev/kmsg": "4,9,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus\n",
    "sys/class/net/eth0/speed": "10000\n",
    "sys/class/net/eth0/carrier": "1\n",
    "sys/class/net/eth0/device/vendor": "0x15b3\n",
    "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    "proc/sys/net/ipv4/ip_unprivileged_port_start": "1024\n",
    "sys/fs/cgroup/cgroup.controllers": "memory pids cpu cpuset\n",
    "sys/fs/cgroup/a/b/memory.max": "1000\n",
    "sys/fs/cgroup/a/b/memory.current": "10\n",
    "sys/fs/cgroup/a/b/memory.stat": "inactive_file 5\n",
    "sys/fs/cgroup/a/b/memory.events": "high 3\noom_kill 1\n",
    "sys/fs/cgroup/a/b/memory.high": "900\n",
    "sys/fs/cgroup/a/b/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n",
    "sys/fs/cgroup/a/b/cpu.stat": "usage_usec 9\nnr_periods 3\nnr_throttled 1\n",
    "sys/fs/cgroup/a/b/pids.max": "max\n",
    "sys/fs/cgroup/a/b/pids.current": "5\n",
    "sys/fs/cgroup/a/b/cpu.max": "100000 50000\n",
    "sys/fs/cgroup/a/b/cpuset.cpus.effective": "0-3,8\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "800000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3000000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_min_freq": "800000\n",
}
READERS: dict[str, Callable[[Path], object]] = {
    "cgroup": cgroup.cgroup_limits,
    "kills": cgroup.memory_kills,
    "throttling": lambda root: (cgroup.cpu_throttling(root), cgroup.memory_throttling(root)),
    "user namespace": shortage.in_user_namespace,
    "privileges": shortage.privileges,
    "sockets": lambda root: list(host.tcp_sockets(root)),
    "memory": host.available_memory,
    "range": tcp_ports.port_range,
    "bind": lambda root: tcp_ports.may_bind(80, root),
    "holder": lambda root: tcp_ports.ephemeral_range(40000, root),
    "pcie": pcie_errors.pcie_errors,
    "edac": memory_errors.memory_errors,
    "counters": counters.error_counters,
    "direct": direct.read_gpu_direct,
    "gids": gids.gid_tables,
    "ports": lambda root: ports.rdma_ports(root / "sys/class/infiniband"),
    "devices": ports.rdma_devices,
    "rails": lambda root: rails.rails_of({}, root),
    "gpus": host_gpus,
    "neighbour": lambda root: neighbour("10.0.0.2", "eth0", root),
    "governors": lambda root: read_governors([0], root),
    "mounts": remote_mounts,
    "arp": lambda root: dial.arp_flags("10.0.0.2", root),
    "bonds": lambda root: bonds.read_bond(host.text_of(root / "proc/net/bonding/bond0")),
    "drops": lambda root: read_counts("eth0", root),
    "room": lambda root: read_table("ipv4", "arp_cache", root),
    "gateways": routes.gateways,
    "gateway": look.gateway,
    "NICs": look.nics_here,
    "speed": lambda root: nic_speed("eth0", root),
    "guards": kernel_access._guards,
    "listening": kernel_limits._sockets,
    "up since": link_flaps._up_s,
    "kernel log": read_kernel_log,
    "place": lambda root: place_on_host("0000:4a:00.0", root),
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("machine")
    hardware.pcie(root)
    hardware.memory(root, {"dimm0": (0, 3)})
    fabrics.connectx7(root, 1)
    gids_of_roce = fabrics.roce_gids()
    fabrics.add_device(root, "mlx5_9", layer="Ethernet", pci="0000:4a:00.0", gids=gids_of_roce)
    for name, words in PROC.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(words)
    return root


def files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())


def test_the_machine_is_read_before_anything_is_changed(machine: Path) -> None:
    for name, read in READERS.items():
        assert read(machine) is not None, name


def test_a_table_of_neighbours_that_is_cut_off(machine: Path) -> None:
    path = machine / "proc/net/arp"
    before = path.read_bytes()
    assert dial.arp_flags("10.0.0.2", machine) == 2
    try:
        for row in (b"\n", b"10.0.0.2 0x1\n", b"10.0.0.2 0x1 zz aa:bb:cc:dd:ee:ff * eth0\n"):
            path.write_bytes(before.splitlines(keepends=True)[0] + row)
            assert dial.arp_flags("10.0.0.2", machine) is None
    finally:
        path.write_bytes(before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # psutil's, of a table that lacks a field
@here
@given(data=st.data())
def test_files_of_the_kernel(machine: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(files(machine))))
    before = path.read_bytes()
    words = before.decode("utf-8", "replace")
    path.write_bytes(data.draw(st.binary(max_size=40) | mutated(words).map(raw)))
    try:
        for read in READERS.values():
            in_time(lambda read=read: read(machine), OSError, ValueError)
    finally:
        path.write_bytes(before)
