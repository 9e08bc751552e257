from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from nccl_doctor.toolkit.net.dial import has_route
from nccl_doctor.toolkit.net.names import LookUp, look_up


@pytest.fixture(autouse=True)
def _impatient_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")


def test_a_name_in_the_hosts_file_is_answered_once():
    found = look_up("localhost", 4.0)
    assert "127.0.0.1" in found.answers
    assert (found.error, found.timed_out, found.slow) == ("", False, False)
    assert len(found.took_s) == 1


def test_a_number_is_an_ipv4_address_to_the_resolver():
    assert look_up("6841231", 4.0).answers == ("0.104.99.143",)


@pytest.mark.parametrize("name", ["no.such.host.invalid", "bad..label", "a" * 64])
def test_a_name_that_cannot_be_resolved_leaves_the_reason(name: str):
    found = look_up(name, 4.0)
    assert found.answers == ()
    assert found.error
    assert not found.slow


def test_an_error_is_asked_again_for_as_long_as_one_is_patient():
    found = look_up("bad..label", 4.0, patience_s=0.8)
    assert 2 <= len(found.took_s) <= 3
    assert not found.slow


def test_loopback_has_a_name():
    assert look_up("127.0.0.1", 4.0, reverse=True).answers[0]


def test_a_look_up_survives_the_report():
    found = LookUp("nd0", ("192.168.77.1",), "", (1.2, 3.0), slow=True)
    assert LookUp.from_json(found.to_json()) == found


def test_a_resolver_that_does_not_answer_is_slow_and_given_up(tmp_path):
    """For real: a name server that swallows every query, in a mount namespace of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a process a resolv.conf of its own")
    deaf = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        deaf.bind(("127.0.0.53", 53))
    except OSError as error:
        pytest.skip(f"port 53 is taken here: {error}")
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.53\noptions timeout:5\n")
    script = (
        "import json, time; from nccl_doctor.toolkit.net.names import look_up;"
        "t = time.monotonic();"
        "found = look_up('192.168.77.9', 2.5, reverse=True).to_json();"
        "print(json.dumps({**found, 'wall': time.monotonic() - t}), flush=True);"
        "import os; os._exit(0)"
    )
    with deaf:
        found = _in_mount_namespace(conf, script)
    assert found["slow"]
    assert found["timed_out"]
    assert found["error"] == "no answer from the resolver"
    assert found["wall"] < 3.0


def _in_mount_namespace(conf, script):
    environment = {key: value for key, value in os.environ.items() if key != "RES_OPTIONS"}
    mount = f'mount --bind {conf} "$(readlink -f /etc/resolv.conf)" && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    return json.loads(done.stdout)


def test_loopback_has_a_route_and_the_broadcast_address_has_none():
    assert has_route("127.0.0.1")
    assert not has_route("255.255.255.255")
