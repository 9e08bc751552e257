"""A run beside earlier ones: noise gives nothing, a slower link is named, and why others are not
compared is said.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Check, Confidence, Figure, Severity, Where
from nccl_doctor.checks.software import Software
from nccl_doctor.cli.earlier_reports import LARGEST, NEWEST, read_past
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.history import Past, compare, judge_beside
from nccl_doctor.judge.history.past import MOST
from nccl_doctor.model.report import RunRecord
from nccl_doctor.registry import load
from nccl_doctor.report.formats import json as json_format
from nccl_doctor.report.text import render
from tests.support.clusters import make_cluster
from tests.support.exchanges import World, both
from tests.support.pasts import LINKS, NOW, held_against, noisy, of, past, run_of, saved
from tests.support.reports import made_check, read_with, through_json

SLOWER = "slower-than-before"


# --- noise ---


@given(st.integers(3, 5), st.integers(5, 12), st.integers(0, 1 << 20), st.floats(0.0, 0.4))
def test_noise_alone_gives_nothing(count, runs, seed, share):
    found = held_against(World(count).noise(seed, share).cluster(), noisy(count, runs, share, seed))
    assert of(found.findings, SLOWER) == []
    assert found.record["figures"] == 2 * count * (count - 1)


@given(st.integers(5, 12), st.integers(0, 1 << 20))
def test_noise_of_two_hosts_gives_nothing_while_it_is_small(runs, seed):
    found = held_against(World(2).noise(seed, 0.05).cluster(), noisy(2, runs, 0.05, seed))
    assert of(found.findings, SLOWER) == []


def test_a_number_that_was_as_bad_now_and_then_is_no_news():
    runs = noisy(3, 12, 0.02)
    for i in (3, 6):
        runs[i] = saved(World(3).slow([("nd0", "nd1")], share=0.6).cluster(), i + 1)
    now = World(3).slow([("nd0", "nd1")], share=0.6).cluster()
    assert of(held_against(now, runs).findings, SLOWER) == []
    (found,) = of(held_against(now, runs[:6] + runs[7:]).findings, SLOWER)
    assert found.where == Where(links=(("nd0", "nd1"),))


def test_what_is_faster_than_before_is_nothing():
    now = World(3).change([("nd0", "nd1")], rate=3e9, rtt_us=5.0).cluster()
    assert held_against(now, noisy(3, 10, 0.02)).findings == ()


# --- slower ---


def test_eighteen_percent_on_one_link_of_ten_runs():
    now = World(4).noise(99, 0.02).slow([("nd0", "nd2")], share=0.82).cluster()
    comparison = held_against(now, noisy(4, 10, 0.02))
    (found,) = comparison.findings
    assert (found.code, found.level, found.confidence) == (
        SLOWER,
        Severity.WARN,
        Confidence.LIKELY,
    )
    assert found.where == Where(links=(("nd0", "nd2"),))
    assert "bandwidth −18 %: 8.2 Gbit/s, the median of 10 earlier runs is" in found.message
    assert "report diff past/9.json NAME" in found.fix
    assert found.evidence["figures"][0]["runs"] == 10
    assert comparison.record["runs"] == [f"run-{day}" for day in range(10, 0, -1)]


def test_few_runs_make_it_possible_only():
    now = World(4).slow([("nd0", "nd2")], share=0.82).cluster()
    (found,) = held_against(now, noisy(4, 5, 0.02)).findings
    assert (found.code, found.confidence) == (SLOWER, Confidence.POSSIBLE)


def test_all_links_of_one_host_are_the_host():
    world = World(5)
    now = world.slow(world.of("nd1"), share=0.8).cluster()
    (found,) = held_against(now, noisy(5, 10, 0.02)).findings
    assert (found.code, found.where) == (SLOWER, Where(hosts=("nd1",)))
    assert "at worst, and less on 7 more" in found.message


def test_all_links_of_all_hosts_are_one_finding():
    world = World(4)
    now = world.slow(world.pairs, share=0.8).cluster()
    (found,) = held_against(now, noisy(4, 10, 0.02)).findings
    assert found.code == SLOWER
    assert set(found.where.links) == set(world.pairs)


def test_two_links_are_two_findings():
    now = World(5).slow([*both("nd0", "nd1"), *both("nd2", "nd3")], share=0.8).cluster()
    found = held_against(now, noisy(5, 10, 0.02)).findings
    assert {f.where.links for f in found} == {
        tuple(both("nd0", "nd1")),
        tuple(both("nd2", "nd3")),
    }


def test_a_later_round_trip():
    now = World(3).change(both("nd0", "nd1"), rtt_us=400.0).cluster()
    (found,) = held_against(now, noisy(3, 10, 0.02)).findings
    assert found.where.links == tuple(both("nd0", "nd1"))
    assert "round-trip time +7" in found.message
    now = World(3).change(both("nd0", "nd1"), rtt_us=340.0).cluster()
    assert held_against(now, noisy(3, 10, 0.02)).findings == (), "a CPU that wakes takes as long"


def test_a_busy_machine_counts_neither_now_nor_then():
    slow = World(3).slow([("nd0", "nd1")], share=0.5).starve("nd0")
    assert held_against(slow.cluster(), noisy(3, 10, 0.02)).findings == ()
    runs = [saved(World(3).starve("nd0").starve("nd1").cluster(), day) for day in range(1, 11)]
    now = World(3).slow([("nd0", "nd1")], share=0.5).cluster()
    comparison = held_against(now, runs)
    assert comparison.findings == ()
    assert comparison.record["figures"] == 0
    assert comparison.record["text"] == "10 earlier runs in past; 0 of 12 speeds judged"
    text = held_against(slow.cluster(), noisy(3, 10, 0.02)).record["text"]
    assert text.endswith("4 of 12 speeds judged, 8 measured on a busy machine")


def test_a_link_that_is_slow_in_this_very_run_explains_it():
    now = World(4).slow(both("nd0", "nd2"), share=0.1).cluster()
    comparison = held_against(now, noisy(4, 10, 0.02))
    report = conclude(now, LINKS, run=run_of(21), problems=comparison.findings)
    codes = {f.code: f.explained_by for f in report.findings}
    assert codes == {"link-slow": None, SLOWER: "link-slow"}
    through_json(report)


# --- too few to judge ---


@pytest.mark.parametrize("runs", [0, 1, 2, 4])
def test_of_fewer_than_five_runs_changes_are_shown_and_not_judged(runs):
    now = World(3).slow([("nd0", "nd1")], share=0.5).cluster()
    (found,) = held_against(now, noisy(3, runs, 0.02)).findings
    assert (found.code, found.level) == ("baseline-too-short", Severity.INFO)
    assert found.message.startswith(f"{runs} earlier run{'' if runs == 1 else 's'} in past; 5 are")
    assert ("the largest changes: bandwidth −" in found.message) == bool(runs)


# --- words ---

CHECKS = (*LINKS, Software())
IMAGE = {
    "torch": "2.12.0",
    "cuda": "12.8",
    "rocm": None,
    "nccl": "2.27.5",
    "torch_git": "",
    "deepspeed": None,
    "python": "3.11.9",
    "driver": "570.10",
}


def image(**changes):
    return make_cluster(check="software", by_rank={r: {**IMAGE, **changes} for r in range(4)})


def test_what_changed_is_said_with_its_place():
    runs = [saved(image(), day, CHECKS) for day in range(1, 5)]
    found = held_against(image(torch="2.13.0", deepspeed="0.18"), runs, CHECKS).findings
    (changed,) = of(found, "setup-changed")
    assert changed.level is Severity.INFO
    assert changed.where == Where(hosts=("nd0", "nd1"))
    assert "torch 2.12.0 → 2.13.0" in changed.message
    assert "DeepSpeed absent → 0.18" in changed.message
    assert "4 of 4 earlier runs" in changed.message


def test_what_most_runs_had_counts_and_of_a_tie_the_newest():
    old, new = (image(torch=version) for version in ("2.12.0", "2.13.0"))
    runs = [saved(each, day, CHECKS) for day, each in enumerate([old, old, new, new], 1)]
    assert of(held_against(new, runs, CHECKS).findings, "setup-changed") == []
    (changed,) = of(held_against(old, runs, CHECKS).findings, "setup-changed")
    assert "torch 2.13.0 → 2.12.0" in changed.message
    assert "2 of 4 earlier runs" in changed.message


def test_one_host_with_another_image():
    mixed = {r: {**IMAGE, **({"torch": "2.13.0"} if r > 1 else {})} for r in range(4)}
    now = make_cluster(check="software", by_rank=mixed)
    runs = [saved(image(), day, CHECKS) for day in range(1, 5)]
    (changed,) = of(held_against(now, runs, CHECKS).findings, "setup-changed")
    assert changed.where == Where(hosts=("nd1",))


def test_what_was_not_looked_at_did_not_go():
    runs = [saved(image(), day, CHECKS) for day in range(1, 5)]
    assert of(held_against(make_cluster(), runs, CHECKS).findings, "setup-changed") == []


# --- which reports count ---


def test_reports_of_others_are_left_out_and_counted():
    cluster = World(3).cluster()
    names = {"nd0": "x0", "nd1": "x1", "nd2": "x2"}
    hosts = tuple(replace(host, name=names[host.name]) for host in cluster.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    elsewhere = saved(replace(cluster, hosts=hosts, ranks=ranks), 2)
    odd = [
        elsewhere,
        replace(elsewhere, redacted=True, run=replace(elsewhere.run, id="r")),
        saved(World(3).cluster(world_size=8), 4),
        saved(World(3, backend="nccl").cluster(), 5),
        saved(World(3).cluster(complete=False), 6),
        saved(World(3).cluster(), 7, id="now"),
        saved(World(3).cluster(), 22),
        saved(World(3).cluster(), 1),
        saved(World(3).cluster(), 1),
    ]
    (found,) = held_against(cluster, odd).findings
    assert found.code == "baseline-too-short"
    assert found.message.startswith("1 earlier run in past; not used: 2 of this run, or of one")
    for words in (
        "1 of other hosts,",
        "1 of other hosts, or redacted",
        "1 of another number of ranks",
        "1 with backend nccl",
        "1 of one host's own view",
        "1 of later runs",
    ):
        assert words in found.message


def test_no_more_than_the_newest_count():
    runs = noisy(2, 20, 0.02) + [saved(World(2).cluster(), 1, id=f"old-{i}") for i in range(3)]
    record = held_against(World(2).cluster(), runs).record
    assert len(record["runs"]) == MOST
    assert record["left_out"] == {f"older than the newest {MOST}": 3}


def test_runs_of_which_a_host_was_absent_count_for_the_others():
    runs = noisy(3, 10, 0.02)
    now = World(2).slow([("nd0", "nd1")], share=0.5).cluster(world_size=6, nnodes=3)
    (found,) = of(held_against(now, runs).findings, SLOWER)
    assert found.where == Where(links=(("nd0", "nd1"),))


# --- plug-ins ---


class Moon(Check):
    name = "moon"
    layer = made_check("moon").layer
    kinds = made_check("moon").kinds

    def figures(self, cluster):
        for rank, facts in cluster.facts(self.name):
            place = Where(hosts=(rank.host.label,), ranks=(rank.rank,))
            yield Figure("light", facts["light"], place, "lx", better="higher")
            yield Figure("phase", facts.get("phase"), place)
        if any(facts.get("broken") for _, facts in cluster.facts(self.name)):
            raise KeyError("dark side")

    def judge(self, cluster):
        return ()


def moon(**light):
    return make_cluster(check="moon", nproc=1, by_host={k: {"light": v} for k, v in light.items()})


def test_a_plug_in_is_compared_too():
    runs = [saved(moon(nd0=100.0 + day % 2, nd1=50.0), day, [Moon()]) for day in range(1, 10)]
    (found,) = held_against(moon(nd0=70.0, nd1=50.0), runs, [Moon()]).findings
    assert (found.code, found.where.hosts) == (SLOWER, ("nd0",))
    assert "light −31 %: 70 lx, the median of 9 earlier runs is 101 lx" in found.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "bright"])
def test_a_number_that_is_none_is_not_compared(value):
    runs = [saved(moon(nd0=100.0), day, [Moon()]) for day in range(1, 10)]
    assert held_against(moon(nd0=value), runs, [Moon()]).findings == ()


def test_figures_that_break_cost_that_check_and_are_named():
    now = make_cluster(
        check="moon", nproc=1, by_host={"nd0": {"light": 1.0, "broken": 1}, "nd1": {"light": 5.0}}
    )
    runs = [saved(moon(nd0=100.0, nd1=5.0), day, [Moon()]) for day in range(1, 10)]
    found = held_against(now, runs, [Moon()]).findings
    (broke,) = of(found, "check-broke")
    assert "`figures` of check moon raised KeyError" in broke.message
    assert [f.where.hosts for f in of(found, SLOWER)] == [("nd0",)], "what it said before stands"


def test_earlier_facts_of_another_version_are_not_compared():
    odd = make_cluster(check="moon", nproc=1, by_host={"nd0": {"shine": 1.0}})
    runs = [saved(odd, day, [Moon()]) for day in range(1, 10)]
    assert held_against(moon(nd0=70.0), runs, [Moon()]).findings == ()


# --- the report ---


def test_the_report_says_what_it_was_held_against():
    now = World(4).slow([("nd0", "nd2")], share=0.82).cluster()
    reports = noisy(4, 10, 0.02)
    again = judge_beside(saved(now, 21), load(), replace(past(reports), left_out={"broken": 2}))
    assert again.run.baseline["text"] == (
        "10 earlier runs in past; not used: 2 broken; 24 of 24 speeds judged"
    )
    assert again.verdict == "warn"
    assert [f.code for f in again.root_causes] == [SLOWER]
    assert "baseline: 10 earlier runs in past; not used: 2 broken" in render(again)
    through_json(again)
    twice = judge_beside(again, load(), past(reports[:2]))
    assert [f.code for f in twice.findings] == ["baseline-too-short"]
    assert [f.code for f in judge_beside(again, load(), None).findings] == [SLOWER]


# --- reading ---


def test_a_folder_holds_all_sorts_of_files(tmp_path):
    for day in (1, 2):
        report = saved(World(2).cluster(), day)
        (tmp_path / f"{day}.json").write_text(json_format.render(report))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.json").write_text(json.dumps({"schema_version": "9"}))
    (tmp_path / "notes.txt").write_text("not looked at")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    found = read_past(str(tmp_path), LINKS)
    assert sorted(run.id for run in found.runs) == ["run-1", "run-2"]
    assert found.left_out == {"not a report": 4}


def test_of_many_files_the_newest_are_read(tmp_path):
    first = tmp_path / "first.json"
    first.write_text("{}")
    for i in range(NEWEST + 2):
        (tmp_path / f"{i}.json").hardlink_to(first)
    assert read_past(str(tmp_path), LINKS).left_out == {
        "not a report": NEWEST,
        "older, not read": 3,
    }


def test_a_file_that_would_take_all_the_memory_is_left_alone(tmp_path):
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(LARGEST + 1)
    assert read_past(str(tmp_path), LINKS).left_out == {"too large": 1}


def test_what_somebody_wrote_into_a_report_breaks_nothing():
    odd = [read_with(report, id=[day], started=0) for day, report in enumerate(noisy(2, 4, 0.02))]
    assert len(held_against(World(2).cluster(), odd).record["runs"]) == 4


def test_an_empty_folder_is_a_first_run(tmp_path):
    found = compare(
        World(2).cluster(), LINKS, read_past(str(tmp_path), LINKS), RunRecord(started=NOW)
    )
    assert [f.code for f in found.findings] == ["baseline-too-short"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": "1"}', "[" * 100_000])
def test_a_file_that_is_no_report_is_an_error(tmp_path, text):
    file = tmp_path / "past.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_past(str(file), LINKS)


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_past(str(tmp_path / "no"), LINKS)
    assert Past("x").runs == ()
