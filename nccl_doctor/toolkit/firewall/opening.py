"""Commands that open a packet filter, in the words of the tool that made the rule. Pure."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.model.fixes import Step
from nccl_doctor.toolkit.firewall.netfilter import quote_hit

_FEW = 16
"""Peers of a host that get a rule each; more get one rule with a set."""
_TABLES = ("filter", "nat", "mangle", "raw", "security")
_BASE = ("input", "output", "forward", "prerouting", "postrouting")
_IPV6_RPFILTER = "/etc/firewalld/firewalld.conf"


def remove_rule(hit: Mapping[str, Any]) -> Step:
    """The step that removes the rule."""
    where = f"{hit['table']} {hit['chain']}"
    if hit["handle"]:
        same = f"nft insert rule {where} {shlex.quote(hit['rule'])}"
        return Step(
            f"nft delete rule {where} handle {hit['handle']}",
            undo="" if _of_iptables(hit) else same,
        )
    if hit["rule"].startswith("-A "):
        tool, rule = f"{hit['tool']} -t {hit['table']}", hit["rule"].removeprefix("-A ")
        return Step(f"{tool} -D {rule}", undo=f"{tool} -A {rule}")
    return Step(f"# remove the rule {quote_hit(hit)}")


def let_in(
    hit: Mapping[str, Any] | None, peers: Sequence[str], managers: Sequence[str]
) -> tuple[Step, ...]:
    """Steps that let tcp from (or to) the peers pass, for the tool that stops it.

    What `iptables` made it also gets back, though nft shows it: whoever saves and restores the
    rules with iptables loses what nft put among them.

    Args:
        hit: a `Hit` as plain data, with `incoming` added; None where no rule is known.
        peers: addresses; what is none stands for one that is not known.
        managers: of that host, from `Rules`. They control incoming packets.

    Returns: nothing where nothing is known to stop it.
    """
    if not peers:
        return ()
    if hit is not None and hit.get("way_back"):  # such a rule comes before all zones
        return (_without_way_back(hit, managers),)
    if hit is None or hit["incoming"]:
        if "firewalld" in managers and _is_of(hit, "firewalld"):
            return (_firewalld(peers),)
        if "ufw" in managers and _is_of(hit, "ufw"):
            return tuple(_ufw(peer) for peer in peers)
    if hit is None:
        return ()
    if _of_iptables(hit):
        return tuple(_iptables(hit, peer) for peer in peers)
    if len(peers) > _FEW:
        return (_nft(hit, f"{{ {', '.join(peers)} }}"),)
    return tuple(_nft(hit, peer) for peer in peers)


def let_loop_back(hit: Mapping[str, Any]) -> Step:
    """The step that lets what a host sends to itself pass, whatever the address."""
    if _of_iptables(hit):
        rule = f"{hit['chain']} {'-i' if hit['incoming'] else '-o'} lo -j ACCEPT"
        tool = _tool(hit)
        return Step(f"{tool} -I {rule}", undo=f"{tool} -D {rule}")
    rule = f"{'iif' if hit['incoming'] else 'oif'} lo accept"
    return _inserted(hit, rule, rule.replace(" lo", ' "lo"'))


def _of_iptables(hit: Mapping[str, Any]) -> bool:
    """Whether a rule is in a table of iptables, which nft may show: `ip filter`, chain INPUT."""
    if hit["tool"] != "nft":
        return True
    family, _, table = str(hit["table"]).partition(" ")
    return family in ("ip", "ip6") and table in _TABLES and hit["chain"] not in _BASE


def _is_of(hit: Mapping[str, Any] | None, manager: str) -> bool:
    """Whether a rule may be one of firewalld or ufw, and not of a table of its own."""
    return hit is None or _of_iptables(hit) or manager in f"{hit['table']} {hit['chain']}"


def _known(*words: str) -> str:
    """The start of a line: a comment where an address is not known."""
    try:
        for each in words:
            ipaddress.ip_network(each, strict=False)
    except ValueError:
        return "# "
    return ""


def _firewalld(peers: Sequence[str]) -> Step:
    zone = "firewall-cmd --permanent --zone=trusted"
    add, remove = (
        " ".join(f"--{way}-source={peer}" for peer in peers) for way in ("add", "remove")
    )
    return Step(
        f"{_known(*peers)}{zone} {add} && firewall-cmd --reload",
        undo=f"{zone} {remove} && firewall-cmd --reload",
        persists=True,
    )


def _ufw(peer: str) -> Step:
    # A rule of the user that denies comes before what `ufw allow` adds.
    return Step(
        f"{_known(peer)}ufw prepend allow proto tcp from {peer}",
        undo=f"ufw delete allow proto tcp from {peer}",
        persists=True,
    )


def _tool(hit: Mapping[str, Any]) -> str:
    """The command of iptables for the table of a rule."""
    tool, table = str(hit["tool"]), str(hit["table"])
    if tool == "nft":
        family, _, table = table.partition(" ")
        tool = "ip6tables" if family == "ip6" else "iptables"
    return tool if table == "filter" else f"{tool} -t {table}"


def _iptables(hit: Mapping[str, Any], peer: str) -> Step:
    tool = _tool(hit)
    rule = f"{hit['chain']} {'-s' if hit['incoming'] else '-d'} {peer} -p tcp -j ACCEPT"
    return Step(f"{_known(peer)}{tool} -I {rule}", undo=f"{tool} -D {rule}")


def _nft(hit: Mapping[str, Any], who: str) -> Step:
    field = f"{'ip6' if ':' in who else 'ip'} {'saddr' if hit['incoming'] else 'daddr'}"
    chain, rule = f"{hit['table']} {hit['chain']}", f"{field} {who} accept"
    if who.startswith("{"):  # zsh would take a lone brace for its own
        return Step(f"nft insert rule {chain} '{rule}'")
    return _inserted(hit, rule, rule, _known(who))


def _inserted(hit: Mapping[str, Any], rule: str, shown: str, before: str = "") -> Step:
    """The step that puts a rule first; `shown`: the rule as nft lists it, to find its handle."""
    chain = f"{hit['table']} {hit['chain']}"
    handle = f"nft -a list chain {chain} | grep -m1 -F '{shown} #' | sed 's/.*handle //'"
    return Step(
        f"{before}nft insert rule {chain} {rule}",
        undo=f"{handle} | xargs -r nft delete rule {chain} handle",
    )


def _without_way_back(hit: Mapping[str, Any], managers: Sequence[str]) -> Step:
    old = hit["tool"] == "iptables" or hit["table"].startswith("ip ")
    note = "or make answers leave where packets arrive, by rules of routing"
    if "firewalld" not in managers or old:
        step = remove_rule(hit)
        return Step(step.command, undo=step.undo, note=note)

    def turned(value: str) -> str:
        setting = f"sed -i 's/^IPv6_rpfilter=.*/IPv6_rpfilter={value}/' {_IPV6_RPFILTER}"
        return f"{setting} && firewall-cmd --reload"

    return Step(turned("no"), undo=turned("yes"), note=note, persists=True)
