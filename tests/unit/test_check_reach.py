"""Services outside of the job: rules on made-up hosts, and real servers and proxies on this one."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from nccl_doctor.api import Cluster, Context, Finding, Job, Launch, Severity, Skip
from nccl_doctor.checks.reach import REACH, Reach, asking
from nccl_doctor.checks.reach.asking import Asked, ask, bundle_of, proxy_for
from nccl_doctor.model.codec import Node, decode, encode
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.rows import each_row

CHECK = Reach()
HUB = "https://hub"
PROXY = "http://proxy:3128"


def cluster(*asked: Asked) -> Cluster:
    made = make_cluster([f"nd{i}" for i in range(len(asked))], job=Job(reach=(HUB,)))
    hosts = [
        replace(host, facts=reread({CHECK.name: {REACH: outcome({"urls": [one.to_json()]})}}))
        for host, one in zip(made.hosts, asked, strict=True)
    ]
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=tuple(hosts), ranks=ranks)


GOOD = Asked(HUB, status=200, bundle="those of certifi")
LOST = replace(GOOD, step="connect", detail="10.0.0.1:443: no answer", status=None)


def found(code: str, hosts: list[str], *asked: Asked) -> Finding:
    one = only(CHECK, cluster(*asked), code, hosts=hosts)
    assert one.level is Severity.FAIL
    return one


# Rules


def test_an_answer_is_enough_whatever_it_says() -> None:
    assert judge(CHECK, cluster(GOOD, replace(GOOD, status=503))) == []
    # Proxies that differ are no fault as long as all of them lead there.
    assert judge(CHECK, cluster(GOOD, replace(GOOD, proxy=PROXY))) == []


def test_the_one_host_that_cannot_is_named_with_what_the_others_have() -> None:
    through = replace(GOOD, proxy=PROXY)
    one = found("url-unreachable", ["nd1"], through, LOST, through)
    assert one.message == (
        f"{HUB}: 10.0.0.1:443: no answer; without a proxy; 2 other hosts reach it, through {PROXY}"
    )
    assert one.fix == f"export https_proxy={PROXY}"
    one = found("url-unreachable", ["nd0"], replace(LOST, proxy=PROXY), GOOD)
    assert one.fix == "unset https_proxy"
    assert "open the way out" in (
        found("url-unreachable", ["nd2"], GOOD, GOOD, LOST).fix or CHECK.kinds[0].fix
    )


def test_what_no_host_can_is_one_finding() -> None:
    other = replace(LOST, detail="hub does not resolve: Name or service not known", step="name")
    one = found("url-unreachable", ["nd0", "nd1", "nd2"], LOST, LOST, other)
    assert one.message.startswith(f"{HUB}: 10.0.0.1:443: no answer; hub does not resolve")
    assert "other hosts" not in one.message


def test_a_certificate_that_is_not_accepted() -> None:
    refused = replace(
        LOST, step="tls", verify=20, detail="unable to get local issuer certificate", day="2026-1-1"
    )
    one = found("url-tls", ["nd1"], GOOD, refused)
    assert one.message.startswith(f"{HUB}: unable to get local issuer certificate; without a proxy")
    assert "REQUESTS_CA_BUNDLE" in one.kind.fix
    one = found("url-tls", ["nd1"], GOOD, replace(refused, system=True))
    assert one.fix.startswith("export REQUESTS_CA_BUNDLE")
    assert "the certificates of the system accept it" in one.fix
    early = replace(refused, verify=9, detail="certificate is not yet valid", day="1970-01-02")
    one = found("url-tls", ["nd1"], GOOD, early)
    assert "(today is 1970-01-02 on this host)" in one.message
    assert "chronyc makestep" in one.fix


def test_tls_that_does_not_come_about_is_no_matter_of_certificates() -> None:
    cut = replace(LOST, step="tls", detail="no TLS: Connection reset by peer")
    found("url-unreachable", ["nd0"], cut, GOOD)


def test_a_proxy_that_refuses() -> None:
    asks = replace(LOST, step="proxy", proxy=PROXY, detail="the proxy wants a user (407)")
    one = found("url-proxy", ["nd0", "nd1"], asks, asks)
    assert f"through {PROXY}" in one.message


def test_without_the_option_it_is_skipped_and_with_it_each_host_asks_for_itself() -> None:
    with pytest.raises(Skip, match="--reach URL was not given"):
        CHECK.plan(make_cluster())
    (one,) = CHECK.plan(make_cluster(job=Job(reach=(HUB,))))
    assert one.groups == ((0,), (2,))
    assert one.params == {"urls": [HUB]}
    assert decode(Job, Node("job", encode(Job(reach=(HUB,))))).reach == (HUB,)


# The environment


@each_row("url env proxy", [
    ("http://hub", {}, ""),
    ("http://hub", {"http_proxy": PROXY}, PROXY),
    ("https://hub", {"http_proxy": PROXY}, ""),
    ("https://hub", {"HTTPS_PROXY": PROXY}, PROXY),
    ("https://hub", {"HTTPS_PROXY": PROXY, "https_proxy": ""}, ""),
    ("https://hub", {"https_proxy": PROXY, "no_proxy": "other,hub"}, ""),
    ("https://a.hub", {"https_proxy": PROXY, "NO_PROXY": ".hub"}, ""),
    ("https://hub", {"https_proxy": PROXY, "no_proxy": "*"}, ""),
    ("http://hub", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, ""),
])  # fmt: skip
def test_the_proxy_is_that_of_urllib(
    url: str, env: dict[str, str], proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proxy_for(urlsplit(url), env) == proxy


def test_the_certificates_that_clients_of_python_trust() -> None:
    assert bundle_of({"SSL_CERT_FILE": "/x.pem"}) == ("SSL_CERT_FILE=/x.pem", "/x.pem")
    name, file = bundle_of({})
    assert (name == "those of the system") is (file is None)


# Real servers


@contextmanager
def server(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """A program that serves connections one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)

        def run() -> None:
            try:
                while True:
                    client, _ = listening.accept()
                    with client:
                        client.settimeout(5)
                        behave(client)
            except OSError:
                pass

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def answers(status: int, heard: list[bytes]) -> Callable[[socket.socket], None]:
    def behave(client: socket.socket) -> None:
        heard.append(client.recv(4096))
        client.sendall(f"HTTP/1.1 {status} Said\r\nX: y\r\n\r\nbody".encode())

    return behave


def test_any_status_is_an_answer() -> None:
    heard: list[bytes] = []
    with server(answers(503, heard)) as port:
        asked = ask(f"http://127.0.0.1:{port}", {})
    assert (asked.step, asked.status, asked.proxy) == ("", 503, "")
    assert heard[0].startswith(b"HEAD / HTTP/1.1\r\n")


def test_a_proxy_gets_its_password_and_nobody_else_does() -> None:
    heard: list[bytes] = []
    with server(answers(200, heard)) as port:
        env = {"http_proxy": f"http://me:s%40x@127.0.0.1:{port}"}
        asked = ask("http://hub.invalid", env)
    assert (asked.step, asked.status) == ("", 200)
    assert heard[0].startswith(b"HEAD http://hub.invalid:80/ HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic bWU6c0B4\r\n" in heard[0]  # me:s@x
    assert asked.proxy == f"http://127.0.0.1:{port}"
    assert "s%40x" not in str(asked.to_json())
    assert asked.hosts == ("hub.invalid", "127.0.0.1")  # names that a redacted report hides


@each_row("url status words", [
    ("http://hub.invalid", 407, "the proxy wants a user and a password (407)"),
    ("https://hub.invalid", 407, "the proxy wants a user and a password (407)"),
    ("https://hub.invalid", 403, "the proxy answers 403 to CONNECT hub.invalid:443"),
])  # fmt: skip
def test_a_proxy_that_does_not_let_us_pass(url: str, status: int, words: str) -> None:
    with server(answers(status, [])) as port:
        proxy = f"127.0.0.1:{port}"  # without a scheme, as many write it
        asked = ask(url, {"http_proxy": proxy, "https_proxy": proxy})
    assert (asked.step, asked.detail) == ("proxy", words)


def test_who_is_no_web_server() -> None:
    with server(lambda client: client.sendall(b"SSH-2.0-x\r\n\r\n")) as port:
        assert ask(f"tcp://127.0.0.1:{port}", {"all_proxy": PROXY}).step == ""
        asked = ask(f"http://127.0.0.1:{port}", {})
        assert (asked.step, asked.detail) == ("answer", "connected, then: the answer is not HTTP")
        asked = ask(f"https://127.0.0.1:{port}", {})
        assert (asked.step, asked.verify) == ("tls", 0)
        assert asked.detail.startswith("no TLS: ")
    asked = ask(f"tcp://127.0.0.1:{port}", {})
    assert (asked.step, asked.detail) == ("connect", f"127.0.0.1:{port}: connection refused")


def test_who_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.1)
    monkeypatch.setattr(asking, "TLS_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "no answer within 0 s" in ask(f"http://{at}", {}).detail
        assert "no TLS: no answer within 0 s" in ask(f"https://{at}", {}).detail


def test_what_is_no_proxy() -> None:
    asked = ask("https://hub", {"https_proxy": "socks5://proxy:1080"})
    assert (asked.step, asked.proxy) == ("proxy", "socks5://proxy:1080")
    assert ask("https://hub", {"https_proxy": "http://proxy:port"}).step == "proxy"


def test_a_certificate_of_a_company_and_one_for_another_name(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    def behave(client: socket.socket) -> None:
        try:
            with context.wrap_socket(client, server_side=True) as safe:
                safe.recv(4096)
                safe.sendall(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
        except ssl.SSLError:
            pass

    trusted = {"REQUESTS_CA_BUNDLE": str(cert)}
    with server(behave) as port:
        asked = ask(f"https://localhost:{port}", trusted)
        assert (asked.step, asked.status) == ("", 401)
        asked = ask(f"https://localhost:{port}", {})
        assert (asked.step, asked.verify, asked.system) == ("tls", 18, False)
        assert "self" in asked.detail
        asked = ask(f"https://127.0.0.1:{port}", trusted)
        assert asked.step == "tls"
        assert "IP address mismatch" in asked.detail
        asked = ask(f"https://localhost:{port}", {"SSL_CERT_FILE": str(tmp_path / "gone.pem")})
        assert (asked.step, asked.verify) == ("tls", -1)
        assert "gone.pem: No such file" in asked.detail
        asked = ask(f"https://localhost:{port}", {"SSL_CERT_FILE": str(tmp_path)})
        assert asked.verify == 18  # a folder of certificates, without this one


def test_observed_here() -> None:
    with server(answers(200, [])) as port:
        urls = [f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}"]
        context = Context(launch=Launch(), env={}, params={"urls": urls})
        seen = CHECK.observe(context)["urls"]
    assert [one["step"] for one in seen] == ["", ""]
