"""The report as JSON: complete, a line for each rank, plain or compressed."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.cli.earlier_reports import read_past
from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.model.report import Report
from nccl_doctor.report.formats import json as json_format
from nccl_doctor.report.redaction import redact
from nccl_doctor.system import files
from tests.cli.program import error_of, program
from tests.support.big_reports import RECORDED, grown, recorded
from tests.support.checks import REGISTRY
from tests.support.clusters import change_rank
from tests.support.reports import validate
from tests.support.rows import each_row


def read(text: str) -> Report:
    return Report.from_json(json.loads(text))


# --- what is written ---


def test_it_is_valid_and_complete():
    report = grown(4)
    text = json_format.render(report)
    data = json.loads(text)
    validate({**data, "ranks": data["ranks"][:5]})
    assert data["schema_version"] == "3"
    assert [rank["rank"] for rank in data["ranks"]] == list(range(32))
    again = read(text)
    assert again.cluster == report.cluster
    assert again.checks == report.checks
    assert json_format.render(again) == text


def test_each_rank_stands_on_its_line():
    text = json_format.render(grown(4))
    lines = [line for line in text.splitlines() if line.startswith("  {") and '"rank":' in line]
    ranks = [json.loads(line.rstrip(",")) for line in lines]
    assert [rank["rank"] for rank in ranks if "local_rank" in rank] == list(range(32))


def test_few_ranks_are_indented():
    text = json_format.render(Report.from_json(recorded()))
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_facts_that_json_does_not_know():
    cluster = grown(2).cluster
    odd = {"software": {"alone": replace(cluster.ranks[3].facts["software"]["alone"])}}
    foreign = {"nan": float("nan"), "set": {2, 1}, 5: (1, 2), "$same": {"$each": [b"x"]}}
    odd["software"]["alone"] = replace(odd["software"]["alone"], facts=foreign)
    cluster = change_rank(cluster, 3, facts={**cluster.ranks[3].facts, **odd})
    again = read(json_format.render(replace(grown(2), cluster=cluster)))
    assert again.cluster.ranks[3].facts["software"]["alone"].facts == {
        "nan": "NaN",
        "set": [1, 2],
        "5": [1, 2],
        "$same": {"$each": ["b'x'"]},
    }


# --- the same verdict ---


def with_host(cluster: Cluster, host: Host) -> Cluster:
    hosts = tuple(host if each.id == host.id else each for each in cluster.hosts)
    ranks = (
        replace(rank, host=host) if rank.host.id == host.id else rank for rank in cluster.ranks
    )
    return replace(cluster, hosts=hosts, ranks=tuple(ranks))


def judged(report: Report) -> Any:
    return judge_again(report, REGISTRY).to_json()["findings"]


def test_judged_again_it_says_the_same():
    report = grown(2, 5)
    assert judged(read(json_format.render(report))) == judged(report)


BROKEN = {
    "another torch": ("software", {"torch": "2.12.0"}),
    "a small /dev/shm": ("shared_memory", {"free": 1 << 20, "size": 1 << 20}),
    "few files": ("limits", {"files": 256, "files_hard": 256}),
}


@each_row("check, changed", BROKEN.values())
def test_a_fault_of_one_host_is_found_again(check, changed):
    report = grown(3, 3)

    def spoiled(facts: Any) -> Any:
        if check not in facts:
            return facts
        alone = facts[check]["alone"]
        return {**facts, check: {"alone": replace(alone, facts={**alone.facts, **changed})}}

    host = report.cluster.hosts[1]
    cluster = with_host(report.cluster, replace(host, facts=spoiled(host.facts)))
    for rank in cluster.ranks_on(host):
        cluster = change_rank(cluster, rank.seat, facts=spoiled(rank.facts))
    broken = replace(report, cluster=cluster)
    found = judged(broken)
    assert found != judged(report)
    assert judged(read(json_format.render(broken))) == found


def test_redacted():
    report = grown(3, 3)
    red, _ = redact(report, b"the key of the test")
    text = json_format.render(red)
    validate(json.loads(text))
    names = [name for host in report.cluster.hosts for name in (host.name, *host.addresses)]
    assert [name for name in names if name in text] == []
    again = read(text)
    assert again.redacted
    assert judged(again) == judged(red)
    from_file, _ = redact(read(json_format.render(report)), b"the key of the test")
    assert json_format.render(from_file) == text


# --- compressed ---

COMMANDS = {
    "show": ("show", "-vv"),
    "judge": ("judge",),
    "diff": ("diff", str(RECORDED)),
    "fixes": ("fixes",),
    "issue": ("issue", "nccl", "--no-redact"),
    "merge": ("merge",),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("reports") / "report.json"
    file.write_text(json_format.render(grown(2, 5)))
    program("report", "show", "--json", f"{file}.gz", str(file))
    return Path(file)


def test_what_is_written_with_gz_is_the_same_and_a_tenth(plain: Path) -> None:
    packed = Path(f"{plain}.gz").read_bytes()
    assert gzip.decompress(packed) == plain.read_bytes()
    assert len(packed) < plain.stat().st_size / 10


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_it(plain: Path, command: str) -> None:
    one = program("report", *COMMANDS[command], str(plain))
    other = program("report", *COMMANDS[command], f"{plain}.gz")
    assert one.stdout
    assert (one.returncode, one.stdout) == (other.returncode, other.stdout)


def test_a_folder_of_earlier_reports_may_hold_both(plain: Path) -> None:
    past = read_past(str(plain.parent), REGISTRY.checks)
    assert len(past.runs) == 2
    assert past.left_out == {}


@each_row(
    ("spoiled", "words"),
    [
        (lambda data: data[:-9], "is not JSON: a damaged gzip file"),
        (lambda data: data[:99] + b"xxx" + data[102:], "a damaged gzip file"),
        (lambda data: gzip.compress(b"{"), "is not JSON"),
        (gzip.compress, "is not JSON"),
    ],
)
def test_one_that_is_damaged_is_one_clear_line(plain: Path, spoiled: Any, words: str) -> None:
    bad = plain.with_name("bad.gz")
    bad.write_bytes(spoiled(Path(f"{plain}.gz").read_bytes()))
    try:
        assert words in error_of(program("report", "show", str(bad)))
    finally:
        bad.unlink()


def test_no_more_is_unpacked_than_a_report_may_have() -> None:
    packed = gzip.compress(b"0" * (64 << 20))
    with pytest.raises(OSError, match="longer than 1 MiB"):
        files.unpacked(packed, 1 << 20)
    assert files.unpacked(packed[:1], 1) == packed[:1]
