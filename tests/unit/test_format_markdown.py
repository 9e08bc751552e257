"""The report as Markdown: readable, and with nothing from outside that is markup."""

from __future__ import annotations

import re
from dataclasses import replace

from nccl_doctor.api import Confidence, Finding, Outcome, OutcomeStatus, Where
from nccl_doctor.registry import installed
from nccl_doctor.report.formats import markdown
from tests.support.ci import GROUP, HOSTILE, NOTE, OK, PORT, RISK, SHM, report_of
from tests.support.pages import healthy


def test_healthy():
    assert markdown.render(report_of()) == (
        "## ✅ nccl-doctor: PASS\n"
        "\n"
        "No failure found for 4 ranks on 2 hosts; no collective was run\n"
        "\n"
        "checks: 1 passed · 2 hosts · 4 ranks · 3.5 s · exit code 0\n"
        "\n"
        "Next: start the job as you started this, with torchrun\n"
    )


def test_a_pass_says_what_was_measured():
    out = markdown.render(replace(healthy(), verdict="pass"), installed).splitlines()
    network = next(line for line in out if line.startswith("- **network** "))
    assert "round trip 50 µs" in network


def test_broken():
    report = report_of(
        Finding(
            PORT,
            "no answer in 3 s",
            Where(links=(("nd1", "nd0"),)),
            fix="nft delete rule inet filter `input` handle 7",
            confidence=Confidence.LIKELY,
        ),
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
        Finding(RISK, "port 29500 is risky", Where(hosts=("nd0",))),
        Finding(NOTE, "just so you know"),
    )
    assert markdown.render(report).splitlines() == [
        "## ❌ nccl-doctor: FAIL",
        "",
        r"Title of port-shut \(nd1 → nd0\)",
        "",
        "### ❌ Title of port-shut `port-shut`",
        "",
        "- **where** `nd1 → nd0`",
        "- **seen** `no answer in 3 s` (likely)",
        "- **why** Why port-shut matters",
        "- **fix**",
        "",
        "  ```text",
        "  nft delete rule inet filter `input` handle 7",
        "  ```",
        "",
        "### Explained by the above, gone when it is fixed",
        "",
        "- `group-hang` `ranks 0–1 on nd0, ranks 2–3 on nd1`: explained by `port-shut`: "
        "same place, lower layer",
        "",
        "### Warnings",
        "",
        "- `a-risk` `nd0`: `port 29500 is risky`; fix: `fix a-risk`",
        "",
        "checks: 1 failed · 2 hosts · 4 ranks · 3.5 s · exit code 1",
        "",
        "Next: `nccl-doctor explain port-shut`",
    ]


def test_what_is_not_known_is_said():
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},))
    out = markdown.render(report_of(by_host={"nd0": OK, "nd1": hung}))
    assert out.startswith("## ❓ nccl-doctor: UNKNOWN\n")
    assert "### Not verified\n\n- `shm`: `hung in open /dev/x (nd1)`\n" in out


def test_a_warning_that_is_all_there_is_stands_once():
    out = markdown.render(report_of(Finding(RISK, "so so", Where(hosts=("nd0",)))))
    assert out.count("so so") == 1
    assert "### ⚠️ Title of a-risk `a-risk`" in out


def test_many_places_stay_readable():
    hosts = tuple(f"node{i:03}" for i in range(64))
    found = [Finding(SHM, f"{i} MiB", Where(hosts=(host,))) for i, host in enumerate(hosts)]
    out = markdown.render(report_of(*found, hosts=hosts))
    assert "- and 58 more like this\n" in out
    assert len(out.splitlines()) < 40


SPAN = re.compile(r"(?<!`)(`+)(?!`)(.*?)(?<!`)\1(?!`)")


def outside_of_code(text: str) -> str:
    """What a reader of Markdown takes for markup: all but code blocks and code spans."""
    kept, fence = [], ""
    for line in text.splitlines():
        mark = re.match(r" *(`{3,})", line)
        if fence:
            fence = "" if mark and line.strip() == fence else fence
        elif mark:
            fence = mark[1]
        else:
            kept.append(SPAN.sub("", line))
    assert not fence, "a code block is open at the end"
    return "\n".join(kept)


def test_nothing_from_outside_is_markup():
    report = report_of(
        Finding(SHM, HOSTILE, Where(hosts=(HOSTILE,), interfaces=("`",)), fix=HOSTILE),
        Finding(RISK, HOSTILE, Where(hosts=("nd0",)), fix="``"),
        Finding(NOTE, HOSTILE),
        hosts=("nd0", HOSTILE),
        by_host={"nd0": OK, HOSTILE: Outcome(OutcomeStatus.RAISED, reason=HOSTILE)},
    )
    for out in (markdown.render(report), markdown.prose(HOSTILE) + "\n"):
        out.encode()
        assert all(line.isprintable() or "\ufffe" in line for line in out.splitlines())
        for words in ("everyone", "x.example", "<b", "![", "#1"):
            assert not re.search(rf"(?<![\\>]){re.escape(words)}", outside_of_code(out)), words
    assert markdown.prose("a_b *c* [d](e) <f> g@h #5 https://i www.j") == (
        r"a\_b \*c\* \[d\]\(e\) \<f\> g@<!-- -->h #<!-- -->5 https://<!-- -->i www<!-- -->.j"
    )


def test_code_spans_hold_back_ticks():
    assert markdown.code("a") == "`a`"
    assert markdown.code("a`b") == "``a`b``"
    assert markdown.code("`a``b`") == "``` `a``b` ```"
    assert markdown.code("") == "` `"
