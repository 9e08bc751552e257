"""Rules of a host's own firewall, and what a call that they took looks like."""

from __future__ import annotations

from typing import Any

from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules
from nccl_doctor.toolkit.firewall.portrules import fits, how_to_let_pass, stopped_by, sure_hit
from nccl_doctor.toolkit.firewall.portrules import follow as walk
from nccl_doctor.toolkit.firewall.rulesets import parse_nft
from tests.support.rows import each_row

ANYBODY, NETWORK, OWN = "0.0.0.0/0", "192.168.77.0/24", "192.168.77.1"


def follow(rule: str, source: str, *, hook: str = "input", policy: str = "accept") -> Any:
    """A call to port 29500 of this host from `source`, and the answer, through one rule."""
    text = f"table inet fw {{\nchain c {{\ntype filter hook {hook} priority 0; policy {policy};\n"
    text += "\n".join(line.strip() for line in rule.split(";")) + "\n}\n}\n"
    ports, port = (32768, 60999), (29500, 29500)
    packets = {
        "first": Packet(True, "eth0", source, OWN, ports, port),
        "reply": Packet(False, "eth0", OWN, source, port, ports, "established"),
    }
    return walk(Rules(True, chains=parse_nft(text)), packets, [NETWORK])


@each_row(
    ("rule", "anybody", "network"),
    [
        ("tcp dport 29500 drop", True, True),
        ("tcp dport 29501 drop", False, False),
        ("iifname lo tcp dport 29500 drop", False, False),
        ("ip saddr 192.168.77.0/24 drop", False, True),
        ("ip saddr 192.168.0.0/16 drop", False, True),
        ("ip saddr 192.168.77.2 drop", False, False),
        ("ip saddr 10.0.0.0/8 drop", False, False),
        ("ip saddr != 10.0.0.0/8 drop", False, True),
        ("ip saddr != 192.168.77.0/24 drop", False, False),
        ("ip saddr 192.168.77.0/24 accept; tcp dport 29500 drop", False, False),
        ("ip saddr 192.168.77.2 accept; tcp dport 29500 drop", False, False),
        ("ip saddr 10.0.0.0/8 accept; tcp dport 29500 drop", False, True),
        ("ip saddr @friends accept; tcp dport 29500 drop", False, False),
    ],
)
def test_which_rules_surely_take_a_caller_nobody_knows(
    rule: str, anybody: bool, network: bool
) -> None:
    assert bool(sure_hit(follow(rule, ANYBODY))) is anybody
    assert bool(sure_hit(follow(rule, NETWORK))) is network


def test_a_default_that_drops_takes_the_call_and_one_that_knows_the_state_lets_the_answer_out() -> (
    None
):
    hit = sure_hit(follow("ct state established,related accept", ANYBODY, policy="drop"))
    assert hit is not None
    assert hit["rule"] == "policy drop"
    rule = "ct state established,related accept"
    assert sure_hit(follow(rule, ANYBODY, hook="output", policy="drop")) is None


def test_a_rule_on_the_answer_is_a_rule_all_the_same() -> None:
    facts = follow("tcp sport 29500 drop", ANYBODY, hook="output")
    hit = sure_hit(facts)
    assert hit is not None
    assert stopped_by(hit) == "nft inet fw c: tcp sport 29500 drop (outgoing, reply packet)"
    fix = how_to_let_pass(facts, hit, "nd0")
    assert fix == f"on nd0: nft insert rule inet fw c ip daddr {NETWORK} accept"


@each_row(
    ("rule", "hook", "outcome", "packet"),
    [
        ("drop", "input", "dropped", "first"),
        ("drop", "input", "refused", None),
        ("drop", "input", "no-neighbour", None),
        ("reject with tcp reset", "input", "refused", "first"),
        ("reject", "input", "rejected", "first"),
        ("reject", "input", "dropped", None),
        # Who answers hears of it, and the caller does not.
        ("reject", "output", "dropped", "reply"),
        ("reject with tcp reset", "output", "dropped", "reply"),
        ("reject", "output", "rejected", None),
        ("drop", "output", "dropped", "reply"),
        ("drop", "output", "refused", None),
    ],
)
def test_a_rule_explains_only_what_it_does(
    rule: str, hook: str, outcome: str, packet: str | None
) -> None:
    hit = fits(follow(rule, ANYBODY, hook=hook), {"outcome": outcome})
    assert (hit and hit["packet"]) == packet


def test_of_two_rules_the_one_counts_that_the_outcome_shows() -> None:
    """The call may pass the first by a way that is not seen here; the second one fits."""
    first = follow("reject", ANYBODY)["hits"]
    both = {"hits": [*first, *follow("reject", ANYBODY, hook="output")["hits"]]}
    assert [fits(both, {"outcome": o})["packet"] for o in ("rejected", "dropped")] == [  # type: ignore[index]
        "first",
        "reply",
    ]
