"""Will the name that torchrun's agents give to rank 0 lead there from every host?

What it checks
--------------
With `--rdzv-backend=c10d` the endpoint is only where the agents meet. MASTER_ADDR of the ranks is
another one: `--local-addr` of one agent, or else what `socket.getfqdn()` says on its host. It is
the agent whose name comes first in the alphabet, as that gets rank 0. Every host says its name and
looks up the one that comes first; the port is any free port there. The names of all other hosts are
looked up as well: one of them comes first once the agents meet again without that host. Of more
than 64 names, each host looks up 15 besides the first, and each name is looked up by 15 hosts or
more. How many names a host left out is in its facts.

Why it matters
--------------
The agents have met, and yet the ranks cannot: a name that only its own host knows ends in
"Name or service not known", and "localhost", which a line like "127.0.0.1 localhost node1" in
/etc/hosts makes of a host, leads every host to itself. The error comes from another host than the
one whose name is wrong.

How to fix
----------
Give the agents an address in place of the name: torchrun --local-addr=ADDRESS on every host, with
its own address on the network that the hosts share. Or let the names resolve everywhere, by DNS or
/etc/hosts.

When it is wrong
----------------
Another agent may come first: after a restart without this host, of which a name that leads astray
is information, or if --local-addr is set by a script that runs later. An answer that is none of the
host's own addresses may be right behind an address translation: that is a warning, and of a later
name nothing is said. A first name without an answer in 7 s is a likely failure, as torch waits
longer. Only for a torchrun command behind `--`, or PET_ variables: under torchrun MASTER_ADDR is
known, and check `master_addr` looks at it.

References
----------
torch/distributed/elastic/rendezvous/dynamic_rendezvous.py (_NodeDescGenerator, next_rendezvous);
pytorch/pytorch issues 74824 and 150532; getaddrinfo(3), hosts(5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    Level,
    On,
    Round,
    Severity,
    Skip,
    Step,
    Where,
    likely_address,
    shell,
    spans_machines,
)
from nccl_doctor.toolkit.c10d import AGENT_NAMES, NAMES, first_agent, rendezvous_of
from nccl_doctor.toolkit.hosts import some_of
from nccl_doctor.toolkit.net.interfaces import is_loopback
from nccl_doctor.toolkit.net.names import PATIENT_S, LookUp, full_name, look_up

AGENT_NAME_MISLEADS = Kind(
    code="agent-name-misleads",
    layer=Layer.NAME,
    title="The name of torchrun's first agent does not lead to it",
    why="Its name becomes MASTER_ADDR of all ranks: where it leads elsewhere, or nowhere, they do "
    "not find rank 0.",
    fix=Fix(
        Step(
            shell("# --local-addr ADDRESS"),
            On.EVERY,
            note="in the line of torchrun, with an address of that host",
        )
    ),
    effects=(Effect.JOB_ONLY,),
)
LATER_MISLEADS = AGENT_NAME_MISLEADS.variant(
    title="The name of an agent of torchrun would not lead to it after a restart",
    why="After a restart another agent may be the first, and its name becomes MASTER_ADDR of all "
    "ranks: where it leads nowhere, they do not find rank 0.",
)
ROUND = NAMES
_SILENT = "gets no answer from the resolver"
LOOK_UP_S = 4.0
_ALL = 64
"""Names of which every host looks up each; more would be too many for a name server at once."""
_SOME = 15
"""Names besides the first that a host looks up then."""
_AT_ONCE = 16
_REST_S = 0.5


class _Answer(TypedDict):
    answers: list[str]
    error: str


class AgentNameFacts(_Answer):
    """Facts that `observe` returns; other checks read them."""

    name: str
    first: str
    silent: bool
    later: list[dict[str, Any]]
    left_out: int


class AgentNames(Check):
    """Exchanges the names of the agents, and looks up the first."""

    name = AGENT_NAMES
    layer = Layer.NAME
    cost = "seconds"
    instant_when_answered = True
    kinds = (AGENT_NAME_MISLEADS,)
    level = Level.QUICK
    together = True

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round of all hosts, if agents of c10d will meet on them."""
        firsts = [cluster.first_on(host) for host in cluster.present_hosts if host.joined]
        seats = tuple(rank.seat for rank in firsts if rank is not None)
        env = firsts[0].env if firsts and firsts[0] is not None else {}
        c10d = rendezvous_of(cluster.job, env).backend.lower() == "c10d"
        served = any(rank.launch and rank.launch.agent_store for rank in cluster.present)
        if not c10d or served or not spans_machines(cluster):
            raise Skip("no agents of a c10d rendezvous are to meet")
        return (Round(ROUND, (seats,), PATIENT_S + 3 * LOOK_UP_S, may_shrink=True),)

    def observe(self, ctx: Context) -> AgentNameFacts:
        """`name` of the agent of this host, `first` of all names, and `answers` for it here.
        `later`: others of the names, each `name` with its answers; `left_out`: how many more there
        are, which this host did not look up, or got no answer for in time.
        """
        if ctx.peers is None:
            raise Skip("only together with other hosts")
        ctx.breadcrumb("socket.getfqdn()")
        name = rendezvous_of(ctx.job, ctx.env).local_addr or full_name(LOOK_UP_S)
        ctx.peers.post("name", name)
        collected = ctx.peers.collect("name", ctx.left() - PATIENT_S)
        names = sorted({name, *map(str, collected.values())})
        ctx.breadcrumb(f"look up {names[0]}")
        # Before the others: their number is not to delay the answer that counts.
        first = look_up(names[0], max(0.0, min(PATIENT_S, ctx.left() - _REST_S)))
        chosen = others_of(name, names)
        ctx.breadcrumb(f"look up {len(chosen)} other names")

        def ask(other: str) -> LookUp | None:
            in_time = ctx.left() > LOOK_UP_S + _REST_S
            return look_up(other, LOOK_UP_S) if in_time else None

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = [each for each in pool.map(ask, chosen) if each and not each.timed_out]
        return {
            "name": name,
            "first": names[0],
            **_answer(first),
            "silent": first.timed_out,
            "later": [{"name": each.query, **_answer(each)} for each in found],
            "left_out": len(names) - 1 - len(found),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding on the hosts that the name leads astray, or on its own if it leads all."""
        told = [
            (each.host, each.outcome.facts)
            for each in cluster.evidence(self.name, ROUND)
            if each.outcome.facts
        ]
        owner = first_agent(cluster)
        first = min((str(facts["first"]) for _, facts in told), default="")
        seen = [(host, facts) for host, facts in told if facts["first"] == first]
        if owner is None or len(seen) < 2:
            return
        wrong = {
            host.label: words
            for host, facts in seen
            if (words := _astray(host, facts, owner)) is not None
        }
        others = {host.label for host, _ in seen if host.id != owner.id}
        if not wrong:
            yield from _later(seen, owner)
            return
        elsewhere = all(words.startswith("leads to") for words in wrong.values())
        unsure = all(words.startswith(("leads to", _SILENT)) for words in wrong.values())
        likely = likely_address([("", list(owner.addresses))])
        all_of_them = others <= set(wrong)
        yield Finding(
            AGENT_NAME_MISLEADS,
            f"MASTER_ADDR will be {first}, as {owner.label} calls itself: "
            + ", ".join(sorted(set(wrong.values()))),
            Where(hosts=(owner.label,) if all_of_them else tuple(sorted(wrong))),
            {"name": first, "of": owner.label, "astray": wrong},
            fix=Fix(
                Step(
                    shell("# --local-addr {}", likely[1] if likely else "ADDRESS"),
                    (owner.label,),
                    note="in the line of torchrun; on every other host its own address",
                )
            ),
            severity=Severity.WARN if elsewhere else None,
            confidence=Confidence.LIKELY if unsure else Confidence.CERTAIN,
        )


def others_of(name: str, names: Sequence[str]) -> Sequence[str]:
    """Names besides the first that the host of `name` looks up.

    Of many, some that are far apart in the alphabet, so that each of them has its turn on as many
    hosts, and hosts of one rack are not asked about by that rack alone.

    Args:
        name: one of `names`.
        names: of all hosts, each once, in order.
    """
    later = names[1:]
    if len(names) <= _ALL:
        return later
    step, at = len(later) // _SOME, names.index(name)
    return [later[(at + turn * step) % len(later)] for turn in range(_SOME)]


def _answer(found: LookUp) -> _Answer:
    return {"answers": list(found.answers), "error": found.error}


def _later(seen: Sequence[tuple[Host, Mapping[str, Any]]], first: Host) -> Iterator[Finding]:
    """A note on names that would lead astray once the host whose name is the first is gone."""
    owners: dict[str, Host] = {}
    for host, facts in seen:
        if host.id != first.id:
            owners.setdefault(str(facts["name"]), host)
    wrong: dict[str, dict[str, str]] = {}
    for host, facts in seen:
        for answer in facts.get("later", ()):
            owner = owners.get(str(answer["name"]))
            words = _astray(host, answer, owner) if owner else None
            if owner and words is not None and not words.startswith("leads to"):
                wrong.setdefault(owner.label, {})[host.label] = words
    if wrong:
        whose = next(owner.label for _, owner in sorted(owners.items()) if owner.label in wrong)
        astray = wrong[whose]
        more = f"; so it is with {len(wrong) - 1} more names" if len(wrong) > 1 else ""
        yield Finding(
            LATER_MISLEADS,
            f"after a restart without {first.label}, MASTER_ADDR may be the name of {whose}: on "
            f"{some_of(sorted(astray))} it {min(astray.values())}{more}",
            Where(hosts=tuple(sorted(wrong))),
            {"astray": wrong},
            severity=Severity.INFO,
        )


def _astray(host: Host, facts: Mapping[str, Any], owner: Host) -> str | None:
    """Fault in the answers that a host gets for the owner's name; None if there is none."""
    answers = [str(answer) for answer in facts["answers"]]
    if not answers:
        return _SILENT if facts.get("silent") else f"does not resolve ({facts['error']})"
    if host.id == owner.id or set(answers) & set(owner.addresses):
        return None
    own = [answer for answer in answers if is_loopback(answer) or answer in host.addresses]
    if own:
        return f"is {own[0]}, which is each host itself" if is_loopback(own[0]) else "is that host"
    return f"leads to {answers[0]}, no address of that host"
