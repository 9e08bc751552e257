"""Calls to the listeners of the other hosts: the facts that `matrix` reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, TypeVar

from nccl_doctor.model.check import Context, Untested
from nccl_doctor.toolkit.nccl.survey import given_answer, survey
from nccl_doctor.toolkit.net.interfaces import hardware_address, interfaces
from nccl_doctor.toolkit.net.routes import dead_route, source_of
from nccl_doctor.toolkit.net.rtnetlink import fixed_neighbours, neighbours
from nccl_doctor.toolkit.peers.drops import Counts, grown, read_counts_of_all
from nccl_doctor.toolkit.peers.echo import MAX_CALLS, Call, ListeningAddress, Talk, call_all, scoped
from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.peers.path_size import carried
from nccl_doctor.toolkit.peers.schedule import schedule_of
from nccl_doctor.toolkit.peers.standing import Roads, roads_of_store
from nccl_doctor.toolkit.peers.visitors import Stranger

Entry = tuple[int, Mapping[str, Any]]
"""A listener of a host: its seat, and an `echo.Door` as plain data with additional keys."""
T = TypeVar("T")
Gone = Callable[[Collection[int]], Collection[int]]
"""Those of some seats that listen no more: what failed there proves nothing."""

# All hosts call at about the same time, so each waits at most for a slow start of the others.
_LISTEN_S = 10.0
# A failed call takes 1.4 s dropped, 2 x 8 s at the very worst; one more batch for each 128 calls.
_CALLS_S = 18.0
_BATCH_S = 6.0
_DONE_S = 20.0
_LEAVE_S = 3.0
"""Time to end in: where the store is slow to answer, what was found is not to be lost."""
_TAIL = 47
"""Characters of a hardware address; of one of InfiniBand, those behind flags and queue pair."""


def calls_deadline(hosts: int) -> float:
    """Seconds that a round of `hold_calls` takes at most."""
    return _LISTEN_S + _CALLS_S + _DONE_S + 10 + 2 * _BATCH_S * (hosts // MAX_CALLS)


def hold_calls(
    ctx: Context,
    listeners: Listeners,
    known: Mapping[str, Mapping[str, Any]],
    call: Callable[[list[Entry], float, Gone], T],
    *,
    of: Collection[int] | None = None,
    all_may_be_known: bool = False,
    so_far: Callable[[T], None] = lambda made: None,
) -> T:
    """Let the others of the group call the open `listeners`, and call theirs meanwhile.

    Args:
        ctx: of a round that observes together.
        listeners: of this host.
        known: address of a listener → what the others need besides its `ListeningAddress`.
        call: called with the entries of the others, those of the next one in the group first, the
            seconds after which no call may begin, and who tells which of them listen no more.
        of: seats of the partners, who call this host too, in the order of the calls; None for all.
        all_may_be_known: hosts that have nothing to be called on are no fault.
        so_far: given what `call` returns before the others are waited for.

    Returns: what `call` returns.

    Raises:
        Untested: no other host was listening.
    """
    if ctx.peers is None or len(ctx.group) < 2:
        raise Untested("no other host signed in")
    posted = [{**known[door.address], **door.to_json()} for door in listeners.doors]
    ctx.peers.post("listen", posted)
    ctx.breadcrumb("waiting for the listeners of the other hosts")
    # Each host starts with the next one in the group, so that no host is called by all at once.
    order = tuple(of or ctx.group[ctx.position + 1 :] + ctx.group[: ctx.position])
    # Of a short time half is for the calls: one host that cannot listen is not to cost them all.
    theirs = ctx.peers.collect("listen", min(_LISTEN_S, ctx.left() / 2), of)
    entries = [(seat, entry) for seat in order for entry in theirs.get(seat, ())]
    if not entries and not (theirs and all_may_be_known):
        raise Untested(f"no other host was listening within {_LISTEN_S:g} s")
    ctx.breadcrumb("calling the other hosts", hosts=len(order), addresses=len(entries))
    peers, budget_s = ctx.peers, _CALLS_S + _BATCH_S * (len(entries) // MAX_CALLS)
    made = call(
        entries,
        min(budget_s, ctx.left() / 2),
        lambda seats: peers.collect("gone", 0.0, seats) if seats else (),
    )
    so_far(made)
    ctx.breadcrumb("listening until every other host has finished its calls")
    peers.post("done", True)
    peers.collect("done", min(_DONE_S, max(0.0, ctx.left() - _LEAVE_S)), of)
    peers.post("gone", True)
    return made


class CallMatrix(TypedDict):
    """Facts of a host that `matrix.read_calls` reads.

    `peers` as `call_others` returns it; `nccl_data` as `survey`; `not_bound`: address → why;
    `strangers` and `late` as `Visitors` returns them; `drops` as `drops.grown` returns them;
    `roads` as `roads_of_store` returns them.
    """

    nccl_data: str
    peers: dict[str, list[dict[str, Any]]]
    not_bound: dict[str, str]
    strangers: list[Stranger]
    late: dict[str, float]
    drops: Counts
    roads: Roads


def call_on_chosen_addresses(ctx: Context, talk: Talk | None = None) -> CallMatrix:
    """Call the others of the group on every address that NCCL and gloo choose there, while they
    call this host on those that are chosen here; of many hosts, those of the round's schedule.

    Args:
        ctx: of a round that observes together; its parameters have `nccl`, see `other_answers`.
        talk: what to say on each connection, see `call_all`.

    Raises:
        Untested: no other host was listening.
    """
    ctx.breadcrumb("choosing interfaces as NCCL and gloo do")
    answer = given_answer(ctx)
    choice = survey(ctx.env, root=ctx.root, ask=lambda: answer)
    doors = {
        scoped(each["address"], each["interface"]): {
            **each,
            "mac": hardware_address(each["interface"], ctx.root),
        }
        for each in choice["listen"]
    }
    ctx.breadcrumb("listening", addresses=list(doors))
    before = read_counts_of_all(ctx.root)

    def facts(peers: dict[str, list[dict[str, Any]]]) -> CallMatrix:
        return {
            "nccl_data": choice["nccl_data"],
            "peers": peers,
            "not_bound": listeners.failed,
            "strangers": listeners.strangers(),
            "late": listeners.late(),
            "drops": grown(before, read_counts_of_all(ctx.root)),
            "roads": roads_of_store(ctx.launch.master_port),
        }

    with Listeners(list(doors)) as listeners:
        schedule = schedule_of(ctx.group, ctx.params)
        partners = None if schedule is None else schedule.partners(ctx.seat)
        small = {seat for seat, large in (partners or {}).items() if not large}
        peers = hold_calls(
            ctx,
            listeners,
            doors,
            partial(call_others, talk=talk, small=small),
            of=partners,
            so_far=lambda made: ctx.so_far(facts(made)),
        )
    return facts(peers)


def _before_it_went(calls: Sequence[Call]) -> Sequence[Call]:
    """Those of the calls of a host that listens no more which prove something: it had passed a call
    before, and has closed to the connections that came then.
    """
    if not calls or calls[-1].outcome != "ok":
        return []
    return [*calls[:-1], replace(calls[-1], wanted=0, stood=0)]


def call_others(
    entries: Sequence[Entry],
    budget_s: float,
    gone: Gone = lambda seats: (),
    talk: Talk | None = None,
    small: Collection[int] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Call every address that other hosts listen on, except addresses that this host has too.

    Args:
        entries: with `interface` and `roles`, and `mac`, the hardware address of the interface.
        budget_s: no call begins later than this.
        gone: who of those that were called in vain listens no more: these calls were not made.
        talk: what to say on each connection, see `call_all`.
        small: seats with which no large message is exchanged.

    Returns: seat, as text, → for each entry `address`, `interface`, `roles`, `port`, `attempts`
    (see `matrix.PeerCall`); if the call failed, too few connections came about or the other host
    saw it come from elsewhere, `source`: the own address that it came from; if it failed, the
    `route` that leads nowhere, if it is one, and `fixed`: hardware address and interface of an
    entry of the neighbour table that somebody made, if it is not the other host's; and `answers`:
    the hardware address that answers here for a neighbour, if it is another one. The first one
    whose large echo stopped has `carries`, from `path_size.carried`, and the `mtu` of the interface
    of that name here.
    """
    own = {address for each in interfaces() for address in each.addresses}
    shared = [entry["address"].partition("%")[0] in own for _, entry in entries]
    others = [each for each, mine in zip(entries, shared, strict=True) if not mine]
    doors = [door_of(entry) for _, entry in others]
    brief = [seat in small for seat, _ in others]
    calls = call_all(doors, budget_s, talk=talk, brief=brief)
    failed = [
        seat
        for (seat, _), each in zip(others, calls, strict=True)
        if each and (each[-1].outcome != "ok" or each[-1].stood < each[-1].wanted)
    ]
    away = gone(failed)
    results = (
        _before_it_went(each) if seat in away else each
        for (seat, _), each in zip(others, calls, strict=True)
    )
    peers: dict[str, list[dict[str, Any]]] = {}
    macs, fixed = neighbours(), None
    nics = {each.name: each.mtu for each in interfaces()}
    sized = False
    for (seat, entry), mine in zip(entries, shared, strict=True):
        answers = macs.get(entry["address"].partition("%")[0])
        # The tokens of the listener stay out of the facts.
        known = {key: entry[key] for key in ("address", "interface", "roles", "port")}
        made = [] if mine else [call.to_json() for call in next(results)]
        known["attempts"] = [{"outcome": "own-address"}] if mine else made
        last: Mapping[str, Any] = made[-1] if made else {"outcome": "ok"}
        short = last.get("stood", 0) < last.get("wanted", 0)
        if last["outcome"] != "ok" or short or last.get("seen"):
            known["source"], lost = source_of(entry["address"])
        if last["outcome"] == "mtu" and (nic := entry["interface"]) in nics and not sized:
            sized = True  # once: the hosts of a network are to have one MTU
            known["mtu"], known["carries"] = nics[nic], carried(door_of(entry), nics[nic])
        if last["outcome"] != "ok":
            if route := dead_route(entry["address"], lost):
                known["route"] = route
            fixed = fixed_neighbours() if fixed is None else fixed
            entered = fixed.get(entry["address"].partition("%")[0])
            if entered and entry.get("mac") and entered.mac[-_TAIL:] != entry["mac"][-_TAIL:]:
                known["fixed"] = list(entered)
            if lost is not None:  # this host itself has no route, whatever its errno was
                known["attempts"] = [{**each, "outcome": "unreachable"} for each in made]
            elif answers == "":  # the calls ended before the kernel had given up
                known["attempts"] = [_nobody(each) for each in made]
        if answers and entry.get("mac") and answers[-_TAIL:] != entry["mac"][-_TAIL:]:
            known["answers"] = answers
        peers.setdefault(str(seat), []).append(known)
    return peers


def _nobody(attempt: Mapping[str, Any]) -> Mapping[str, Any]:
    """An attempt to call an address for which no machine of the local network answers."""
    lost = attempt["outcome"] == "dropped"
    return {**attempt, "outcome": "no-neighbour"} if lost else attempt


def door_of(entry: Mapping[str, Any]) -> ListeningAddress:
    """The listening address in an entry."""
    return ListeningAddress(entry["address"], entry["port"], entry["token"], entry["answer"])
