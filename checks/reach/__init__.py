"""Can every host reach the services outside of the job: hub, registry, tracking server?

What it checks
--------------
Only with `--reach URL`, which may be given several times: https://huggingface.co,
https://api.wandb.ai, tcp://registry:5000. On every host, step by step: the name resolves, a
connection comes about (directly, or to the proxy that http_proxy, https_proxy and no_proxy name, as
urllib reads them), the proxy opens the way, TLS is set up and the certificate is accepted, and a
HEAD request gets an answer: any status is one. Of a URL only scheme, host and port are used; user,
password, path and query are neither sent nor recorded. What fails is tried twice.

Why it matters
--------------
A job fetches models and data sets and reports to a tracking server. One host that cannot (another
proxy, a missing certificate of the company, a wrong clock) tries again for minutes while all others
wait for it in a collective.

How to fix
----------
Set the same proxy variables on every host, and no_proxy for the hosts of the job; add the
certificate of the company and export REQUESTS_CA_BUNDLE; open the way out for this host. Or fetch
everything before, and export HF_HUB_OFFLINE=1 WANDB_MODE=offline.

When it is wrong
----------------
Clients that do not obey proxy variables, or that read all_proxy, take another way. Trusted are the
certificates of REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE or SSL_CERT_FILE, else those of certifi if it is
installed, else those of the system; Go programs and curl trust those of the system. An answer says
nothing of whether a token is accepted, or how fast a download is.

References
----------
Python documentation, urllib.request.getproxies and ssl; huggingface_hub and wandb documentation
(environment variables); RFC 9110, status 407.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Round,
    Skip,
    Step,
    Where,
    export,
    look,
    shell,
)

_FETCHES = (
    "The job fetches or reports there: this host tries again for minutes, and the others wait."
)
UNREACHABLE = Kind(
    code="url-unreachable",
    layer=Layer.PORT,
    title="A service outside of the job gives no answer",
    why=_FETCHES,
    fix=Fix(
        text="open the way out for this host, or set http_proxy and https_proxy",
        alternatives=[
            Fix(
                replace(
                    export(HF_HUB_OFFLINE="1", WANDB_MODE="offline"),
                    note="after everything was fetched before",
                )
            )
        ],
    ),
    effects=(Effect.JOB_ONLY,),
)
TLS = Kind(
    code="url-tls",
    layer=Layer.PORT,
    title="The certificate of a service outside of the job is not accepted",
    why=_FETCHES,
    fix=Fix(
        Step(
            shell("# export REQUESTS_CA_BUNDLE=FILE SSL_CERT_FILE=FILE"),
            note="a bundle that has the certificate of the company's proxy",
        )
    ),
    effects=(Effect.JOB_ONLY,),
)
PROXY = Kind(
    code="url-proxy",
    layer=Layer.PORT,
    title="The proxy on the way to a service outside of the job refuses",
    why=_FETCHES,
    fix="correct http_proxy, https_proxy and no_proxy: with the user and password that the proxy "
    "wants, http://USER:PASSWORD@HOST:PORT",
    effects=(Effect.JOB_ONLY,),
)

REACH = "reach"
_KINDS = {"tls": TLS, "proxy": PROXY}
_PAUSE_S = 0.5
_CERT_NOT_YET_VALID, _CERT_EXPIRED = 9, 10
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""
_SYSTEM = "/etc/ssl/certs/ca-certificates.crt"
Facts = Mapping[str, Any]


class Reach(Check):
    """Asks the URLs that the user names, on every host."""

    name = "reach"
    layer = Layer.PORT
    cost = "seconds"
    kinds = (UNREACHABLE, TLS, PROXY)
    together = True

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """All hosts at the same time, each for itself."""
        if not cluster.job.reach:
            raise Skip("--reach URL was not given: give the services that the job needs")
        from .asking import LONGEST_S

        first = [cluster.first_on(host) for host in cluster.present_hosts]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        params = {"urls": list(cluster.job.reach)}
        return [Round(REACH, groups, 2 * LONGEST_S + 5, params)] if groups else []

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`urls`: an `asking.Asked` for each."""
        from .asking import Asked, ask

        urls = ctx.params["urls"]
        ctx.breadcrumb("asking services outside of the job", urls=urls)

        def twice(url: str) -> Asked:
            asked = ask(url, ctx.env)
            if asked.step and not asked.verify:
                time.sleep(_PAUSE_S)
                asked = ask(url, ctx.env)
            return asked

        with ThreadPoolExecutor(len(urls)) as pool:
            return {"urls": [asked.to_json() for asked in pool.map(twice, urls)]}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each URL and kind of fault, on the hosts that have it."""
        seen: dict[str, dict[str, Facts]] = {}
        for rank, facts in cluster.facts(self.name, REACH):
            for one in facts.get("urls", ()):
                seen.setdefault(one["url"], {})[rank.host.label] = one
        for url, hosts in seen.items():
            kinds: dict[Kind, dict[str, Facts]] = {}
            for host, one in hosts.items():
                if one["step"]:
                    kind = _KINDS.get(one["step"], UNREACHABLE)
                    refused = kind is not TLS or one["verify"]
                    kinds.setdefault(kind if refused else UNREACHABLE, {})[host] = one
            good = [one for one in hosts.values() if not one["step"]]
            for kind, failed in kinds.items():
                yield _finding(kind, url, failed, good)


def _finding(kind: Kind, url: str, failed: Mapping[str, Facts], good: Sequence[Facts]) -> Finding:
    one = next(iter(failed.values()))
    words = "; ".join(
        w for w, _ in Counter(each["detail"] for each in failed.values()).most_common(3)
    )
    message = f"{url}: {words}"
    if kind is TLS and any(each["verify"] in _BY_CLOCK for each in failed.values()):
        message += f" (today is {one['day']} on this host)"
    message += f"; {_way(failed.values())}"
    if good:
        message += f"; {len(good)} other hosts reach it, {_way(good)}"
    return Finding(
        kind,
        message,
        Where(hosts=tuple(sorted(failed))),
        {"hosts": {host: dict(each) for host, each in sorted(failed.items())[:5]}},
        fix=_fix(kind, one, good),
    )


_SET_CLOCK = Fix(
    look(shell("date -u"), "is the clock of this host wrong?"),
    Step(shell("chronyc makestep"), note="if it is; as root", persists=True),
    alternatives=[
        Fix(
            Step(
                shell("timedatectl set-ntp true"),
                undo=shell("timedatectl set-ntp false"),
                persists=True,
            ),
        ),
        "the server needs a new certificate",
    ],
)
_BY_CLOCK = (_CERT_NOT_YET_VALID, _CERT_EXPIRED)


def _way(hosts: Any) -> str:
    """The proxies in words."""
    proxies = sorted({each["proxy"] for each in hosts})
    return ", ".join(f"through {each}" if each else "without a proxy" for each in proxies)


def _fix(kind: Kind, one: Facts, good: Sequence[Facts]) -> str:
    scheme = one["url"].partition(":")[0]
    proxies = {each["proxy"] for each in good}
    if kind is TLS and one["verify"] in _BY_CLOCK:
        return _SET_CLOCK
    if kind is TLS and one["system"]:
        note = "the certificates of the system accept it; "
        note += "Red Hat: /etc/pki/tls/certs/ca-bundle.crt"
        given = export(REQUESTS_CA_BUNDLE=_SYSTEM, SSL_CERT_FILE=_SYSTEM)
        return Fix(replace(given, on=On.HERE, note=note))
    if len(proxies) == 1 and proxies != {one["proxy"]}:
        (proxy,) = proxies
        given = export(**{f"{scheme}_proxy": proxy})
        return Fix(
            replace(given, on=On.HERE) if proxy else Step(shell("unset {:variable}_proxy", scheme))
        )
    return ""
