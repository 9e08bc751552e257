"""Do several process groups in one job work, in turn and at the same time?

What it checks
--------------
A default group over all ranks, then further groups by new_group on all ranks in the same order (all
ranks once more, every second rank, one rank per host), in these variants: `in-order`, each group
used as soon as it is formed; `in-turn`, all formed and then used alternately; `at-once`, with one
collective in flight on each. With NCCL each variant is also tried with a default group that is
bound to a device (`-bound`: init_process_group with device_id); gloo has no such variants, as torch
refuses a CPU as device_id. Where `--mesh` or `--groups` say that the job forms several groups, NCCL
has one more variant, `beside-gloo`: further groups of gloo, used in turn with the default group, as
checkpoints and data loading use them. Gloo connects the members as it forms a group, and not at the
first use. So with gloo one round, `every-use`, uses the same groups in all three ways, and the
variants are held only where that round hangs or fails and no rank is seen to be the cause.
Each round runs in its own processes, under its own deadline, after the collectives of all ranks
were good, and each variant whatever the result of those before it. Integer results are checked
exactly. What hangs without a visible reason is tried again (`-again`); if the reason is still
unknown, torch compares what each rank is about to run (`-compared`).

Why it matters
--------------
Jobs with tensor, pipeline or sequence parallelism, or with a trainer beside inference engines, form
many groups. They can hang although every group by itself is good: which variant hangs, and which
does not, is the diagnosis.

How to fix
----------
Call new_group on every rank of the default group, in the same order, with the same lists, also on
ranks that are not members. Where only `at-once` hangs: use the groups one after the other, or in
the same order on every rank. Where only the `-bound` variants hang: form the default group without
device_id. Where only `beside-gloo` is bad: gloo uses the address of the host's own name, or
GLOO_SOCKET_IFNAME, and not what NCCL uses. Where one rank is named: compare its torch, and anything
that wraps it, with the others.

When it is wrong
----------------
A machine under heavy load, on which small collectives take longer than `--collective-timeout`,
looks like a hang. Raise that option and see whether the finding stays. Not every job has groups of
gloo beside NCCL: a fault in that variant is a warning.
Not validated on hardware: the NCCL path has not run on a GPU yet.

References
----------
https://docs.pytorch.org/docs/stable/distributed.html#groups
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Layer,
    Level,
    Round,
    Scope,
    Severity,
    Skip,
    Untested,
)
from nccl_doctor.toolkit.groups.attempts import GROUP_READS, Attempt, attempt_deadline, attempts_of
from nccl_doctor.toolkit.groups.culprits import is_open, judge_groups, round_compared, rounds_again
from nccl_doctor.toolkit.groups.exercise import Exercise
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.kinds import GROUP_KINDS, GROUP_NEEDS
from nccl_doctor.toolkit.groups.spans import Span, from_span, to_span

from .making import Maker

IN_ORDER, IN_TURN, AT_ONCE = "in-order", "in-turn", "at-once"
_USES = (IN_ORDER, IN_TURN, AT_ONCE)
EVERY_USE = "every-use"
BOUND = "-bound"
BESIDE_GLOO = "beside-gloo"
_VARIANTS = (
    EVERY_USE, *(use + end for use in _USES for end in ("", BOUND)), BESIDE_GLOO,
)  # fmt: skip
_TIMES = 2


class GroupsFacts(TypedDict):
    """Facts that `observe` returns; another check reads them."""

    steps: list[str]
    wrong: list[dict[str, Any]]
    made: dict[str, Any]


class Groups(Check):
    """Several process groups in one job."""

    name = "groups"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = GROUP_KINDS
    reads = GROUP_READS
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = GROUP_NEEDS

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """The rounds: all ranks once per variant; again what hung without a visible reason. With
        gloo first all uses in one round, and the variants if that one does not say enough.
        """
        world = tuple(rank.seat for rank in cluster.present)
        groups = _places(cluster, world)
        deadline_s = attempt_deadline(cluster, 1 + len(groups))

        def variant(use: str, end: str = "") -> Round:
            params = {"groups": groups, "use": use, "bind": bool(end)}
            return Round(use + end, (world,), deadline_s, params)

        attempts = attempts_of(cluster, self.name)
        rounds = [variant(use) for use in _USES]
        if cluster.backend == "nccl":
            rounds += [variant(use, BOUND) for use in _USES]
            if cluster.job.has_several_groups:
                rounds.append(variant(BESIDE_GLOO))
        else:
            first = variant(EVERY_USE)
            if not any(map(is_open, attempts.get(EVERY_USE, ()))):
                return [first]
            rounds = [first, *rounds]
            if any(each.name not in attempts for each in rounds):
                return rounds
            attempts = _told_apart(attempts)
        params = {round_.name: round_.params for round_ in rounds}
        rounds += rounds_again(attempts, deadline_s, params)
        rounds += round_compared(attempts, deadline_s, params)
        return rounds

    def observe(self, ctx: Context) -> GroupsFacts:
        """Run one variant: form the default group and the further groups, and use them.

        Returns: as `Exercise.facts`, and `made`: group → what torch says of it, as `describe_group`
            does, the default group under the round's name. Each wrong result has `members`, the
            ranks of its group.

        Raises:
            Skip: this torch cannot bind a group to a device.
            Untested: this torch cannot compare what its ranks run.
        """
        import torch.distributed as dist

        use, bind = (ctx.params[key] for key in ("use", "bind"))
        groups = {name: from_span(span) for name, span in ctx.params["groups"].items()}
        if bind and "device_id" not in inspect.signature(dist.init_process_group).parameters:
            raise Skip("init_process_group of this torch has no device_id")
        if ctx.params.get("compare"):
            if not hasattr(dist, "set_debug_level"):
                raise Untested("this torch cannot compare what its ranks run")
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        device = form_world(ctx, bind=bind)
        tester, maker = Exercise(ctx.breadcrumb, device), Maker(ctx, device)
        mine = {}
        gloo = "gloo" if use == BESIDE_GLOO else None
        for name, members in groups.items():
            group = maker.make(name, members, gloo)
            if ctx.position in members:
                mine[name] = (group, members.index(ctx.position), len(members))
                if use in (IN_ORDER, EVERY_USE):
                    tester.reduce(name, *mine[name])
        for _ in range(_TIMES if use in (IN_TURN, EVERY_USE) else 0):
            for name, place in mine.items():
                tester.reduce(name, *place)
        for _ in range(_TIMES if gloo else 0):
            for name, place in mine.items():
                tester.reduce(name, *place, on_cpu=True)
            tester.reduce(ctx.round, None, ctx.position, len(ctx.group))
        if use in (AT_ONCE, EVERY_USE):
            tester.together(mine)
        everyone = list(range(len(ctx.group)))
        wrong = [{**bad, "members": groups.get(bad["group"], everyone)} for bad in tester.wrong]
        return {"steps": tester.steps, "wrong": wrong, "made": maker.made}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the culprits of each variant; where none is seen, one finding that lists bad
        and good variants.
        """
        if not cluster.complete:
            return
        attempts = _told_apart(attempts_of(cluster, self.name))
        variants = {name: found[0] for name in _VARIANTS if (found := attempts.get(name))}
        seen = set()
        for finding in judge_groups(attempts):
            if finding.evidence.get("round") == BESIDE_GLOO and finding.level is Severity.FAIL:
                finding = finding.replaced(severity=Severity.WARN)
            variant = variants.get(str(finding.evidence.get("round")))
            if variant is None or not is_open(variant):
                yield finding
                continue
            key = (finding.code, finding.where, finding.level)
            if key not in seen:  # only once for all variants
                seen.add(key)
                states = {name: _state(attempt) for name, attempt in variants.items()}
                yield finding.replaced(
                    message=f"{finding.message}; {_contrast(states)}",
                    evidence={**finding.evidence, "variants": states},
                )


def _told_apart(attempts: dict[str, list[Attempt]]) -> dict[str, list[Attempt]]:
    """Attempts that say most: without the round of every use, where a variant that was tried was
    not good either.
    """
    others = {name: found for name, found in attempts.items() if not name.startswith(EVERY_USE)}
    good = all(each.is_good or each.is_untried for each in chain(*others.values()))
    return attempts if good else others


def _places(cluster: Cluster, world: tuple[int, ...]) -> dict[str, Span]:
    """Group → its ranks of the default group, ascending."""
    hosts = cluster.present_hosts
    firsts = [seat for host in hosts for seat in [cluster.ranks_on(host)[0].seat]]
    groups = {"world": world, "evens": world[::2], "odds": world[1::2]}
    place = {seat: at for at, seat in enumerate(world)}  # a search for each would be ranks²
    if len(hosts) > 1:
        groups["across-hosts"] = tuple(sorted(firsts, key=place.__getitem__))
    return {n: to_span([place[seat] for seat in seats]) for n, seats in groups.items() if seats}


def _state(attempt: Attempt) -> str:
    if attempt.is_good:
        return "good"
    if not is_open(attempt):
        return "unclear"
    return "hangs" if attempt.is_unexplained else "fails"


def _contrast(states: Mapping[str, str]) -> str:
    """The difference between bad and good variants: that is the diagnosis."""
    bad = [name for name, state in states.items() if state in ("hangs", "fails")]
    good = [name for name, state in states.items() if state == "good"]
    if not good:
        return f"the same in every variant that was tried ({', '.join(bad)})"
    listed = f" (bad: {', '.join(bad)}; good: {', '.join(good)})"
    if all(name.endswith(BOUND) and name.removesuffix(BOUND) in good for name in bad):
        return "only if the default group is bound to a device; unbound it is good" + listed
    if bad == [EVERY_USE]:
        return "only with all uses in one process, one after the other" + listed
    if bad == [BESIDE_GLOO]:
        return "only with gloo groups beside NCCL; NCCL's own groups are good" + listed
    if all(name.startswith(AT_ONCE) for name in bad) and IN_TURN in good:
        return "only when the groups are used at the same time; in turn they are good" + listed
    if all(not name.startswith(IN_ORDER) for name in bad) and IN_ORDER in good:
        return "only after all groups are formed; used as soon as formed, each is good" + listed
    return "not in every variant" + listed
