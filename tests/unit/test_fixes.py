"""Fixes as steps: on which hosts, in every form of the report, and back from a file."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace

import pytest

from nccl_doctor import registry
from nccl_doctor.api import (
    Command,
    Finding,
    Fix,
    Launch,
    Layer,
    On,
    Severity,
    Step,
    Where,
    export,
    fill,
    fill_each,
    look,
    shell,
    word,
)
from nccl_doctor.judge.causes import fold
from nccl_doctor.judge.checks import well_formed
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.fixes import steps_on
from nccl_doctor.model.launch import OWN
from nccl_doctor.model.report import Report
from nccl_doctor.report import github, script, text
from nccl_doctor.report.formats import renderer
from nccl_doctor.report.manual import kind_page
from nccl_doctor.report.redaction import redact
from nccl_doctor.report.story import PlaceWords, ranges_to_type, typed
from nccl_doctor.toolkit.relaunch import start_with
from tests.support.clusters import make_cluster
from tests.support.fixes import prose_with_commands, steps_of, wrong_lines
from tests.support.reports import RUN, kind, made_check, through_json
from tests.support.rows import each_row

SHUT = kind("port-shut", Layer.PORT)
RISK = kind("a-risk", Layer.ROUTE, Severity.WARN)
HOSTS = ("ux0", "ux1", "ux2", "ux3", "ux4", "ux5")
LET_IN = Step(
    shell("iptables -I INPUT -s 192.168.77.1 -j ACCEPT"), undo=shell("iptables -D INPUT 1")
)


def report_of(*findings: Finding, hosts=HOSTS) -> Report:
    cluster = make_cluster(hosts, check="shm", by_host={name: {"x": 1} for name in hosts})
    return conclude(cluster, [made_check("shm", finds=findings)], run=RUN)


def fix_lines(report: Report, width: int = 60) -> list[str]:
    rows = text.render(report, width=width).splitlines()
    first = next(i for i, row in enumerate(rows) if row.startswith("  fix "))
    return [row[8:] for row in rows[first : rows.index("", first)]]


@each_row("on, where, head", {
    "the place": (On.HERE, Where(hosts=("ux2",)), "ux2"),
    "ranks": (On.HERE, Where(ranks=(2, 3, 5)), "ux1, ux2"),
    "a node": (On.HERE, Where(nodes=(4,)), "ux4"),
    "a link": (On.HERE, Where(links=(("ux3", "ux1"),)), "ux3, ux1"),
    "nowhere": (On.HERE, Where(), "every host"),
    "all": (On.EVERY, Where(hosts=("ux2",)), "every host"),
    "the others": (On.OTHERS, Where(hosts=("ux2",)), "every host but ux2"),
    "half": (On.OTHERS, Where(hosts=("ux0", "ux1", "ux3")), "ux2, ux4, ux5"),
    "by name": (("ux5",), Where(hosts=("ux2",)), "ux5"),
}.values())  # fmt: skip
def test_hosts_of_a_step(on, where, head):
    report = report_of(Finding(SHUT, "m", where, fix=Fix(replace(LET_IN, on=on, persists=True))))
    expected = [f"# on {head}", LET_IN.command]
    assert fix_lines(report) == expected
    assert fix_lines(through_json(report)) == expected


def test_commands_stand_alone_and_are_never_wrapped():
    long = Step(Command("sysctl -w " + "net.ipv4.x=1 " * 20 + "a=2"), note="both", persists=True)
    fix = Fix(
        LET_IN,
        long,
        alternatives=[Fix(Step(shell("ufw allow 1"), persists=True)), Fix(text="use another port")],
    )
    report = through_json(report_of(Finding(SHUT, "m", Where(hosts=("ux2",)), fix=fix)))
    assert fix_lines(report) == [
        "# on ux2, until it restarts",
        LET_IN.command,
        "# on ux2: both",
        long.command,
        "# or on ux2",
        "ufw allow 1",
        "or: use another port",
    ]


def test_prose_may_have_other_ways_too():
    fix = Fix(text="ask the owner", alternatives=[Fix(replace(LET_IN, persists=True))])
    report = through_json(report_of(Finding(SHUT, "m", Where(hosts=("ux2",)), fix=fix)))
    assert fix_lines(report)[0] == "ask the owner"
    assert fix_lines(report)[-2:] == ["# or on ux2", LET_IN.command]


def test_other_ways_of_another_way_stand_beside_it():
    inner = Fix(LET_IN, alternatives=["wait", Fix(Step(shell("reboot")))])
    fix = Fix(text="ask the owner", alternatives=[inner, Fix(text="a", alternatives=["b"])])
    assert fix.alternatives == tuple(
        Fix(LET_IN)
        if way == LET_IN.command
        else Fix(Step(shell("reboot")))
        if way == "reboot"
        else way
        for way in (LET_IN.command, Fix(text="wait"), "reboot", Fix(text="a"), Fix(text="b"))
    )


def test_a_fix_of_many_places_is_said_once():
    findings = [
        Finding(SHUT, f"m{i}", Where(hosts=(host,)), fix=Fix(replace(LET_IN, persists=True)))
        for i, host in enumerate(("ux1", "ux4"))
    ]
    expected = ["# on ux1, ux4", LET_IN.command]
    assert fix_lines(report_of(*findings)) == expected
    assert fix_lines(through_json(report_of(*findings))) == expected


def test_warnings_have_theirs_too():
    report = report_of(
        Finding(SHUT, "m"), Finding(RISK, "r", Where(hosts=("ux1",)), fix=Fix(LET_IN))
    )
    shown = text.render(report)
    assert f"    fix: # on ux1, until it restarts\n         {LET_IN.command}\n" in shown


def test_json_has_one_line_and_the_steps():
    fix = Fix(replace(LET_IN, note="first"), export(A="=eth0"), alternatives=[Fix(text="wait")])
    (data,) = report_of(Finding(SHUT, "m", Where(hosts=("ux2",)), fix=fix)).to_json()["findings"]
    assert data["fix"] == (f"{LET_IN.command} (first); on every host: export A='=eth0'; or wait")
    assert data["fix_steps"] == [
        {"hosts": ["ux2"], "command": LET_IN.command, "undo": LET_IN.undo, "note": "first",
         "persists": False, "shows": False},
        {"hosts": list(HOSTS), "command": "export A='=eth0'", "undo": "unset A", "note": "",
         "persists": False, "shows": False},
    ]  # fmt: skip
    assert data["fix_alternatives"] == [{"fix": "wait", "fix_steps": []}]


def test_a_report_of_an_older_version_has_text_only():
    data = report_of(Finding(SHUT, "m", fix=Fix(LET_IN))).to_json()
    for finding in (*data["findings"], *data["root_causes"]):
        del finding["fix_steps"], finding["fix_alternatives"]
    assert fix_lines(Report.from_json(data), 100) == [LET_IN.command]


def test_folding_looks_at_the_steps():
    def found(host: str, undo: str) -> Finding:
        return Finding(SHUT, "m", Where(hosts=(host,)), fix=Fix(replace(LET_IN, undo=shell(undo))))

    (one,) = fold([found("ux0", "a"), found("ux1", "a")])
    assert (one.where.hosts, one.fix.steps[0].undo) == (("ux0", "ux1"), "a")
    some = [found("ux0", "a"), found("ux1", "b")]
    assert len(fold(some)) == 2
    assert fold(some) == fold(reversed(some))


def test_a_fix_is_text():
    fix = Fix(LET_IN, text="open it", alternatives=[Fix(text="wait")])
    assert (fix, f"{fix}!") == ("open it", "open it!")
    assert fix != Fix(text="open it")


def test_names_in_commands_get_pseudonyms():
    step = Step(
        shell("ssh ux2 'ip route add 192.168.77.3/32 dev eth0'"),
        undo=shell("ssh ux2 true"),
        note="ux3",
    )
    report = report_of(Finding(SHUT, "m", Where(hosts=("ux2",)), fix=Fix(step)))
    redacted, _ = redact(report, b"the key of the test")
    data = json.dumps(redacted.to_json())
    assert not any(name in data for name in (*HOSTS, "192.168.77.3"))
    (finding,) = redacted.to_json()["findings"]
    (made,) = finding["fix_steps"]
    assert made["hosts"] == finding["where"]["hosts"]
    assert made["command"].endswith("/32 dev eth0'")


@pytest.mark.parametrize("form", ["html", "junit", "markdown", "github"])
def test_other_formats_show_the_lines(form):
    report = report_of(Finding(SHUT, "m", Where(hosts=("ux2",)), fix=Fix(LET_IN)))
    shown = github.commands(report) if form == "github" else renderer(form)(report)
    where = "on ux2, until it restarts"
    for line in (where if form == "html" else f"# {where}", LET_IN.command):
        assert line in shown
    assert f"restarts {LET_IN.command}" not in shown


def test_steps_for_one_host():
    steps = (LET_IN, replace(LET_IN, on=On.OTHERS), replace(LET_IN, on=On.EVERY))
    cluster = make_cluster(HOSTS)
    finding = Finding(SHUT, "m", Where(hosts=("ux2",)), fix=Fix(*steps))
    assert steps_on(cluster, finding, "ux2") == [steps[0], steps[2]]
    assert steps_on(cluster, finding, "ux1") == [steps[1], steps[2]]


@each_row("value, shown", {
    "zsh looks for a command": ("=eth0", "'=eth0'"),
    "a glob of zsh": ("^eth0", "'^eth0'"),
    "plain": ("/data/a-b_c", "/data/a-b_c"),
    "a space": ("/a b", "'/a b'"),
    "a command": ("$(reboot)", "'$(reboot)'"),
    "quotes": ("=it's", """'=it'"'"'s'"""),
}.values())  # fmt: skip
def test_words_are_quoted(value, shown):
    assert word(value) == shown
    said = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, check=True)
    assert said.stdout.decode() == value


# --- of all kinds ---


def test_every_kind_says_what_a_shell_can_take():
    kinds = [kind for kind, _ in registry.load().kinds.values()]
    assert [kind.code for kind in kinds if wrong_lines(kind.fix)] == []
    assert [kind.code for kind in kinds if re.search(r"<[a-z]|NIC>|\.\.\.", kind.fix)] == []
    assert [kind.code for kind in kinds if prose_with_commands(kind.fix)] == []
    lines = [
        line for kind in kinds for step in steps_of(kind.fix) for line in (step.command, step.undo)
    ]
    assert len(lines) > 200
    script = "\n".join(lines)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.stderr == ""


@each_row("command", {
    "a hole": "ip link set NIC up",
    "a hole of another form": "rm <file>",
    "something is left out": "export NCCL_DEBUG=...",
    "half a quote": "echo 'a",
    "half of a command in a command": "echo $(date",
    "zsh looks for a command": "echo =eth0",
    "two lines": "a\nb",
    "nothing": " ",
}.values())  # fmt: skip
def test_lines_that_no_shell_takes_as_they_are_meant(command):
    command = Command(command)
    assert wrong_lines(Fix(Step(command))) == [command]
    assert wrong_lines(Fix(text="t", alternatives=[Fix(Step(shell("true"), undo=command))])) == [
        command
    ]


@each_row("words", {
    "in quotes of code": "look for Xid in `dmesg`",
    "an option": "give every host the same --key FILE",
    "a variable": "or export TMPDIR to a folder with room",
    "a program": "sysctl net.core.somaxconn, or more",
    "behind a word": "in a container docker run with more",
}.values())  # fmt: skip
def test_prose_that_holds_a_command(words):
    assert prose_with_commands(words) == [words]
    assert prose_with_commands(Fix(text="t", alternatives=[words])) == [words]
    assert prose_with_commands(Fix(Step(shell("true"), note=words))) == [words]
    assert prose_with_commands(Fix(Step(Command(words)), text=words)) == []


@each_row("words", {
    "a name of a setting": "in a systemd service: LimitNOFILE=65536 in its unit",
    "a variable": "set the same CUDA_VISIBLE_DEVICES on all hosts",
    "a launcher": "start with torchrun or deepspeed",
    "words that are programs": "kill it, mount the disk, and ask for the ip of a docker host",
    "code": 'init_process_group("nccl")',
}.values())  # fmt: skip
def test_prose_that_holds_none(words):
    assert prose_with_commands(words) == []


def test_pages_of_kinds_have_the_commands_as_code():
    fix = Fix(
        look(shell("ip -br link"), "UP?", on=On.EVERY),
        Step(shell("# ip link set NIC up")),
        alternatives=["check the cable", Fix(Step(shell("reboot")))],
    )
    page = kind_page(replace(SHUT, fix=fix), []).partition("How it is found")[0]
    assert page.endswith(
        "\n\n    # on every host: UP?\n    ip -br link\n    # ip link set NIC up\n\n"
        "Or: check the cable\n\nOr:\n\n    reboot\n\n"
    )


# --- values for words ---

SHAPE = Fix(
    look(shell("ethtool NIC"), "the speed of NIC"),
    Step(
        shell("# ip route add ADDRESS dev NIC"),
        undo=shell("# ip route del ADDRESS"),
        note="NAME stays",
    ),
    alternatives=["buy another NIC"],
)


def test_a_comment_in_which_all_is_known_becomes_a_command():
    assert [step.command for step in SHAPE.steps] == [
        *("# ethtool NIC", "# ip route add ADDRESS dev NIC"),
    ]
    half = fill(SHAPE, NIC="a b")
    assert [step.command for step in half.steps] == [
        *("ethtool 'a b'", "# ip route add ADDRESS dev 'a b'"),
    ]
    whole = fill(half, on=("ux2",), ADDRESS="10.0.0.1")
    assert whole.steps[1].command == "ip route add 10.0.0.1 dev 'a b'"
    assert {step.on for step in whole.steps} == {("ux2",)}
    assert whole.steps[0].note == "the speed of a b"
    assert whole.alternatives == (Fix(text="buy another a b"),)
    assert whole.startswith("on ux2: ethtool 'a b' (the speed of a b); on ux2: ip route add ")


def test_words_alone_are_filled_too_and_lists_are_words():
    assert fill("look at NIC, NICS", NIC="eth0") == "look at eth0, NICS"
    fix = fill(Fix(Step(shell("# amd-smi reset -g BUS_ID"))), BUS_ID=["0000:01", "a b"])
    assert fix.steps[0].command == "amd-smi reset -g 0000:01 'a b'"


def test_a_fix_for_each_place():
    fix = fill_each(SHAPE, [("ux1", {"NIC": "eth0"}), ("ux2", {"NIC": "eth1"})])
    assert [(step.on, step.command) for step in fix.steps if step.shows] == [
        *((("ux1",), "ethtool eth0"), (("ux2",), "ethtool eth1")),
    ]
    assert fill_each(SHAPE, []) == SHAPE


def test_what_only_shows_ends_with_nothing():
    report = report_of(
        Finding(SHUT, "m", Where(hosts=("ux2",)), fix=Fix(look(shell("ip -br link"), "UP?")))
    )
    assert fix_lines(through_json(report)) == ["# on ux2: UP?", "ip -br link"]


@each_row("sources, launcher, line, undo", {
    "an option": ({"master_port": "--rdzv-port"}, "env", "# --rdzv-port 29500", "# --rdzv-port 1"),
    "of our own launcher": (
        {"master_port": "default"}, OWN, "# --master-port 29500", "# --master-port 1",
    ),
    "the launcher spells it otherwise": (
        {"master_port": "MASTER_PORT"}, "accelerate",
        "# --main_process_port 29500", "# --main_process_port 1",
    ),
    "of a command behind `run --`": (
        {"master_port": "--main_process_port"}, OWN,
        "# --main_process_port 29500", "# --main_process_port 1",
    ),
    "of DeepSpeed": (
        {"master_port": "MASTER_PORT"}, "deepspeed", "# --master_port 29500", "# --master_port 1",
    ),
    "address and port together": (
        {"master_port": "--rdzv-endpoint"}, OWN,
        "# --rdzv-endpoint nd0:29500", "# --rdzv-endpoint nd0:1",
    ),
    "of a pod that our own launcher examines": (
        {"master_port": "MASTER_PORT"}, OWN, "export MASTER_PORT=29500", "export MASTER_PORT=1",
    ),
    "of torchrun": (
        {"master_port": "MASTER_PORT"}, "torchrun", "# --master-port 29500", "# --master-port 1",
    ),
    "a variable": (
        {"master_port": "PET_MASTER_PORT"}, "kubeflow",
        "export PET_MASTER_PORT=29500", "export PET_MASTER_PORT=1",
    ),
    "nobody knows": (
        {"master_port": "derived from A"}, "srun",
        "export MASTER_PORT=29500", "export MASTER_PORT=1",
    ),
}.values())  # fmt: skip
def test_a_value_is_given_in_the_way_of_the_present_one(sources, launcher, line, undo):
    (first, second, *_) = make_cluster(("ux0", "ux1"), nproc=1).ranks
    launch = Launch(launcher, master_addr="nd0", master_port=1, sources=sources)
    ranks = [replace(rank, launch=launch) for rank in (first, second)]
    (step,) = start_with(ranks, "master_port", 29500)
    assert (step.command, step.undo, step.on) == (line, undo, ("ux0", "ux1"))
    ranks[1] = replace(ranks[1], launch=replace(launch, master_port=2))
    assert [step.on for step in start_with(ranks, "master_port", 29500)] == [("ux0",), ("ux1",)]
    (step,) = start_with(ranks, "master_port", 29500, On.EVERY)
    assert step.on is On.EVERY


@each_row("command, line", {
    "good": ("a  b", "a  b"),
    "two lines": ("rm a\nrm b", "# rm a rm b"),
    "an escape": ("a\x1b[2J", "# a\\x1b[2J"),
}.values())  # fmt: skip
def test_what_is_no_plain_line_is_a_comment(command, line):
    assert typed(command) == line


@each_row("names, words", {
    "few": (["b", "a9"], "b, a9"),
    "many": ([f"gpu{i:03}" for i in range(1, 65)], "gpu[001-064]"),
    "gaps": (["a1", "a2", "a4", "x", "b-7"], "x, a[1-2,4], b-7"),
}.values())  # fmt: skip
def test_ranges_of_hosts(names, words):
    assert ranges_to_type(names) == words


@each_row("fix", {
    "no step": Fix("x", text="t"),
    "no host": Fix(Step(shell("x"), on=(1,)), text="t"),
}.values())  # fmt: skip
def test_what_a_plugin_may_not_yield(fix):
    with pytest.raises(TypeError, match="fix"):
        well_formed(Finding(SHUT, "m", fix=fix))


def test_hosts_of_one_name_are_told_apart():
    full = "ux0 (node 0, 192.168.77.1; node 2, 192.168.77.3)"
    found = Finding(SHUT, "m", Where(hosts=("ux0",)), fix=Fix(replace(LET_IN, persists=True)))
    report = report_of(found, hosts=("ux0", "ux1", "ux0"))
    shown = text.render(report, width=100)
    assert f"  where {full}\n" in shown
    assert f"# on {full}\n" in shown
    assert full not in text.render(report_of(found))


def test_a_host_alone_with_the_name_of_the_master_is_told_from_it():
    cluster = make_cluster(("ux0",), 1)
    launch = replace(cluster.ranks[0].launch, rank=1, node_rank=1)
    host = replace(cluster.hosts[0], node_rank=1)
    ranks = (replace(cluster.ranks[0], host=host, launch=launch),)
    report = conclude(replace(cluster, hosts=(host,), ranks=ranks), [], run=RUN)
    assert PlaceWords(report).say(Where(hosts=("ux0",))) == "ux0 (node 1, 192.168.77.1)"


# --- as a script ---

SAY = Fix(
    Step(shell("echo a"), on=On.HERE, undo=shell("echo b"), note="first"),
    Step(shell("echo all"), on=On.EVERY, persists=True),
    export(X="=eth0"),
    alternatives=[Fix(Step(shell("echo c"), persists=True)), Fix(text="buy another one")],
)


def on_host(script: str, name: str) -> list[str]:
    """What bash on a host of that name says to the whole script."""
    shell = f"uname() {{ echo {name}; }}\n{script}"
    done = subprocess.run(["bash"], input=shell, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_script_runs_on_each_host_what_is_meant_for_it():
    report = report_of(
        Finding(SHUT, "64 MiB\n$(reboot)", Where(hosts=("ux2",)), fix=SAY),
        Finding(RISK, "r", Where(hosts=("ux1",)), fix="look\nat it"),
    )
    made = script.render(through_json(report))
    assert on_host(made, "ux2") == ["a", "all"]
    assert on_host(made, "ux5") == ["all"]
    assert on_host(made, "elsewhere") == []
    assert "\n# by hand: look at it\n" in made


def test_a_script_says_each_step_once_and_grows_with_the_findings():
    hosts = tuple(f"ux{i}" for i in range(300))
    every = Step(shell("echo all"), on=On.EVERY, persists=True)
    findings = [
        Finding(
            SHUT,
            f"m{i}",
            Where(hosts=(host,)),
            fix=Fix(
                Step(shell("echo {}", i), persists=True),
                every,
                Step(shell("echo last"), (host, hosts[i - 1]), persists=True),
                alternatives=[Fix(Step(shell("echo c"), persists=True))],
            ),
        )
        for i, host in enumerate(hosts)
    ]
    each = fill_each(
        Fix(Step(shell("# echo NIC"))), [(host, {"NIC": f"n{host}"}) for host in hosts]
    )
    report = report_of(*findings, Finding(RISK, "r", fix=each), hosts=hosts)
    made = script.render(report)
    assert on_host(made, "ux7") == ["all", "7", "last", "last", "nux7"]
    assert on_host(made, "elsewhere") == []
    assert made.count("\necho all\n") == 1
    assert made.count("\nux7)\n") == 2
    assert "\n# or on ux7: echo c\n" in made
    assert len(made) < 500 * len(hosts)
    assert on_host(script.render(report, "ux7"), "ux7").count("all") == 300


def test_a_script_for_one_host_says_all_about_each_step():
    report = report_of(Finding(SHUT, "64 MiB", Where(hosts=("ux2",)), fix=SAY))
    assert script.render(report, "ux2").splitlines()[3:] == [
        "",
        "# port-shut: Title of port-shut",
        "# ux2: 64 MiB",
        "# first",
        "echo a",
        "# ends when the host starts again",
        "# undo: echo b",
        "echo all",
        "# for the shell that starts the job: there, read this file with `.`",
        "export X='=eth0'",
        "# undo: unset X",
        "# or: echo c",
        "# or: buy another one",
    ]
    assert "\necho a\n" not in script.render(report, "ux1")


def test_no_branch_is_for_a_host_without_a_name_and_no_line_is_a_filler():
    fix = Fix(
        Step(shell("echo here"), on=("ux1",), undo=shell("# echo NIC"), persists=True),
        Step(shell("# ip link set dev NIC up"), on=("ux1",)),
        alternatives=[Fix(Step(shell("# echo ADDRESS"), on=("ux1",)))],
    )
    found = Finding(SHUT, "m", Where(hosts=("ux1",)), fix=fix)
    gone = Finding(SHUT, "n", Where(nodes=(2,)), fix=Fix(Step(shell("echo gone"), persists=True)))
    hosts = ("ux0", "ux1", "-")
    cluster = make_cluster(hosts, check="shm", absent_nodes=[2])
    made = script.render(conclude(cluster, [made_check("shm", finds=(found, gone))], run=RUN))
    lines = made.splitlines()
    assert "'node 2'" not in made
    assert "# on node 2: echo gone" in lines
    assert ":" not in lines
    assert "# undo: echo NIC" in lines
    assert "# or on ux1: echo ADDRESS" in lines
    assert [line for line in lines if ": # " in line] == []
    assert on_host(made, "ux1") == ["here"]
    assert made.count("esac") == 1  # no step is for every host


def test_steps_as_data_are_those_of_a_host():
    report = report_of(Finding(SHUT, "64 MiB", Where(hosts=("ux2",)), fix=SAY))
    (found,) = script.steps_to_json(report)
    assert (found["code"], found["headline"]) == ("port-shut", f"{SHUT.title} (ux2)")
    assert [step["command"] for step in found["fix_steps"]][:2] == ["echo a", "echo all"]
    assert [step["command"] for step in script.steps_to_json(report, "ux1")[0]["fix_steps"]] == [
        "echo all",
        "export X='=eth0'",
    ]


def test_a_script_of_a_healthy_cluster_does_nothing():
    for host in (None, "ux1"):
        made = script.render(report_of(), host)
        assert made.endswith("# Nothing to fix.\n")
        assert on_host(made, "ux1") == []


def test_a_script_with_nothing_to_type_says_so():
    made = script.render(report_of(Finding(SHUT, "m", Where(hosts=("ux2",)))))
    assert "# by hand: fix port-shut\n" in made
    assert made.endswith("# No command is known that would fix it.\n")


def test_hostile_names_stay_in_comments_and_quotes():
    name = "x)\nreboot\n;;*"
    made = script.render(report_of(Finding(SHUT, "m", fix=SAY), hosts=(name, "ux1")))
    assert on_host(made, "ux1") == ["a", "all"]
    assert "\nreboot" not in made
