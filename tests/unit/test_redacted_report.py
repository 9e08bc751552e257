"""A report full of planted secrets, in every output format, judged and merged again."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Finding, Outcome, OutcomeStatus, Where
from nccl_doctor.judge.conclusion import conclude, judge_again
from nccl_doctor.judge.history import difference
from nccl_doctor.judge.merge import merge_reports
from nccl_doctor.model.cluster import Trail
from nccl_doctor.model.report import Report
from nccl_doctor.registry import installed
from nccl_doctor.report import facts, github, issue, profiles
from nccl_doctor.report.difference import render as render_diff
from nccl_doctor.report.facts import render as render_facts
from nccl_doctor.report.formats import formats, renderer
from nccl_doctor.report.redaction import redact
from nccl_doctor.report.script import render as render_script
from nccl_doctor.report.story import PlaceWords
from nccl_doctor.report.text import render as render_text
from tests.support.checks import REGISTRY
from tests.support.clusters import make_cluster, shut_out
from tests.support.planted import SECRETS, VERSIONS, leaks, secret_report
from tests.support.reports import RUN, kind, made_check, through_json, validate
from tests.support.rows import each_row
from tests.support.secrets_planted import HIDDEN, SECRET_TEXTS

KEY = b"the key of the test"
PLAIN = secret_report()
REDACTED, BOOK = redact(PLAIN, KEY)
NO_CHECKS = registry.Registry((), (), {})


def changed(report):
    """The same cluster in another run, without any finding and with one host gone."""
    cluster = report.cluster
    hosts = (cluster.hosts[0], replace(cluster.hosts[1], reported=False))
    made = conclude(replace(cluster, hosts=hosts), [], run=replace(report.run, id="other"))
    return replace(made, redacted=report.redacted)


RENDERED = {
    **{name: renderer(name, installed) for name in formats()},
    "text": lambda report: render_text(report, verbose=2, checks=installed),
    "text, quiet": lambda report: render_text(report, quiet=True, ascii=True),
    "facts": render_facts,
    "host screen": lambda report: facts.render_host(report, installed, width=400),
    "script": render_script,
    "annotations": github.commands,
    "step summary": github.summary,
    **{
        f"profile {name}": lambda report, name=name: profiles.tell(report, name, 1).line
        for name in profiles.PROFILES
        if name != "native"
    },
    "diff": lambda report: render_diff(
        difference(report, changed(report), REGISTRY.checks), PlaceWords(report), verbose=2
    ),
    "diff as json": lambda report: json.dumps(
        difference(changed(report), report, REGISTRY.checks).to_json()
    ),
    **{
        f"issue {name}": lambda report, name=name: issue.fill(issue.form_of(name), report)
        for name in issue.projects()
    },
}


def test_the_secrets_are_there_before():
    assert sorted(leaks(renderer("json")(PLAIN))) == sorted(SECRETS)


@each_row("form", RENDERED)
def test_no_secret_in_any_format(form):
    assert leaks(RENDERED[form](REDACTED)) == []
    if form not in ("prometheus", "profile slurm", "profile npd", "profile nagios"):
        assert leaks(RENDERED[form](PLAIN)), "which without redaction it would hold"


def test_versions_and_the_doctors_own_words_stay():
    before, after = renderer("json")(PLAIN), renderer("json")(REDACTED)
    for version in VERSIONS:
        assert version in after
        assert after.count(version) == before.count(version)
    for was, now in zip(PLAIN.findings, REDACTED.findings, strict=True):
        assert (was.code, was.kind.title, was.level) == (now.code, now.kind.title, now.level)


def test_it_is_a_report_like_any_other():
    assert REDACTED.redacted
    validate(REDACTED.to_json())
    assert through_json(REDACTED).run.redacted_with == BOOK.fingerprint
    assert (REDACTED.verdict, REDACTED.exit_code) == (PLAIN.verdict, PLAIN.exit_code)


def test_places_still_match():
    (found,) = REDACTED.findings
    first, second = (host.name for host in REDACTED.cluster.hosts)
    assert found.where.hosts == (first,)
    assert found.where.links == ((first, second),)
    assert second.split(".")[0] in found.message  # the short name of the same host
    assert set(found.evidence["hosts"]) == {first, second.split(".")[0]}
    env = REDACTED.cluster.ranks[0].env
    assert env["MASTER_ADDR"].split(".")[0] == first == env["SLURM_JOB_NODELIST"].split(",")[0]
    assert REDACTED.cluster.hosts[1].addresses[0] in found.message


def test_networks_still_hold_their_addresses():
    import ipaddress

    facts = REDACTED.cluster.hosts[0].facts["made"]["alone"].facts
    for address, network in zip(facts["addresses"], facts["subnets"], strict=True):
        assert ipaddress.ip_address(address) in ipaddress.ip_network(network)


def test_the_map_gives_every_name_back():
    names = BOOK.to_json()["pseudonyms"]
    first = REDACTED.cluster.hosts[0].name
    assert names["host"][first] == "gandalf"
    assert "10.20.30.42" in names["ipv4"].values()
    assert "frodo" in names["user"].values()
    assert first not in json.dumps(PLAIN.to_json())


def test_the_same_key_gives_the_same_and_another_key_another():
    assert redact(PLAIN, KEY)[0] == REDACTED
    other = redact(PLAIN, b"another key")[0]
    assert other.cluster.hosts[0].name != REDACTED.cluster.hosts[0].name
    assert other.run.redacted_with != REDACTED.run.redacted_with


def test_what_is_redacted_is_not_redacted_again():
    again, book = redact(REDACTED, b"another key")
    assert again is REDACTED
    assert book.to_json()["pseudonyms"] == {}


def test_what_ranks_share_is_still_one_object_and_has_no_secret():
    check, said = (
        "a",
        Outcome(OutcomeStatus.OK, facts={"HOSTNAME": "gandalf", "at": "/home/saruman/data"}),
    )
    own = replace(said, duration_s=1.0)
    plain = conclude(make_cluster(("gandalf", "nd1")), [], run=RUN)
    ranks = [
        replace(rank, facts={check: {"one": own if rank.rank == 1 else said, "two": said}})
        for rank in plain.cluster.ranks
    ]
    plain = replace(plain, cluster=replace(plain.cluster, ranks=tuple(ranks)))
    redacted = redact(plain, KEY)[0].cluster.ranks
    first = redacted[0].facts[check]["one"]
    assert first.facts["HOSTNAME"] not in ("gandalf", "")
    assert "saruman" not in first.facts["at"]
    assert all(rank.facts[check]["two"] is redacted[0].facts[check]["two"] for rank in redacted)
    assert redacted[1].facts[check]["one"] == replace(first, duration_s=1.0)


@pytest.mark.parametrize("shared", [False, True])
def test_every_part_of_an_outcome_is_rewritten_and_none_is_lost(shared):
    name = "gandalf"
    steps = ({"step": f"call {name}", "to": name}, {"step": "wait"})
    trail = Trail(steps, (0.5, 1.0))
    outcome = Outcome(
        OutcomeStatus.DIED,
        {"host": name, "count": 3},
        reason=f"lost {name}",
        breadcrumbs=trail if shared else tuple(trail),
        stack=f"in {name}",
        state="S",
        wchan="ep_poll",
        log_tail=f"no answer from {name}",
        witness={"host": name},
        exit_code=3,
        signal="SIGKILL",
        duration_s=1.25,
        group=2,
        extra={"later": f"of {name}"},
    )
    assert all(getattr(outcome, each.name) != each.default for each in fields(Outcome))
    plain = conclude(make_cluster((name, "nd1"), check="a", by_rank={0: outcome}), [], run=RUN)
    redacted = redact(plain, KEY)[0]
    made = redacted.cluster.ranks[0].facts["a"]["alone"]
    assert str(made) == str(outcome).replace(name, redacted.cluster.hosts[0].name)
    assert through_json(redacted).cluster.ranks[0].facts["a"]["alone"] == made


def test_a_real_verdict_is_the_same_after_judging_again():
    shm = made_check("shm", finds=[Finding(kind("shm-small"), "64 MiB", Where(hosts=("nd1",)))])
    checks = registry.load()
    for cluster in (
        make_cluster(("nd0", "nd1"), absent_nodes=(1,)),
        make_cluster(("nd0", "nd0")),
        make_cluster(("nd0", "nd1")),
    ):
        plain = conclude(cluster, [*checks.checks, shm], run=RUN)
        redacted, _ = redact(plain, KEY)
        one, other = judge_again(plain, checks), judge_again(redacted, checks)
        assert [found.code for found in one.findings] == [found.code for found in other.findings]
        assert [check.status for check in one.checks] == [check.status for check in other.checks]
        assert one.verdict == other.verdict
        expected = redact(one, KEY)[0].to_json()
        assert expected["findings"] == other.to_json()["findings"]
        assert expected["summary"] == other.summary


def test_redacted_views_are_merged_if_their_key_is_one():
    cluster = make_cluster(("nd0", "nd1"))
    seen = conclude(make_cluster(("nd0", "nd1"), absent_nodes=(1,)), [], run=RUN)
    view = conclude(shut_out(replace(cluster, complete=False), "nd0", "nd1"), [], run=RUN)
    one = merge_reports([seen, view], NO_CHECKS)
    both = merge_reports([redact(seen, KEY)[0], redact(view, KEY)[0]], NO_CHECKS)
    assert both.redacted
    assert [found.code for found in both.findings] == [found.code for found in one.findings]
    assert len(both.cluster.hosts) == len(one.cluster.hosts)
    with pytest.raises(ValueError, match="redacted with different keys"):
        merge_reports([redact(seen, KEY)[0], redact(view, b"another key")[0]], NO_CHECKS)


def test_judged_again_it_is_still_redacted_and_can_be_merged():
    plain = conclude(make_cluster(("nd0", "nd1"), absent_nodes=(1,)), [], run=RUN)
    view = conclude(
        shut_out(make_cluster(("nd0", "nd1"), complete=False), "nd0", "nd1"), [], run=RUN
    )
    saved, other = redact(plain, KEY)[0], redact(view, KEY)[0]
    again = through_json(judge_again(saved, NO_CHECKS))
    assert again.redacted
    assert again.run.redacted_with == saved.run.redacted_with
    assert not judge_again(plain, NO_CHECKS).redacted
    merged = merge_reports([again, other], NO_CHECKS)
    assert merged.to_json() == merge_reports([saved, other], NO_CHECKS).to_json()


@pytest.mark.parametrize("name", ["head", "node", "rank", "store", "port", "alone", "self"])
def test_a_host_named_like_a_word_of_the_report_breaks_nothing(name):
    finding = Finding(kind("port-made"), f"no answer from {name}", Where(hosts=(name,)))
    check = made_check("port", finds=[finding])
    cluster = make_cluster((name, "nd1"), check="port", by_host={name: {"port": 1}})
    redacted, _ = redact(conclude(cluster, [check], run=RUN), KEY)
    host = redacted.cluster.hosts[0]
    assert host.name != name
    assert redacted.findings[0].where.hosts == (host.name,)
    assert list(host.facts["port"]) == ["alone"]
    assert host.facts["port"]["alone"].facts == {"port": 1}
    assert [result.name for result in redacted.checks] == ["port"]
    validate(redacted.to_json())


def test_values_that_are_no_text():
    odd = {"set": {"nd1"}, "tuple": ("nd1", 1), "none": None, "nan": float("nan"), "object": KEY}
    cluster = make_cluster(check="made", by_host={"nd0": odd, "nd1": {1: "nd1"}})
    redacted, _ = redact(conclude(cluster, [], run=RUN), KEY)
    assert "nd1" not in renderer("json")(redacted)
    assert isinstance(Report.from_json(json.loads(renderer("json")(redacted))), Report)


def test_secrets_in_a_report_of_an_older_version_are_masked():
    env = {f"SLURM_X{i}": text for i, text in enumerate(SECRET_TEXTS)}
    env |= {"SLURM_JWT": "opensesame", "SLURM_ACCESS_KEY": "opensesame"}
    facts = {"path": "https://bob:opensesame@h/x", "by": dict(enumerate(SECRET_TEXTS))}
    cluster = make_cluster(("nd0",), check="made", by_host={"nd0": facts}, env={0: env})
    redacted, _ = redact(conclude(cluster, [], run=RUN), KEY)
    text = renderer("json")(redacted)
    assert [each for each in HIDDEN if each in text] == []
