"""Will exactly one host recognise itself as the endpoint of torchrun's c10d rendezvous?

What it checks
--------------
If torchrun's options include `--rdzv-backend=c10d` (in the command behind `--`, or in the
environment: PET_RDZV_BACKEND, PET_RDZV_ENDPOINT, PET_RDZV_CONF), each host decides by torch's own
rule whether the endpoint is this machine: by its host name, and by the addresses that its own name
resolves to.

Why it matters
--------------
An agent looks up the name of its own host for that, and torchrun ends with socket.gaierror if it
has no answer, unless is_host is given, or the endpoint is localhost, a loopback address or the very
name of the host.
With c10d no node rank decides who serves the store: every agent decides for itself. An alias, the
name of a Kubernetes service or the address of a second interface matches no machine; then no host
serves the store, and all end with RendezvousConnectionError after a minute or two. An endpoint that
matches every machine (localhost) makes each host wait for the others in its own store.

How to fix
----------
Give `--rdzv-conf is_host=true` to the host of the endpoint and is_host=false to the others, or use
the address that this host's own name resolves to. `--local-addr=ADDRESS` sets the address at which
the workers then find rank 0.

When it is wrong
----------------
A host without a report may be the one that serves: unless every host reported, there is no finding
on who serves. An own name without an answer in 7 s is taken for one that does not resolve; torch
waits longer, so that this is only likely. An agent that runs in a container other than this
program's may have another name.

References
----------
PyTorch documentation of torchrun (--rdzv-endpoint, --rdzv-conf, --local-addr);
torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py (_create_tcp_store).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Skip,
    Step,
    Where,
    likely_address,
    shell,
    spans_machines,
)
from nccl_doctor.toolkit.c10d import (
    endpoint_host,
    in_a_file,
    is_host_of,
    port_of,
    recognise,
    rendezvous_of,
)
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.net.names import PATIENT_S

RDZV_ENDPOINT_UNHOSTED = Kind(
    code="rdzv-endpoint-unhosted",
    layer=Layer.NAME,
    title="No host recognises itself as the rendezvous endpoint",
    why="With the c10d backend the host that recognises itself serves the store; without one, all "
    "hosts end with RendezvousConnectionError after a minute or two.",
    fix=Fix(
        Step(
            shell("# --rdzv-conf is_host=true"),
            note="in the line of torchrun, on the host of the endpoint",
        ),
        alternatives=["give its address as endpoint"],
    ),
)
RDZV_ENDPOINT_AMBIGUOUS = Kind(
    code="rdzv-endpoint-ambiguous",
    layer=Layer.NAME,
    title="Several hosts recognise themselves as the rendezvous endpoint",
    why="Each serves its own store and waits there for the others until the join time-out.",
    fix=Fix(
        Step(
            shell("# --rdzv-endpoint ADDRESS:29500"),
            On.EVERY,
            note="in the line of torchrun, the same everywhere, of one of the hosts",
        )
    ),
)
AGENT_NAMELESS = Kind(
    code="agent-name-unresolvable",
    layer=Layer.NAME,
    title="torchrun cannot look up the name of its own host",
    why="To know whether it is the endpoint, the agent looks up its own host name; without an "
    "answer torchrun ends with socket.gaierror before it meets the others.",
    fix=Fix(
        text="put the host's name into /etc/hosts",
        alternatives=[
            Fix(
                Step(
                    shell("# --rdzv-conf is_host=true"),
                    note="in the line of torchrun, on the host of the endpoint; "
                    "is_host=false on the others",
                )
            )
        ],
    ),
)
LOOK_UP_S = 4.0
_REST_S = 0.5


class RendezvousEndpoint(Check):
    """Decides on every host as torch's agent will, and counts the hosts that would serve."""

    name = "rendezvous_endpoint"
    layer = Layer.NAME
    cost = "seconds"
    instant_when_answered = True
    deadline_s = PATIENT_S + LOOK_UP_S + 2 * _REST_S
    kinds = (RDZV_ENDPOINT_UNHOSTED, RDZV_ENDPOINT_AMBIGUOUS, AGENT_NAMELESS)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The endpoint, what it resolves to here, and whether this host would serve it."""
        given = rendezvous_of(ctx.job, ctx.env)
        if given.backend.lower() != "c10d" or not given.endpoint or in_a_file(given.conf):
            raise Skip("the job does not use a c10d rendezvous over TCP")
        host, is_host = endpoint_host(given.endpoint), is_host_of(given.conf)
        ctx.breadcrumb(f"look up {host} and {host_name()}")
        most = max(_REST_S, min(PATIENT_S, ctx.left() - _REST_S))
        seen = recognise(host, min(LOOK_UP_S, most), most)
        return {
            "endpoint": given.endpoint,
            "host": host,
            "own_name": seen.own.query,
            "resolved": list(seen.host.answers),
            "own": list(seen.own.answers),
            "own_error": "" if seen.own.timed_out else seen.own.error,
            "own_silent": seen.own.timed_out,
            "told": is_host,
            "serves": seen.serves if is_host is None else is_host,
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on hosts where torchrun ends at once; one if no host or several would serve,
        only if every host reported.
        """
        seen = list(cluster.facts(self.name))
        dying = [(rank, facts) for rank, facts in seen if _dies(facts)]
        for rank, facts in dying:
            silent = facts.get("own_silent")
            why = "no answer from the resolver" if silent else facts["own_error"]
            yield Finding(
                AGENT_NAMELESS,
                f"{facts['own_name']} does not resolve: {why}",
                Where(hosts=(rank.host.label,)),
                dict(facts),
                confidence=Confidence.LIKELY if silent else Confidence.CERTAIN,
            )
        hosts = {rank.host.id for rank, _ in seen}
        if not spans_machines(cluster) or cluster.absent or len(hosts) < cluster.nnodes:
            return
        serving = [rank.host for rank, facts in seen if facts["serves"]]
        evidence = {rank.host.label: dict(facts) for rank, facts in seen}
        endpoint, host = seen[0][1]["endpoint"], seen[0][1]["host"]
        if not serving and not dying:  # else one of these may be the host that is meant
            owners = [
                rank.host
                for rank, facts in seen
                if set(facts["resolved"]) & set(rank.host.addresses)
            ]
            fix = ""
            if owners:
                line = shell(
                    "# --rdzv-conf is_host=true --local-addr={}", _address(owners[0].addresses)
                )
                fix = Fix(Step(line, (owners[0].label,), note="in the line of torchrun"))
            yield Finding(
                RDZV_ENDPOINT_UNHOSTED,
                f"--rdzv-endpoint={endpoint}: {host} is neither the host name of a host nor an "
                "address that its own name resolves to",
                Where(hosts=tuple(sorted(owner.label for owner in owners))),
                evidence,
                fix=fix,
                confidence=Confidence.CERTAIN if owners else Confidence.LIKELY,
            )
        elif len({owner.label for owner in serving}) > 1:
            address = _address(serving[0].addresses)
            line = shell("# --rdzv-endpoint {}:{}", address, port_of(endpoint))
            note = "in the line of torchrun, the same everywhere, of one of the hosts"
            yield Finding(
                RDZV_ENDPOINT_AMBIGUOUS,
                f"--rdzv-endpoint={endpoint}: {len(serving)} hosts would serve it",
                Where(hosts=tuple(sorted(owner.label for owner in serving))),
                evidence,
                fix=Fix(Step(line, On.EVERY, note=note)),
            )


def _dies(facts: Mapping[str, Any]) -> bool:
    """True if the agent fails to look up its own name, and needs to: with is_host, or for an
    endpoint of localhost, of a loopback address or of the very host name, it knows before.
    """
    knows = facts["told"] is not None or facts["serves"] or facts["own"]
    return not knows and bool(facts.get("own_error") or facts.get("own_silent"))


def _address(addresses: Iterable[str]) -> str:
    likely = likely_address([("", list(addresses))])
    return likely[1] if likely else "ADDRESS"
