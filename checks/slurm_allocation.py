"""Do the master and the number of hosts fit what Slurm allocated to the job?

What it checks
--------------
Under Slurm, MASTER_ADDR (or the endpoint of a c10d rendezvous) is compared with the hosts of
SLURM_JOB_NODELIST and with the variables of the host on which srun or sbatch was started:
SLURM_LAUNCH_NODE_IPADDR, SLURM_SRUN_COMM_HOST, SLURM_SUBMIT_HOST. Where it is an address of that
host, the hosts of the list are looked up: one of them may have it. If hosts are missing, the number
of hosts that the job expects is compared with the list too.

Why it matters
--------------
These variables, and `hostname` in a script that runs outside the allocation, are those of a login
node: no rank runs there to serve the store, and all ranks wait for their time-out. So they
do where --nnodes, or WORLD_SIZE, was written for a larger allocation.

How to fix
----------
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
If that name does not resolve on every host, which is tried before it is recommended, use the
address by which Slurm reaches the node: scontrol show node NAME shows it as NodeAddr.
For the number of hosts: --nnodes=$SLURM_NNODES.

When it is wrong
----------------
Hosts may have a second name on a fast network that Slurm does not know. So there is no finding if
all hosts signed in, or if a host of the job has the address. A job may span two allocations, of
which one has not started: then its number of hosts is right. Jobs of several components
(heterogeneous ones) are not compared.

References
----------
sbatch(1), srun(1): output environment variables; scontrol(1): show hostnames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    Rank,
    Skip,
    Step,
    Where,
    shell,
)
from nccl_doctor.toolkit.c10d import endpoint_host, rendezvous_of
from nccl_doctor.toolkit.hosts import everybody_came_in
from nccl_doctor.toolkit.net.interfaces import is_loopback
from nccl_doctor.toolkit.net.names import LookUp, look_up
from nccl_doctor.toolkit.relaunch import start_with
from nccl_doctor.toolkit.slurm import address_of, slurm_hosts

_FIRST = Step(
    shell('export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
)
MASTER_OUTSIDE_ALLOCATION = Kind(
    code="master-outside-allocation",
    layer=Layer.LAUNCH,
    title="The master is not one of the job's hosts",
    why="No rank runs on a login node: the store is not served there, and every rank waits.",
    fix=Fix(_FIRST),
)
_MORE = "more hosts for the job"
NNODES_BEYOND = Kind(
    code="nnodes-beyond-allocation",
    layer=Layer.LAUNCH,
    title="The job expects more hosts than Slurm allocated",
    why="All allocated hosts are here, and no other one can come: every rank waits for its "
    "time-out.",
    fix=Fix(
        Step(shell("# --nnodes=$SLURM_NNODES"), On.EVERY),
        alternatives=[Fix(Step(shell("# sbatch --nodes NODES"), note=_MORE))],
    ),
)
LOOK_UP_S = 2.0
_OF_LAUNCH_NODE = ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST", "SLURM_SUBMIT_HOST")
"""Variables with an address or the name of the host on which srun or sbatch was started: srun(1),
sbatch(1), output environment variables."""
_MOST_LOOKED_UP = 256
_AT_A_TIME = 16


class SlurmAllocation(Check):
    """Compares the master, and the number of hosts, with Slurm's list of hosts."""

    name = "slurm_allocation"
    layer = Layer.LAUNCH
    deadline_s = 6 * LOOK_UP_S
    kinds = (MASTER_OUTSIDE_ALLOCATION, NNODES_BEYOND)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Slurm's hosts, and the addresses of the master; `first`: those of the first of Slurm's
        hosts, None if the master is one of them. `variables` are those of the launch node that lead
        to the master; `outside`: True if the look-ups show that no host of the list has it, None if
        they do not show it.
        """
        hosts = slurm_hosts(ctx.env.get("SLURM_JOB_NODELIST", ""))
        if not hosts:
            raise Skip("not in a Slurm allocation")
        master = ctx.launch.master_addr or ""
        given = rendezvous_of(ctx.job, ctx.env)
        if given.endpoint and given.backend.lower() == "c10d":
            master = endpoint_host(given.endpoint)
        listed = {_short(host) for host in hosts}
        told = {name: ctx.env[name] for name in _OF_LAUNCH_NODE if ctx.env.get(name)}
        asked = [master] if master else []
        if master and _short(master) not in listed:  # what to use then, and whose it is
            asked += [hosts[0], *told.values()]
        found = _look_up_all(asked)
        answers = found.get(master, ())
        variables = [
            name
            for name, value in told.items()
            if value in (master, *answers) or not set(found.get(value, ())).isdisjoint(answers)
        ]
        outside = None
        if variables and _short(master) not in listed and len(hosts) <= _MOST_LOOKED_UP:
            of_hosts = _look_up_all(hosts)
            if all(of_hosts.values()):
                outside = all(set(each).isdisjoint(answers) for each in of_hosts.values())
        return {
            "hosts": list(hosts),
            "master": master,
            "answers": list(answers),
            "first": list(found[hosts[0]]) if hosts[0] in found and len(asked) > 1 else None,
            "launch_node": ctx.env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
            "variables": variables,
            "outside": outside,
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings only if a host did not sign in, and no host that reported has the address."""
        if everybody_came_in(cluster):
            return
        yield from _beyond(cluster)
        owned = {address for host in cluster.hosts for address in host.addresses}
        names = {_short(host.name) for host in cluster.hosts if host.name}
        said: set[str] = set()
        for rank, facts in cluster.facts(self.name):
            master = facts["master"]
            here = any(a in owned or is_loopback(a) for a in facts["answers"])
            if not master or master in said or here or _short(master) in names:
                continue
            hosts = {_short(host) for host in facts["hosts"]}
            if _short(master) in hosts:
                continue
            is_number = bool(facts["answers"]) and master in facts["answers"]
            launch = facts["launch_node"] in (master, *facts["answers"])
            variables = facts.get("variables", ["SLURM_LAUNCH_NODE_IPADDR"] * launch)
            # The launch node may be the first host of the job, without a report here.
            apart = facts.get("outside") or (launch and len(cluster.present_hosts) >= len(hosts))
            if is_number and not apart:
                continue
            said.add(master)
            first = facts["hosts"][0]
            lost = any(other.get("first") == [] for _, other in cluster.facts(self.name))
            fix = _first_of_all(rank, first, resolves=not lost)
            known = "".join(f", {name}" for name in variables)
            yield Finding(
                MASTER_OUTSIDE_ALLOCATION,
                f"the master is {master}{known}; SLURM_JOB_NODELIST has {len(hosts)} hosts, from "
                f"{facts['hosts'][0]} to {facts['hosts'][-1]}",
                Where(hosts=tuple(sorted({r.host.label for r, _ in cluster.facts(self.name)}))),
                {
                    "answers": facts["answers"],
                    "launch_node": facts["launch_node"],
                    "variables": variables,
                },
                fix=fix,
                confidence=Confidence.LIKELY,
            )


def _first_of_all(rank: Rank, first: str, *, resolves: bool) -> Fix:
    """The fix that makes the first of Slurm's hosts the master, in the way in which it is given."""
    if resolves:
        steps = start_with([rank], "master_addr", first, On.EVERY)
        by_variable = [step for step in steps if step.command.startswith("export ")]
        return Fix(*steps, alternatives=[Fix(_FIRST)] if by_variable else [])
    note = f"the name {first} does not resolve on all of them"
    steps = start_with([rank], "master_addr", address_of(first), On.EVERY)
    return Fix(*(replace(step, note=note) for step in steps))


def _look_up_all(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name → its addresses, for as many as answer in time."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return dict(zip(names, (each.answers for each in pool.map(_look_up, names)), strict=True))


def _beyond(cluster: Cluster) -> Iterator[Finding]:
    """The finding where each host of Slurm's list is here, and the job expects more."""
    lists = [facts["hosts"] for _, facts in cluster.facts(SlurmAllocation.name)]
    here = cluster.present_hosts
    firsts = [rank for host in here if (rank := cluster.first_on(host))]
    several = any("SLURM_HET_SIZE" in rank.env for rank in firsts)
    if several or not cluster.complete or len(lists) < len(here) or not lists:
        return
    listed = {_short(name) for name in lists[0]}
    whole = len(listed) == len(here) and listed == {_short(host.label) for host in here}
    nodes = {rank.host.node_rank for rank in cluster.absent} - {None}
    beyond = whole and nodes and cluster.nnodes > len(listed)
    if beyond and all(each == lists[0] for each in lists):
        fix = Fix(
            *start_with(firsts, "nnodes", len(listed), On.EVERY),
            alternatives=[Fix(Step(shell("# sbatch --nodes {}", cluster.nnodes), note=_MORE))],
        )
        yield Finding(
            NNODES_BEYOND,
            f"the job expects {cluster.nnodes} hosts; SLURM_JOB_NODELIST has {len(listed)}, and "
            "all of them are here",
            Where(nodes=tuple(sorted(node for node in nodes if node is not None))),
            fix=fix,
            confidence=Confidence.LIKELY,
        )


def _look_up(name: str) -> LookUp:
    return look_up(name, LOOK_UP_S)


def _short(name: str) -> str:
    """A name without its domain; an address as it is."""
    short, _, domain = name.partition(".")
    return name if short.isdecimal() and domain else short.lower()
