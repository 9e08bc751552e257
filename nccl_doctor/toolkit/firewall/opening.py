"""Commands that open a packet filter, in the words of the tool that made the rule. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.model.commands import Command, shell
from nccl_doctor.model.fixes import Step
from nccl_doctor.toolkit.firewall.netfilter import quote_hit

_FEW = 16
"""Peers of a host that get a rule each; more get one rule with a set."""
_TABLES = ("filter", "nat", "mangle", "raw", "security")
_BASE = ("input", "output", "forward", "prerouting", "postrouting")
_PROGRAMS = {"iptables": shell("iptables"), "ip6tables": shell("ip6tables")}
_SEVERAL = re.compile(r"[;\n]")
"""What stands between commands of nft."""
_IPV6_RPFILTER = "/etc/firewalld/firewalld.conf"


def remove_rule(hit: Mapping[str, Any]) -> Step:
    """The step that removes the rule."""
    where, rule = _chain(hit), str(hit["rule"])
    if hit["handle"]:
        same = shell("nft insert rule {} {}", where, rule)
        known = not (_of_iptables(hit) or _SEVERAL.search(rule))
        line = shell("nft delete rule {} handle {:number}", where, hit["handle"])
        return Step(line, undo=same if known else Command())
    words = _words(rule)
    if words[:1] == ["-A"] and len(words) > 1:
        rest = [_word_of_rule(each) for each in words[2:]]
        rule = shell("{:name} {}", words[1], rest)
        tool = shell("{} -t {:name}", _program(hit), hit["table"])
        return Step(shell("{} -D {}", tool, rule), undo=shell("{} -A {}", tool, rule))
    return Step(shell("# remove the rule {}", quote_hit(hit)))


def _words(rule: str) -> list[str]:
    try:
        return shlex.split(rule)
    except ValueError:
        return []


def _word_of_rule(text: str) -> Command:
    if text == "!":
        return shell("!")
    return shell("{:option}" if text.startswith("-") else "{}", text)


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
        return (_nft(hit, peers),)
    return tuple(_nft(hit, [peer]) for peer in peers)


def let_loop_back(hit: Mapping[str, Any]) -> Step:
    """The step that lets what a host sends to itself pass, whatever the address."""
    if _of_iptables(hit):
        way = shell("-i" if hit["incoming"] else "-o")
        rule = shell("{:name} {} lo -j ACCEPT", hit["chain"], way)
        tool = _tool(hit)
        return Step(shell("{} -I {}", tool, rule), undo=shell("{} -D {}", tool, rule))
    rule = shell("iif lo accept" if hit["incoming"] else "oif lo accept")
    return _inserted(hit, rule, rule.replace(" lo", ' "lo"'))


def _of_iptables(hit: Mapping[str, Any]) -> bool:
    """True if a rule is in a table of iptables, which nft may show: `ip filter`, chain INPUT."""
    if hit["tool"] != "nft":
        return True
    family, _, table = str(hit["table"]).partition(" ")
    return family in ("ip", "ip6") and table in _TABLES and hit["chain"] not in _BASE


def _is_of(hit: Mapping[str, Any] | None, manager: str) -> bool:
    """True if a rule may be one of firewalld or ufw, and not of a table of its own."""
    return hit is None or _of_iptables(hit) or manager in f"{hit['table']} {hit['chain']}"


def _chain(hit: Mapping[str, Any]) -> Command:
    """Family and table, and the chain."""
    return shell("{:name} {:name}", str(hit["table"]).split(" "), hit["chain"])


def _program(hit: Mapping[str, Any]) -> Command:
    """The program of a rule that was read with one of iptables."""
    return _PROGRAMS.get(str(hit["tool"]), shell("# NAME"))


def _firewalld(peers: Sequence[str]) -> Step:
    zone = shell("firewall-cmd --permanent --zone=trusted")
    add = [shell("--add-source={:address}", peer) for peer in peers]
    remove = [shell("--remove-source={:address}", peer) for peer in peers]
    return Step(
        shell("{} {} && firewall-cmd --reload", zone, add),
        undo=shell("{} {} && firewall-cmd --reload", zone, remove),
        persists=True,
    )


def _ufw(peer: str) -> Step:
    # A rule of the user that denies comes before what `ufw allow` adds.
    return Step(
        shell("ufw prepend allow proto tcp from {:address}", peer),
        undo=shell("ufw delete allow proto tcp from {:address}", peer),
        persists=True,
    )


def _tool(hit: Mapping[str, Any]) -> Command:
    """The command of iptables for the table of a rule."""
    tool, table = _program(hit), str(hit["table"])
    if hit["tool"] == "nft":
        family, _, table = table.partition(" ")
        tool = shell("ip6tables" if family == "ip6" else "iptables")
    return tool if table == "filter" else shell("{} -t {:name}", tool, table)


def _iptables(hit: Mapping[str, Any], peer: str) -> Step:
    tool, way = _tool(hit), shell("-s" if hit["incoming"] else "-d")
    rule = shell("{:name} {} {:address} -p tcp -j ACCEPT", hit["chain"], way, peer)
    return Step(shell("{} -I {}", tool, rule), undo=shell("{} -D {}", tool, rule))


def _nft(hit: Mapping[str, Any], peers: Sequence[str]) -> Step:
    family = shell("ip6" if any(":" in peer for peer in peers) else "ip")
    way = shell("saddr" if hit["incoming"] else "daddr")
    who = [shell("{:address}", peer) for peer in peers]
    if len(who) == 1:
        rule = shell("{} {} {} accept", family, way, who)
        return _inserted(hit, rule, rule.removeprefix("# "))
    several = shell("{{ {} }}", [shell("{},", each) for each in who[:-1]] + who[-1:])
    # zsh would take a lone brace for its own
    return Step(shell("nft insert rule {} '{} {} {} accept'", _chain(hit), family, way, several))


def _inserted(hit: Mapping[str, Any], rule: Command, shown: str) -> Step:
    """The step that puts a rule first; `shown`: the rule as nft lists it, to find its handle."""
    chain = _chain(hit)
    find = shell("nft -a list chain {} | grep -m1 -F {}", chain, f"{shown} #")
    return Step(
        shell("nft insert rule {} {}", chain, rule),
        undo=shell("{} | sed 's/.*handle //' | xargs -r nft delete rule {} handle", find, chain),
    )


def _without_way_back(hit: Mapping[str, Any], managers: Sequence[str]) -> Step:
    old = hit["tool"] == "iptables" or hit["table"].startswith("ip ")
    note = "or make answers leave where packets arrive, by rules of routing"
    if "firewalld" not in managers or old:
        step = remove_rule(hit)
        return replace(step, note=note)

    def turned(value: str) -> Command:
        set_it = "sed -i 's/^IPv6_rpfilter=.*/IPv6_rpfilter={:name}/' {} && firewall-cmd --reload"
        return shell(set_it, value, _IPV6_RPFILTER)

    return Step(turned("no"), undo=turned("yes"), note=note, persists=True)
