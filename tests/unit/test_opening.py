"""Commands that open a packet filter: in the words of the tool that made the rule."""

from __future__ import annotations

from typing import Any

from nccl_doctor.toolkit.firewall.opening import let_in, remove_rule
from tests.support.rows import each_row

A, B = "192.168.77.1", "192.168.77.2"
MANY = [f"10.0.0.{i}" for i in range(20)]


def hit(table: str = "inet fw", chain: str = "input", **fields: Any) -> dict[str, Any]:
    return {
        "tool": "nft",
        "table": table,
        "chain": chain,
        "rule": "tcp dport 1 drop",
        "handle": "4",
        "verdict": "drop",
        "sure": True,
        "incoming": True,
        **fields,
    }


def said(found: dict[str, Any] | None, peers: list[str], *managers: str) -> list[str]:
    return [step.command for step in let_in(found, peers, managers)]


@each_row(
    "found, peers, managers, commands",
    [
        (hit(), [A], (), [f"nft insert rule inet fw input ip saddr {A} accept"]),
        (
            hit("ip filter", "INPUT"),  # what iptables-nft made
            [A, B],
            (),
            [f"iptables -I INPUT -s {each} -p tcp -j ACCEPT" for each in (A, B)],
        ),
        (
            hit("ip6 filter", "OUTPUT", incoming=False),
            ["fd00::1"],
            (),
            ["ip6tables -I OUTPUT -d fd00::1 -p tcp -j ACCEPT"],
        ),
        (
            hit("ip raw", "PREROUTING"),
            [A],
            (),
            [f"iptables -t raw -I PREROUTING -s {A} -p tcp -j ACCEPT"],
        ),
        (
            hit("filter", "INPUT", tool="iptables", rule="-A INPUT -j DROP", handle=""),
            [A],
            (),
            [f"iptables -I INPUT -s {A} -p tcp -j ACCEPT"],
        ),
        # nft's own, of the same name
        (hit("ip filter"), [A], (), [f"nft insert rule ip filter input ip saddr {A} accept"]),
        (
            hit("inet firewalld", "filter_INPUT"),
            [A],
            ("firewalld",),
            [f"firewall-cmd --permanent --zone=trusted --add-source={A} && firewall-cmd --reload"],
        ),
        (None, [A], ("ufw",), [f"ufw prepend allow proto tcp from {A}"]),
        (
            hit("ip filter", "ufw-user-input"),
            [A],
            ("ufw",),
            [f"ufw prepend allow proto tcp from {A}"],
        ),
        # firewalld runs, but the rule is another table's, or of what leaves the host
        (hit(), [A], ("firewalld",), [f"nft insert rule inet fw input ip saddr {A} accept"]),
        (
            hit("ip filter", "OUTPUT", incoming=False),
            [A],
            ("ufw",),
            [f"iptables -I OUTPUT -d {A} -p tcp -j ACCEPT"],
        ),
        (
            hit(),
            MANY,
            (),
            [f"nft insert rule inet fw input 'ip saddr {{ {', '.join(MANY)} }} accept'"],
        ),
        (
            hit(),
            ["NETWORK-OF-THE-HOSTS"],
            (),
            ["# nft insert rule inet fw input ip saddr NETWORK-OF-THE-HOSTS accept"],
        ),
        (None, [A], (), []),
        (hit(), [], (), []),
    ],
)
def test_each_tool_in_its_words(found, peers, managers, commands):
    assert said(found, peers, *managers) == commands


def test_what_survives_a_start_of_the_host():
    for found, managers, lasts in (
        (hit(), (), False),
        (hit("ip filter", "INPUT"), (), False),
        (None, ("firewalld",), True),
        (None, ("ufw",), True),
    ):
        assert [step.persists for step in let_in(found, [A], managers)] == [lasts]


@each_row(
    "found, command, undo",
    [
        (
            hit(),
            "nft delete rule inet fw input handle 4",
            "nft insert rule inet fw input 'tcp dport 1 drop'",
        ),
        (
            hit("mangle", "INPUT", tool="iptables", rule="-A INPUT -j DROP", handle=""),
            "iptables -t mangle -D INPUT -j DROP",
            "iptables -t mangle -A INPUT -j DROP",
        ),
        (
            hit(rule="policy drop", handle=""),
            "# remove the rule 'nft inet fw input: policy drop'",
            "",
        ),
    ],
)
def test_a_rule_is_removed(found, command, undo):
    step = remove_rule(found)
    assert (step.command, step.undo) == (command, undo)
