"""The whole program on a made-up machine: from what its hosts observe to the report.

Two hosts, made by the same builder, each with its ranks. What can be observed is observed by the
checks themselves below the root of each host (`observing`); what needs a GPU or a network is given
(`recorded`). Sign-ins cross as JSON; rounds are those that the checks plan; judging, the report and
the exit code are the program's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nccl_doctor import registry
from nccl_doctor.api import (
    Check,
    Cluster,
    Finding,
    Launch,
    Level,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
)
from nccl_doctor.gather.context import Run, RunConfig
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.progress import Progress
from nccl_doctor.gather.report import make_report
from nccl_doctor.gather.rounds import blockers_among, touches
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.launch.detect import detect
from nccl_doctor.model.findings import Round
from nccl_doctor.model.options import Options
from nccl_doctor.model.report import Report
from nccl_doctor.registry import Registry
from nccl_doctor.toolkit.variables.recorded import allowed
from tests.amdsmi import stand_in as amd_stand_in
from tests.machines import recorded
from tests.machines.host import Host
from tests.machines.observing import AT_THE_END, Task, observe, outcomes
from tests.machines.tools import Tools
from tests.nvml import stand_in

HOSTS = 2
NVML, AMDSMI = "nvml", "amdsmi"
"""Files of a host that say what the vendors' libraries answer."""
PORT = 29500


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with the second host.

    Attributes:
        title: what it is, in the words of whoever knows it.
        code: of the finding that must name it.
        breaks: changes the host, after `Machine.build`.
        ranks, devices, interfaces: the place, beside the host itself; ranks are local ones.
        severity: of the finding.
        names_host: whether the finding names the host.
    """

    title: str
    code: str
    breaks: Callable[[Host], None]
    severity: Severity = Severity.WARN
    ranks: tuple[int, ...] = ()
    devices: Callable[[Host], tuple[str, ...]] = lambda host: ()
    interfaces: tuple[str, ...] = ()
    names_host: bool = True

    def ranks_of(self, machine: Machine) -> tuple[int, ...]:
        """The ranks that the finding names."""
        return tuple(machine.ranks * (HOSTS - 1) + local for local in self.ranks)


@dataclass(frozen=True)
class Machine:
    """A machine type: `build` fills a host; `about` says what is special about it."""

    title: str
    about: str
    sources: tuple[str, ...]
    build: Callable[[Host], None]
    faults: tuple[Fault, ...]
    ranks: int = 8
    launcher: str = "torchrun"


class Gallery:
    """Runs machines below one folder; a host that is not broken is observed once."""

    def __init__(self, folder: Path, tools: Tools, shm: Path | None = None) -> None:
        """`shm`: what lies at /dev/shm of every host whose machine does not say how large it is."""
        self._folder, self._tools, self._shm = folder, tools, shm
        self._healthy: dict[tuple[str, int], tuple[Host, list[SignIn], Seen]] = {}
        self._broken: dict[str, Host] = {}
        self._reports: dict[str, Report] = {}
        self._read: dict[tuple[str, int], _Read] = {}
        self._count = 0
        self.registry: Registry = registry.load(ignore=recorded.NOT_HERE)

    def run(
        self, machine: Machine, fault: Fault | None = None, level: Level = Level.STANDARD
    ) -> Report:
        """The report of rank 0 on two such hosts; the second one has the fault. Made once.

        `level`: of the rounds; what a host or rank observes alone is that of level standard.
        """
        name = f"{machine.title}: {fault.title}" if fault else f"{machine.title}, {level.value}"
        if name not in self._reports:
            self._reports[name] = self._run(machine, fault, level)
        return self._reports[name]

    def _run(self, machine: Machine, fault: Fault | None, level: Level) -> Report:
        hosts = [self._host(machine, node) for node in range(HOSTS - bool(fault))]
        if fault is not None:
            hosts.append(self._observed(machine, HOSTS - 1, fault))
            self._broken[f"{machine.title}: {fault.title}"] = hosts[-1][0]
        return _report(self.registry, [(signed, seen) for _, signed, seen in hosts], level)

    def broken(self, machine: Machine, fault: Fault) -> Host:
        """The host with the fault, of a run that was made."""
        return self._broken[f"{machine.title}: {fault.title}"]

    def _host(self, machine: Machine, node: int) -> tuple[Host, list[SignIn], Seen]:
        key = (machine.title, node)
        if key not in self._healthy:
            self._healthy[key] = self._observed(machine, node, None)
        return self._healthy[key]

    def _observed(
        self, machine: Machine, node: int, fault: Fault | None
    ) -> tuple[Host, list[SignIn], Seen]:
        self._count += 1
        host = Host(self._folder / f"{self._count}", node)
        machine.build(host)
        if fault is not None:
            fault.breaks(host)
        if self._shm and not host.shm_mib:
            (host.root / "dev/shm").rmdir()
            (host.root / "dev/shm").symlink_to(self._shm)
        scopes = {check.name for check in self.registry.checks}
        ranks = [
            (detect(environ), environ)
            for local in range(machine.ranks)
            for environ in [_environ(machine, host, local)]
        ]
        told = [recorded.alone(host, local, machine.ranks) for local in range(machine.ranks)]
        has_nvml, has_amdsmi = bool(host.nvml), bool(host.amdsmi)
        libraries = [str(self._tools.nvml)] * has_nvml + [str(self._tools.amdsmi)] * has_amdsmi
        libraries += (
            [str(self._tools.verbs)] if (host.root / "sys/class/infiniband").exists() else []
        )
        task = Task(
            root=host.root,
            ranks=ranks,
            own=[
                (gpus[local % len(gpus)].uuid, gpus[local % len(gpus)].slot) if gpus else None
                for local in range(machine.ranks)
                for gpus in [recorded.visible(host, local)]
            ],
            cpus=host.cpus,
            nvml=stand_in.write(host.nvml, host.root / NVML) if has_nvml else None,
            amdsmi=amd_stand_in.write(host.amdsmi, host.root / AMDSMI) if has_amdsmi else None,
            libraries=(*libraries, *(str(self._tools.named[name]) for name in host.libraries)),
            shm_mib=host.shm_mib,
            in_shm=host.in_shm,
            later=host.later,
            skip=frozenset(
                {check for check in told[0] if check not in recorded.OVER}
                | recorded.NOT_HERE.keys()
            ),
        )
        before = self._read.get((machine.title, node)) if fault else None
        if before is not None and before.inputs == _inputs(host, task):
            # Only the GPUs' driver says something else.
            task = replace(task, skip=frozenset(scopes) - BY_DRIVER, again=False)
            raw = [{**old, **new} for old, new in zip(before.raw, observe(task), strict=True)]
        else:
            raw = observe(task)
        if fault is None:
            self._read[machine.title, node] = _Read(host, task, raw)
        found = [outcomes(seen) for seen in raw]
        signed = []
        end = {}
        for local, ((launch, environ), seen, said) in enumerate(
            zip(ranks, found, told, strict=True)
        ):
            end |= {check: seen.pop(check) for check in AT_THE_END if check in seen}
            facts = {
                check.name: {"alone": _both(seen.get(check.name), said.get(check.name))}
                for check in self.registry.checks
                if check.name in seen or check.name in said
                if local == 0 or check.scope.value == "rank"
            }
            signed.append(_sign_in(host, launch, environ, local, facts))
        return host, signed, end


Seen = Mapping[str, Outcome]
BY_DRIVER = frozenset({"gpu_state", "amd_gpus"})
"""Checks that ask the driver of GPUs; the others see files and variables alone."""


@dataclass
class _Read:
    """A host in order, and what was observed there."""

    host: Host
    task: Task
    raw: list[dict[str, Any]]

    @cached_property
    def inputs(self) -> Any:
        """Nothing changes its files after it was read, but `Host.later`."""
        return _inputs(self.host, self.task)


def _inputs(host: Host, task: Task) -> Any:
    """Files, variables and libraries of a host: all that checks see but for the GPUs' driver."""
    files = {}
    for folder, folders, names in os.walk(host.root):
        at = os.path.relpath(folder, host.root)
        for name in names:
            if name not in (NVML, AMDSMI):
                files[at, name] = _content(os.path.join(folder, name))
        for name in folders:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                files[at, name] = os.path.relpath(os.readlink(path), host.root).encode()
    environs = [environ for _, environ in task.ranks]
    return files, environs, task.own, host.libraries, host.later, host.shm_mib, host.in_shm


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _both(seen: Outcome | None, told: Mapping[str, Any] | Outcome | None) -> Outcome:
    """What was observed, with the facts that are given in place of it, or over it."""
    if isinstance(told, Outcome):
        return told
    if seen is None:
        return Outcome(OutcomeStatus.OK, facts=dict(told or {}))
    if seen.status is not OutcomeStatus.OK or told is None:
        return seen
    return replace(seen, facts={**seen.facts, **told})


def _environ(machine: Machine, host: Host, local: int) -> dict[str, str]:
    """Variables of one rank, as its launcher sets them."""
    rank, world = host.node * machine.ranks + local, HOSTS * machine.ranks
    environ = {"MASTER_ADDR": host.address.rpartition(".")[0] + ".1", "MASTER_PORT": str(PORT)}
    if machine.launcher == "srun":
        environ |= {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(host.node),
            "SLURM_NTASKS": str(world),
            "SLURM_STEP_NUM_TASKS": str(world),
            "SLURM_NNODES": str(HOSTS),
            "SLURM_STEP_NUM_NODES": str(HOSTS),
            "SLURM_STEP_TASKS_PER_NODE": f"{machine.ranks}(x{HOSTS})",
            "SLURM_TASKS_PER_NODE": f"{machine.ranks}(x{HOSTS})",
            "SLURM_JOB_NODELIST": f"node[0-{HOSTS - 1}]",
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
    else:
        environ |= {
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GROUP_RANK": str(host.node),
            "GROUP_WORLD_SIZE": str(HOSTS),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(machine.ranks),
        }
    return {**environ, **host.env, **host.env_of_rank(local)}


def _sign_in(
    host: Host, launch: Launch, environ: Mapping[str, str], local: int, facts: Any
) -> SignIn:
    who = SignIn(
        token=f"{host.node}-{local}",
        pid=1000 + local,
        launch=launch,
        host_name=host.name,
        host_key=host.name,
        addresses=tuple(a for nic in host.nics for a in nic.addresses if a != "127.0.0.1"),
        env=allowed(environ),
        device="cuda",
        backend="auto",
        facts=facts,
    )
    return SignIn.from_json(launch.rank or 0, json.loads(json.dumps(who.to_json())))


def _report(checks: Registry, hosts: list[tuple[list[SignIn], Seen]], level: Level) -> Report:
    first = hosts[0][0][0]
    scopes = {check.name: check.scope for check in checks.checks}
    options = Options(level=level)
    evidence = EvidenceLog(first.launch, scopes, {})
    at_the_end: dict[int, Seen] = {}
    for signed, end in hosts:
        for who in signed:
            seat = who.launch.rank or 0
            evidence.sign_in(seat, who, 0.0)
            at_the_end[seat] = end
    # Once, and not before every round: what is given goes well, so no round finds a failure.
    findings, _ = judge_all(evidence.cluster(options, "nccl"), checks.checks)
    for check in checks.checks:
        if check.together and check.level.order <= options.level.order:
            blocking = blockers_among(check, findings)
            _hold(check, blocking, evidence, options, at_the_end)
    started = time.monotonic()
    config = RunConfig(
        registry=checks,
        options=options,
        started=started,
        deadline=started + options.timeout_s,
        command="nccl-doctor run",
        started_at="2026-11-23T00:00:00+00:00",
        progress=Progress(shown=False, deadline=started),
    )
    run = Run(config, first.launch, {}, "nccl", nonce="0123456789abcdef")
    return make_report(run, evidence, complete=True)


def _hold(
    check: Check,
    blocking: Sequence[Finding],
    evidence: EvidenceLog,
    options: Options,
    at_the_end: Mapping[int, Seen],
) -> None:
    """Every round that the check plans, as the coordinator holds them; told or read before."""
    held: set[str] = set()
    while True:
        cluster = evidence.cluster(options, "nccl")
        rounds = [each for each in _planned(check, cluster) if each.name not in held]
        ranks = {rank.seat: rank for rank in cluster.present}
        if not rounds:
            return
        for round_ in rounds:
            held.add(round_.name)
            for group in round_.groups:
                members = [ranks[seat] for seat in group]
                blocker = next((f for f in blocking if touches(f, members, round_)), None)
                for seat in group:
                    if blocker is not None:
                        words = f"blocked by {blocker.code}"
                        outcome = Outcome(OutcomeStatus.UNTESTED, reason=words)
                    elif check.name in AT_THE_END:
                        outcome = at_the_end[seat][check.name]
                    else:
                        outcome = recorded.together(check.name, round_, group, ranks[seat])
                    outcome = replace(outcome, group=min(group))
                    evidence.record(seat, check.name, round_.name, outcome)


def _planned(check: Check, cluster: Cluster) -> tuple[Round, ...]:
    try:
        return tuple(check.plan(cluster))
    except Skip:
        return ()


def loud(report: Report) -> list[Finding]:
    """The causes that the report names: no symptoms, nothing that is only worth knowing."""
    return [found for found in report.root_causes if found.level is not Severity.INFO]


def quiet(report: Report) -> Iterator[Finding]:
    """What is worth knowing."""
    return (found for found in report.findings if found.level is Severity.INFO)
