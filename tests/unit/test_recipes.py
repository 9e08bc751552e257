"""Recipes of `explain`: for codes that exist, for every tool, and nothing that a shell would take
as it is where a name is missing.
"""

from __future__ import annotations

import re

import pytest

from nccl_doctor import registry
from nccl_doctor.report.manual import code_page
from nccl_doctor.report.story import recipe_for, recipes

REGISTRY = registry.load()
UNKNOWN = re.compile(r"\b(ADDRESS|NETWORK|NIC|MTU|GROUP|NSG|VPC|NAMESPACE|LABEL|VALUE)\b")


def commands(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def test_every_recipe_is_for_codes_that_exist_and_no_code_has_two() -> None:
    codes = [code for codes, _ in recipes() for code in codes]
    assert {"port-blocked", "peer-blocked", "peer-one-way", "mtu-blackhole"} <= set(codes)
    assert set(codes) <= set(REGISTRY.kinds)
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("code", ["port-blocked", "peer-one-way"])
def test_a_firewall_is_opened_in_the_words_of_each_tool_and_shut_again(code: str) -> None:
    page = code_page(REGISTRY, code)
    tools = ["firewall-cmd", "ufw", "iptables", "nft", "aws", "gcloud", "az", "kubectl"]
    starts = {line.split()[0] for line in commands(recipe_for(code))}
    assert set(tools) <= starts
    assert "kind: NetworkPolicy" in page
    assert page.count("Undo: ") == len(tools)


def test_a_page_tells_why_then_the_fix_then_how_it_is_found() -> None:
    for code in ("mtu-blackhole", "rank-silent", "gpu-missing"):
        page = code_page(REGISTRY, code)
        kind = REGISTRY.kinds[code][0]
        at = [page.index(kind.why.split(".")[0]), page.index("\nHow to fix\n---")]
        at += [page.index(kind.fix.split()[0], at[1]), page.index("\nHow it is found\n---")]
        assert at == sorted(at)


def test_no_line_would_run_with_a_name_in_place_of_a_value() -> None:
    """A shell takes `export A=NIC`, and a redirection makes a file; these tools refuse the name."""
    for _, text in recipes():
        for line in commands(text):
            if UNKNOWN.search(line):
                assert not re.search(r"export|[<>]|^\w+=", line), line


def test_the_network_policy_is_one_and_selects_the_same_pods_on_both_sides() -> None:
    yaml = pytest.importorskip("yaml")
    text = recipe_for("peer-blocked")
    (block,) = (part for part in text.split("\n\n") if "kind: NetworkPolicy" in part)
    policy = yaml.safe_load(block)
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
