"""Can the other hosts use the addresses that a program says of its host?

What it checks
--------------
Programs beside torch tell the others one address of their host: the value of VLLM_HOST_IP,
SGLANG_HOST_IP, HOST_IP or RAY_NODE_IP_ADDRESS, where one is set; or else the own address on the
default route, which is what connecting a UDP socket to 8.8.8.8 shows (vLLM, SGLang and Ray do so;
nothing is sent); or the one that `socket.getfqdn()` leads to. Every host says what these give, and
listens there, if check `firewall` has not called that address with success already. Hosts call each
other there, in groups of eight: 64 bytes must come back. A host that nobody could call on its way
to MASTER_ADDR has another fault, and is not called.

Why it matters
--------------
Each of these programs waits for that address without an end: vLLM and SGLang in their message
queue, Ray for a node that it knows by another address ("Every node should have a unique IP
address"). NCCL and gloo choose by interface, and work all the same.

How to fix
----------
Say the address on the network of the job on every host, each its own, before the program starts:
VLLM_HOST_IP=ADDRESS, SGLANG_HOST_IP=ADDRESS, ray start --node-ip-address=ADDRESS.

When it is wrong
----------------
It is not known which program the job is: a value of VLLM_HOST_IP is a failure even if vLLM never
starts. HOST_IP has other uses too (in a pod often the address of its node), and the default route
often leads into a network for management that is closed between hosts: these are only information.
So is 127.0.0.1, which is right where each engine stays on its host. An address is called
unreachable only if nobody of its group reaches it, and somebody reaches the host on its way to
MASTER_ADDR.

References
----------
vllm/utils (get_ip) and vllm-project/vllm pull requests 43095 and 30002; sglang.srt.utils (get_ip);
ray/_private/services.py (node_ip_address_from_perspective).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Layer,
    Round,
    Skip,
    Turn,
    Untested,
    likely_address,
    spans_machines,
)
from nccl_doctor.toolkit.net.interfaces import Interface, interfaces, is_loopback
from nccl_doctor.toolkit.net.names import full_name, look_up
from nccl_doctor.toolkit.net.routes import source_of, source_towards
from nccl_doctor.toolkit.peers.calls import call_others, calls_deadline, hold_calls
from nccl_doctor.toolkit.peers.calm import Calm
from nccl_doctor.toolkit.peers.echo import Talk, scoped
from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.peers.loss import loses_heavily
from nccl_doctor.toolkit.peers.visitors import Stranger

from .rules import (
    DATA,
    FQDN,
    NOT_OWN,
    ROUTE,
    SAME,
    UNREACHABLE,
    VARIABLES,
    judge_addresses,
    reached_by_others,
)

LOOK_UP_S = 2.0
_FAR = ("8.8.8.8", "2001:4860:4860::8888")
"""The addresses that vLLM, SGLang and Ray ask the routing table about, in their order."""
_TOGETHER = 8
"""Hosts that call each other: enough to tell a host from the road to it, however many there are."""
_LONGEST = 200
"""Characters of a variable that are kept."""


class AdvertisedFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    own: list[str]
    advertised: list[dict[str, str]]
    data: str
    reached: list[str]
    peers: dict[str, list[dict[str, Any]]]
    strangers: list[Stranger]
    late: dict[str, float]


class AdvertisedAddresses(Check):
    """Says what this host would tell the others, and calls what they would tell."""

    name = "advertised_addresses"
    layer = Layer.PORT
    turn = Turn.LAST  # what check `firewall` has called is not called again
    cost = "seconds"
    together = True
    kinds = (NOT_OWN, SAME, UNREACHABLE)
    reads = ("clock", "firewall", "loss", "uplink")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round of all hosts, in groups of eight."""
        if not spans_machines(cluster):
            raise Skip("only one machine: no other host needs its address")
        if loses_heavily(cluster):
            raise Skip("a road between hosts loses too many packets: mend that first (link-lossy)")
        firsts = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in firsts if rank is not None)
        groups = [seats[at : at + _TOGETHER] for at in range(0, len(seats), _TOGETHER)]
        if len(groups) > 1 and len(groups[-1]) == 1:  # nobody would call it
            groups[-2:] = [groups[-2][:-1], (groups[-2][-1], *groups[-1])]
        limit_s, known = calls_deadline(_TOGETHER), {"reached": reached_by_others(cluster)}
        return (
            Round("calls", tuple(groups), limit_s, known, may_shrink=True, by_seat=tuple(known)),
        )

    def observe(self, ctx: Context) -> AdvertisedFacts:
        """`own` addresses; `advertised`: from `_advertised`; `data`: the own address towards
        MASTER_ADDR; `reached`: own addresses that others have called in check `firewall`; `peers`:
        from `call_others`, with what gives an address as its roles; `strangers` (for
        check `firewall`) and `late`: from `Visitors`.
        """
        found = interfaces()
        # Hosts that take part in routing have their address on lo.
        own = {a: nic for nic in found for a in nic.addresses if not is_loopback(a)}
        nics = [nic for nic in found if nic.running and not nic.loopback]
        ctx.breadcrumb("asking what this host would tell the others")
        with ThreadPoolExecutor(1) as pool:  # both may wait for a name server
            towards = pool.submit(source_towards, ctx.launch.master_addr, LOOK_UP_S)
            told = _advertised(ctx.env, own)
            source = towards.result()
        likely = likely_address([(nic.name, list(nic.addresses)) for nic in nics], source)
        data = likely[1] if likely else ""
        called = ctx.params.get("reached")  # None: check `firewall` did not run
        reached = (called or {}).get(str(ctx.seat), [])
        facts: AdvertisedFacts = {
            "own": sorted(own),
            "advertised": told,
            "data": data,
            "reached": reached,
            "peers": {},
            "strangers": [],
            "late": {},
        }
        roles: dict[str, list[str]] = {data: [DATA]} if data and called is None else {}
        for each in told if called is None or data in reached else ():
            if each["address"] in own and each["address"] not in reached:
                roles.setdefault(each["address"], []).append(each["by"])
        doors = {
            scoped(address, own[address].name): {"interface": own[address].name, "roles": by}
            for address, by in roles.items()
        }
        ctx.breadcrumb("listening", addresses=list(doors))
        with Listeners(list(doors)) as listeners:
            try:
                talk = Talk(calm=Calm(0), large=False)
                call = partial(call_others, talk=talk)
                peers = hold_calls(ctx, listeners, doors, call, all_may_be_known=True)
            except Untested as error:  # what was said can be judged all the same
                raise Untested(str(error), facts) from error
        facts["peers"] = peers
        facts["strangers"], facts["late"] = listeners.strangers(), listeners.late()
        return facts

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on hosts that would tell the others an address that leads astray."""
        if spans_machines(cluster):
            yield from judge_addresses(list(cluster.facts(self.name, "calls")))


def _advertised(env: Mapping[str, str], own: Mapping[str, Interface]) -> list[dict[str, str]]:
    """Source (`by`) of each address, its `value`, and the `address` that it leads to, if any."""
    found = []
    for name in VARIABLES:
        value = env.get(name, "").strip()
        if value:
            found.append({"by": name, "value": value[:_LONGEST], "address": _address(value, own)})
    routed = next((source for far in _FAR if (source := source_of(far)[0])), "")
    if routed and not is_loopback(routed):
        found.append({"by": ROUTE, "value": routed, "address": routed})
    name = full_name(LOOK_UP_S / 2)
    if name and (address := _address(name, own, LOOK_UP_S / 2)) in own:
        found.append({"by": FQDN, "value": name, "address": address})
    return found


def _address(value: str, own: Mapping[str, Interface], limit_s: float = LOOK_UP_S) -> str:
    """The address of a value: itself, or an answer for the name, an own one first."""
    try:
        return str(ipaddress.ip_address(value.strip("[]").partition("%")[0]))
    except ValueError:
        answers = look_up(value, limit_s).answers
        return next((each for each in answers if each in own), answers[0] if answers else "")
