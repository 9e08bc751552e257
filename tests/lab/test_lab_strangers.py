"""A stranger on the network of the job, and hosts that do not have the same key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.lab import HEALTHY_S, JOIN_S, MASTER_PORT, PATIENT, Lab
from tests.lab.reading import START_S, check_clean, view_of
from tests.support.waiting import until

SELECTED = ("--select", "ranks,launch_record,clock")
STRANGER = f"""
import pathlib
import torch.distributed  # before it is ready: that takes as long as the run
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.gather.envelope import OPEN, BadMessage
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
pathlib.Path("ready").touch()
meeting = ControlStore("nd0", {MASTER_PORT}, timeout_s=30, prefix=MEETING)
def told(error): raise error
try:
    name = opened(meeting, 30, refused=told)
except BadMessage as error:  # it is sealed, and can be read
    name = error.value["run"]
box = meeting.beside(prefix_of(name), OPEN)
for number in range(50):
    box.put(f"order/{{number}}", {{"finish": 0}})
pathlib.Path("written").touch()
"""
"""Sends every participant home, as if all were well, before rank 0 has given an order."""


def key_file(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(name * 8)
    path.chmod(0o600)
    return str(path)


def test_a_strangers_order_sends_nobody_home_who_has_a_key(lab: Lab, tmp_path: Path) -> None:
    folder = lab.new_folder()
    (folder / "stranger.py").write_text(STRANGER)
    stranger = lab["nd1"].run([lab.python, "stranger.py"], {}, folder)
    until((folder / "ready").exists)
    options = (*SELECTED, *PATIENT, "--key", key_file(tmp_path, "secret"))
    written = {"nd1": lambda: until((folder / "written").exists)}
    run = lab.own_doctor(*options, nproc=1, after=written)
    assert lab.wait([stranger], START_S), "it has written all it wanted"
    check_clean(run, HEALTHY_S)
    assert run.report is not None, str(run)
    assert run.report["verdict"] == "pass", str(run)
    (found,) = [each for each in run.report["findings"] if each["severity"] != "info"]
    assert found["code"] == "stranger-writes", str(run)
    assert run.codes == [0, 0]


def test_hosts_with_different_keys_are_named_at_the_join_time_out(lab: Lab, tmp_path: Path) -> None:
    keys = {host: ["--key", key_file(tmp_path, host)] for host in ("nd0", "nd1")}
    run = lab.own_doctor(*SELECTED, "--join-timeout", "8", nproc=1, per_host=keys)
    check_clean(run, START_S + JOIN_S + 5)
    assert run.report is not None, str(run)
    found = {each["code"]: each for each in run.report["findings"]}
    assert found["key-differs"]["where"]["hosts"] == ["nd1"], str(run)
    assert found["host-absent"]["explained_by"] == "key-differs", str(run)
    assert not [each for each in found.values() if each["severity"] == "fail"], str(run)
    assert run.report["verdict"] == "unknown"
    assert run.codes == [3, 3]
    (finding,) = (view_of(run, 1) or {})["root_causes"]
    assert finding["code"] == "key-differs"


SCRAPER = """
import pathlib, socket, sys
host, low, high = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
while not pathlib.Path("done").exists():
    for port in range(low, high + 1):
        with socket.socket() as sock:
            sock.settimeout(0.05)
            if sock.connect_ex((host, port)) == 0:
                sock.send(b"GET /metrics HTTP/1.1\\r\\nHost: " + host.encode() + b"\\r\\n\\r\\n")
"""


@pytest.mark.wide
def test_a_scraper_of_every_port_is_named(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    lab["nd0"].call("sh", "-c", "echo 40000 40060 > /proc/sys/net/ipv4/ip_local_port_range")
    folder = lab.new_folder()
    (folder / "scraper.py").write_text(SCRAPER)
    argv = [lab.python, "scraper.py", lab["nd0"].address, "40000", "40060"]
    scraper = lab["nd2"].run(argv, {}, folder)
    try:
        two = {host: ["--nnodes", "2"] for host in ("nd0", "nd1")}
        run = lab.own_doctor("--select", "firewall", nproc=1, hosts=tuple(two), per_host=two)
    finally:
        (folder / "done").touch()
    assert lab.wait([scraper], START_S)
    check_clean(run, HEALTHY_S)
    assert run.report is not None, str(run)
    (found,) = run.report["findings"]
    assert (found["code"], found["where"]["hosts"]) == ("stranger-connects", ["nd0"]), str(run)
    assert lab["nd2"].address in found["message"], str(run)
    assert '"GET /metrics HTTP/1.1"' in found["message"], str(run)
    assert (found["severity"], run.codes) == ("info", [0, 0]), str(run)  # gloo
