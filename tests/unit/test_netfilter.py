"""Packets through rules, as nft and iptables print them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.toolkit.firewall.netfilter import (
    MAX_LINES,
    Packet,
    Rules,
    quote_hit,
    rule_matches,
)
from nccl_doctor.toolkit.firewall.opening import let_in
from nccl_doctor.toolkit.firewall.rulesets import (
    parse_iptables,
    parse_nft,
    parse_nft_rule,
    read_rules,
)
from tests.support.rows import each_row

EPHEMERAL = (32768, 60999)
SYN = Packet(True, "eth0", "192.168.77.1", "192.168.77.2", EPHEMERAL, (45000, 45000))
REPLY = Packet(
    True, "eth0", "192.168.77.2", "192.168.77.1", (45000, 45000), EPHEMERAL, "established"
)
LARGE = Packet(
    True, "eth0", "192.168.77.1", "192.168.77.2", EPHEMERAL, (45000, 45000), "established", 1500
)


def nft(*rules: str, policy: str = "accept", hook: str = "input") -> Rules:
    body = "\n".join(f"\t\t{rule} # handle {i + 2}" for i, rule in enumerate(rules))
    text = f"""table inet fw {{ # handle 1
\tchain input {{ # handle 1
\t\ttype filter hook {hook} priority filter; policy {policy};
{body}
\t}}
\tchain sub {{ # handle 30
\t\tct state {{ established, related }} accept # handle 31
\t\treject with icmpx admin-prohibited # handle 32
\t}}
}}
"""
    return Rules(True, chains=parse_nft(text))


IPT = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp -m tcp --tcp-flags {} -j DROP\n"


def sure(rules: Rules, packet: Packet) -> list[str]:
    return [hit.to_json()["rule"] for hit in rules.hits(packet) if hit.sure]


@each_row(
    ("rule", "syn", "reply"),
    [
        ('iifname "eth0" tcp dport 32768-60999 counter packets 3 bytes 180 drop', True, True),
        ('iifname "eth1" tcp dport 32768-60999 drop', False, False),
        ('iifname "eth*" tcp dport 32768-60999 drop', True, True),
        ('oifname "eth0" tcp dport 32768-60999 drop', False, False),
        ('iifname "eth0" tcp dport 29500 drop', False, False),
        ('iifname "eth0" tcp dport != 29500 drop', True, True),
        ("tcp dport != { 22, 29500 } reject with tcp reset", True, True),
        ("tcp dport 32768-60999 tcp flags syn / fin,syn,rst,ack drop", True, False),
        ("tcp dport 32768-60999 tcp flags & (fin | syn | rst | ack) == syn drop", True, False),
        ("ip saddr 192.168.77.1 tcp dport 32768-60999 drop", True, False),
        ("ip saddr 192.168.0.0/16 drop", True, True),
        ("ip saddr != 192.168.0.0/16 drop", False, False),
        ("ip saddr { 10.0.0.1, 192.168.77.1-192.168.77.9 } drop", True, True),
        ("ip daddr 192.168.77.2 drop", True, False),
        ("ip6 saddr fd00::/8 drop", False, False),
        ("meta nfproto ipv6 drop", False, False),
        ("meta l4proto { tcp, udp } drop", True, True),
        ("ip protocol icmp drop", False, False),
        ("udp dport 32768-60999 drop", False, False),
        ("icmp type echo-request drop", False, False),
        ("ct state invalid drop", False, False),
        ("ct state new drop", True, False),
        ("ct state != established drop", True, False),
        ("ct state vmap { invalid : drop, new : reject }", True, False),
        ("meta length > 1200 drop", False, False),
        ('drop comment "nothing gets in"', True, True),
    ],
)
def test_which_packets_a_rule_surely_takes(rule: str, syn: bool, reply: bool) -> None:
    rules = nft(rule)
    assert (bool(sure(rules, SYN)), bool(sure(rules, REPLY))) == (syn, reply)


@each_row(
    ("rules", "answer"),
    [
        (nft("tcp flags syn drop"), True),
        (nft("tcp flags & syn == syn drop"), True),
        (nft("tcp flags & (fin | syn) == syn drop"), True),
        (nft("tcp flags syn / syn,ack drop"), False),
        (nft("tcp flags == syn drop"), False),
        (Rules(True, chains=parse_iptables(IPT.format("SYN SYN"))), True),
        (Rules(True, chains=parse_iptables(IPT.format("FIN,SYN,RST,ACK SYN"))), False),
    ],
)
def test_syn_without_a_mask_is_in_the_answer_to_a_call_too(rules: Rules, answer: bool) -> None:
    data = replace(REPLY, source_ports=SYN.source_ports, target_ports=SYN.target_ports)
    assert sure(rules, SYN) != []
    assert (sure(rules, replace(data, syn_ack=True)) != []) is answer
    assert sure(rules, data) == []


def test_a_rule_on_length_takes_large_packets_alone() -> None:
    rules = nft("meta length > 1200 drop")
    assert sure(rules, LARGE) == ["meta length > 1200 drop"]


@pytest.mark.parametrize(
    "rule",
    [
        "numgen random mod 100 < 12 drop",
        "limit rate 3/second drop",
        "ip saddr @blocked drop",
        "tcp dport 40000-50000 drop",  # the reply's port may lie outside
        "meta mark 0x00000001 drop",
        "tcp flags ack drop",
        "fib daddr type local drop",
    ],
)
def test_what_is_not_understood_is_never_sure(rule: str) -> None:
    hits = nft(rule).hits(REPLY)
    assert [hit.sure for hit in hits] == [False]


SYN6 = Packet(True, "eth1", "fd00::1", "fd01::2", EPHEMERAL, (45000, 45000))
FIREWALLD = "meta nfproto ipv6 fib saddr . mark . iif oif missing drop"


IP6TABLES = "-A PREROUTING -m rpfilter --validmark --invert -j DROP"


def ip6tables(rule: str) -> Rules:
    saved = f"*raw\n:PREROUTING ACCEPT [0:0]\n{rule}\nCOMMIT\n"
    return Rules(True, chains=parse_iptables(saved, "ip6tables", 6))


def test_the_reverse_path_filter_of_iptables() -> None:
    """`-m rpfilter` matches what passes it, and `--invert` the rest, whatever else is told."""
    for rule in (IP6TABLES, "-A PREROUTING -m rpfilter --invert -m comment --comment x -j DROP"):
        (hit,) = ip6tables(rule).hits(replace(SYN6, way_back=False))
        assert hit.sure
        said = f"ip6tables raw PREROUTING: {rule} (answers would leave by another interface)"
        assert quote_hit(hit.to_json()) == said
        assert ip6tables(rule).hits(replace(SYN6, way_back=True)) == []
        assert [each.sure for each in ip6tables(rule).hits(SYN6)] == [False]
    passes = "-A PREROUTING -m rpfilter -j ACCEPT\n-A PREROUTING -j DROP"
    assert ip6tables(passes).hits(replace(SYN6, way_back=True)) == []
    assert [each.sure for each in ip6tables(passes).hits(replace(SYN6, way_back=False))] == [True]
    loose = IP6TABLES.replace("--invert", "--loose --invert")
    assert [each.sure for each in ip6tables(loose).hits(replace(SYN6, way_back=False))] == [False]
    old = parse_iptables(f"*raw\n:PREROUTING ACCEPT [0:0]\n{IP6TABLES}\nCOMMIT\n")
    (hit,) = Rules(True, chains=old).hits(replace(SYN, way_back=False))
    assert hit.sure


@pytest.mark.parametrize(
    ("tool", "managers", "fix"),
    [
        ("ip6tables", ["firewalld"], "sed -i 's/^IPv6_rpfilter=.*/IPv6_rpfilter=no/' "),
        ("ip6tables", [], f"ip6tables -t raw -D {IP6TABLES[3:]}"),
        ("iptables", ["firewalld"], f"iptables -t raw -D {IP6TABLES[3:]}"),
    ],
)
def test_it_is_turned_off_where_it_was_set(tool: str, managers: list[str], fix: str) -> None:
    (hit,) = ip6tables(IP6TABLES).hits(replace(SYN6, way_back=False))
    data = {**hit.to_json(), "tool": tool, "incoming": True}
    (step,) = let_in(data, ["192.168.77.1"], managers)
    assert step.command.startswith(fix)
    assert step.note.startswith("or make answers leave where packets arrive")


@each_row(
    "rule",
    [
        FIREWALLD,
        FIREWALLD.replace("oif missing", "check missing"),
        FIREWALLD.replace("oif missing", "oif 0"),  # as iptables-nft has it
    ],
)
def test_the_reverse_path_filter_that_firewalld_has_for_ipv6(rule: str) -> None:
    """It drops what the kernel, which has no such setting for IPv6, would answer elsewhere."""
    rules = nft("icmpv6 type { nd-router-advert, nd-neighbor-solicit } accept", rule)
    (hit,) = rules.hits(replace(SYN6, way_back=False))
    assert hit.sure
    said = quote_hit(hit.to_json())
    assert said == f"nft inet fw input: {rule} (answers would leave by another interface)"
    assert rules.hits(replace(SYN6, way_back=True)) == []
    (hit,) = rules.hits(SYN6)
    assert not hit.sure
    assert quote_hit(hit.to_json()) == f"nft inet fw input: {rule}"
    assert rules.hits(replace(SYN, way_back=False)) == []


@pytest.mark.parametrize(
    ("managers", "fix"),
    [
        (
            ["firewalld"],
            "sed -i 's/^IPv6_rpfilter=.*/IPv6_rpfilter=no/' /etc/firewalld/firewalld.conf "
            "&& firewall-cmd --reload",
        ),
        ([], "nft delete rule inet fw input handle 2"),
    ],
)
def test_no_zone_lets_pass_what_that_filter_drops(managers: list[str], fix: str) -> None:
    (hit,) = nft(FIREWALLD).hits(replace(SYN6, way_back=False))
    (step,) = let_in({**hit.to_json(), "incoming": True}, ["fd00::1"], managers)
    assert step.command == fix


@each_row(
    "rule",
    [
        "fib daddr . iif type != { local, broadcast, multicast } drop",
        "fib saddr oif missing drop",
        "fib saddr . iif oifname != eth0 drop",
        "fib saddr . iif type blackhole drop",
        "fib daddr . iif check exists drop",
    ],
)
def test_other_look_ups_in_the_routing_table_may_match(rule: str) -> None:
    for known in (True, False, None):
        assert [hit.sure for hit in nft(rule).hits(replace(SYN6, way_back=known))] == [False]


def test_a_rule_that_accepts_comes_first() -> None:
    rules = nft("ct state established,related accept", "tcp dport 32768-60999 drop")
    assert sure(rules, REPLY) == []
    assert sure(rules, SYN) == ["tcp dport 32768-60999 drop"]


def test_a_rule_that_may_accept_leaves_the_rest_unsure() -> None:
    rules = nft("ip saddr @friends accept", "drop")
    assert [hit.sure for hit in rules.hits(SYN)] == [False]


def test_a_policy_that_drops_is_a_hit() -> None:
    rules = nft("ct state established,related accept", "tcp dport 22 accept", policy="drop")
    assert sure(rules, SYN) == ["policy drop"]
    assert rules.hits(REPLY) == []


def test_an_accept_of_this_traffic_clears_the_policy() -> None:
    assert nft("ip saddr 192.168.77.0/24 accept", policy="drop").hits(SYN) == []


def test_a_jump_is_followed() -> None:
    rules = nft('iifname "eth0" jump sub', "accept")
    assert sure(rules, SYN) == ["reject with icmpx admin-prohibited"]
    assert rules.hits(REPLY) == []


def test_a_jump_that_is_not_taken_is_not_followed() -> None:
    assert nft('iifname "docker0" jump sub').hits(SYN) == []


def test_a_chain_of_another_hook_does_not_count() -> None:
    assert nft("drop", hook="forward").hits(SYN) == []
    assert nft("drop", hook="output").hits(SYN) == []


def test_a_redirect_is_a_hit_of_its_own_verdict() -> None:
    rules = nft('iifname "eth0" tcp dport 32768-60999 redirect to :15001', hook="prerouting")
    (hit,) = rules.hits(SYN)
    assert (hit.verdict, hit.sure) == ("redirect", True)


def test_a_redirect_takes_no_answer() -> None:
    rules = nft("tcp dport 1024-65535 redirect to :15001", "drop", hook="prerouting")
    assert sure(rules, SYN) == ["tcp dport 1024-65535 redirect to :15001"]
    assert sure(rules, REPLY) == ["drop"]


def test_the_handle_and_the_place_are_kept() -> None:
    (hit,) = nft('iifname "eth0" counter packets 3 bytes 180 drop').hits(SYN)
    assert hit.to_json() == {
        "tool": "nft",
        "table": "inet fw",
        "chain": "input",
        "rule": 'iifname "eth0" drop',
        "handle": "2",
        "verdict": "drop",
        "sure": True,
    }


def test_a_set_over_several_lines_is_one_rule() -> None:
    text = """table inet fw {
\tset blocked {
\t\ttype ipv4_addr
\t\telements = { 10.0.0.1,
\t\t\t     10.0.0.2 }
\t}
\tchain input {
\t\ttype filter hook input priority filter; policy accept;
\t\tip saddr { 192.168.77.8,
\t\t\t   192.168.77.1 } drop
\t}
}
"""
    assert len(sure(Rules(True, chains=parse_nft(text)), SYN)) == 1


def test_at_most_so_many_lines_are_quoted() -> None:
    rules = nft(*["tcp dport 1 drop"] * 50, policy="drop")
    lines = rules.dropping()
    assert len(lines) == MAX_LINES
    assert lines[0] == "nft inet fw input: policy drop"


IPTABLES = """# Generated by iptables-save v1.8.9
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -i eth1 -p tcp -j REDIRECT --to-ports 15001
COMMIT
*filter
:INPUT {policy} [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:ufw-user-input - [0:0]
-A INPUT -i lo -j ACCEPT
-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A INPUT -m conntrack --ctstate INVALID -j DROP
-A INPUT -j ufw-user-input
{rule}
COMMIT
"""


@each_row(
    ("rule", "taken"),
    [
        ("-A INPUT -p tcp -m tcp --dport 32768:60999 -j DROP", True),
        ("-A INPUT -p tcp -m multiport --dports 22,32768:60999 -j REJECT", True),
        ("-A INPUT ! -s 192.168.77.1/32 -j DROP", False),
        ("-A INPUT -s 192.168.77.0/24 -p tcp --syn -j DROP", True),
        ("-A INPUT -p tcp --tcp-flags FIN,SYN,RST,ACK SYN -j DROP", True),
        ("-A INPUT -p udp -j DROP", False),
        ('-A INPUT -m comment --comment "no -j ACCEPT here" -j REJECT', True),
        ("-A ufw-user-input -i eth0 -p tcp -j DROP", True),
        ("-A ufw-user-input -i eth1 -p tcp -j DROP", False),
        ("-A INPUT -p tcp -j LOG --log-prefix DROP", False),
    ],
)
def test_iptables_rules(rule: str, taken: bool) -> None:
    rules = Rules(True, chains=parse_iptables(IPTABLES.format(policy="ACCEPT", rule=rule)))
    assert (len(sure(rules, SYN)) == 1) == taken
    assert rules.hits(REPLY) == []


def test_iptables_what_is_not_understood_is_never_sure() -> None:
    rule = "-A INPUT -m mark --mark 0x8000/0x8000 -j DROP"
    rules = Rules(True, chains=parse_iptables(IPTABLES.format(policy="ACCEPT", rule=rule)))
    assert [hit.sure for hit in rules.hits(SYN)] == [False]


def test_iptables_policy() -> None:
    rules = Rules(True, chains=parse_iptables(IPTABLES.format(policy="DROP", rule="")))
    assert sure(rules, SYN) == ["policy drop"]


def test_ip6tables_says_nothing_about_ipv4() -> None:
    chains = parse_iptables(IPTABLES.format(policy="DROP", rule=""), "ip6tables", 6)
    assert Rules(True, chains=chains).hits(SYN) == []


@pytest.mark.parametrize("line", ["", "jump", "tcp dport", "ct state", "} {", "ip saddr !="])
def test_a_line_that_is_cut_off_is_no_error(line: str) -> None:
    rule_matches(parse_nft_rule(line), SYN)


def test_reading_this_host_is_bounded_and_says_why_it_cannot() -> None:
    rules = read_rules(timeout_s=5.0)
    assert rules.readable or rules.reason


RAW = """*raw
:PREROUTING ACCEPT [0:0]
-A PREROUTING -s {source} -p tcp -j {target}
COMMIT
*filter
:INPUT DROP [0:0]
-A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT
COMMIT
"""


@pytest.mark.parametrize("target", ["NOTRACK", "CT --notrack"])
def test_a_packet_that_is_not_tracked_is_never_established(target: str) -> None:
    def rules(source: str) -> Rules:
        return Rules(True, chains=parse_iptables(RAW.format(source=source, target=target)))

    assert sure(rules("192.168.77.0/24"), REPLY) == ["policy drop"]
    assert rules("10.0.0.0/8").hits(REPLY) == []
    # Known, or not: the address of the other end is not.
    anybody = replace(REPLY, source="0.0.0.0/0")
    assert not any(hit.sure for hit in rules("192.168.77.0/24").hits(anybody))


def test_notrack_of_nft_and_a_rule_that_accepts_what_is_not_tracked() -> None:
    text = """table inet fw {
\tchain early {
\t\ttype filter hook prerouting priority raw; policy accept;
\t\tip saddr 192.168.77.0/24 notrack
\t}
\tchain input {
\t\ttype filter hook input priority filter; policy drop;
\t\tct state %s accept
\t}
}
"""
    assert Rules(True, chains=parse_nft(text % "established,untracked")).hits(REPLY) == []
    assert sure(Rules(True, chains=parse_nft(text % "established")), REPLY) == ["policy drop"]
