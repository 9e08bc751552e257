"""The last lines of a report: two reports of hosts that never met lead to one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Finding, Kind, Layer, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.report import Report
from nccl_doctor.report.next_step import next_steps
from tests.support.clusters import make_cluster
from tests.support.reports import RUN
from tests.support.rows import each_row

SHUT = Kind("port-shut", Layer.PORT, "Shut", "why", "open it")
HOSTS = ("nd0", "nd1")


def report(
    hosts: Sequence[str] = HOSTS,
    *,
    options: dict[str, Any] | None = None,
    merged: bool = False,
    alone: bool = False,
    **fields: Any,
) -> Report:
    cluster = make_cluster(hosts, 1, **fields)
    if not cluster.complete:  # what one host says that met nobody
        cluster = replace(cluster, hosts=cluster.present_hosts, ranks=cluster.present)
    run = replace(RUN, options=options or {}, alone=alone, extra={"merged": []} if merged else {})
    return conclude(cluster, [], run=run, problems=[Finding(SHUT, "no", Where(hosts=("nd1",)))])


FOUR = ("nd0", "nd1", "nd2", "nd3", "nd4")
JSON, TEXT = {"outputs": {"json": "out/report.json"}}, {"outputs": {"json": "-"}}
FOLDER = {"output_dir": "/shared/a b", **JSON}
ALL = " (one answer, from the reports of all hosts in one place)"
MERGE = "Next: nccl-doctor report merge "


@each_row(
    "made, line",
    [
        (report(absent_nodes=[1], options=JSON), "out/report.json out/report.node1.json"),
        (
            report(FOUR, absent_nodes=[1, 2, 3, 4], options=JSON),
            "out/report.json out/report.node*.json",
        ),
        (
            report(absent_nodes=[0], complete=False, options=JSON),
            "out/report.json out/report.node1.json",
        ),
        # One that took itself for node 0: it does not know the numbers of the others.
        (
            report(absent_nodes=[1], complete=False, options=JSON),
            "out/report.json out/report.node*.json",
        ),
        (report(absent_nodes=[1], options=FOLDER), "'/shared/a b'/node*.json"),
        (report(absent_nodes=[1], options={"outputs": {"json": "a;b"}}), "'a;b' 'a;b.node1.json'"),
    ],
)
def test_each_screen_names_the_merge(made: Report, line: str) -> None:
    said = [step.line for step in next_steps(made)]
    assert said == ["Next: nccl-doctor explain port-shut", f"{MERGE}{line}{ALL}"]


@each_row(
    "made",
    [
        report(absent_nodes=[1]),
        report(absent_nodes=[1], options=TEXT),
        report(absent_nodes=[1], options={"outputs": 7, "output_dir": 8}),
        report(absent_nodes=[0], complete=False),
    ],
)
def test_without_files_it_says_how_to_get_them(made: Report) -> None:
    _, line = (step.line for step in next_steps(made))
    assert line.startswith("Next: run again on all hosts with --output-dir FOLDER")
    assert "nccl-doctor report merge FILE FILE" in line


@each_row(
    "made",
    [
        report(),
        report(["nd0"]),
        report(absent_nodes=[1], merged=True),
        report(["nd0"], alone=True),
    ],
)
def test_where_all_met_or_were_merged_there_is_nothing_to_merge(made: Report) -> None:
    assert [step.line for step in next_steps(made)] == ["Next: nccl-doctor explain port-shut"]


def passed(launcher: str, command: str, nnodes: int = 2, **more: Any) -> Report:
    cluster = make_cluster(HOSTS[:nnodes], 2)
    ranks = [
        replace(rank, launch=replace(rank.launch, launcher=launcher))
        for rank in cluster.ranks
        if rank.launch is not None
    ]
    run = replace(RUN, command=command, **more)
    made = conclude(replace(cluster, ranks=tuple(ranks)), [], run=run)
    return replace(made, verdict="pass")


@each_row(
    "made, line",
    [
        (passed("nccl-doctor", "nccl-doctor run", 1), "torchrun --nproc-per-node 2 train.py"),
        (
            passed("nccl-doctor", "nccl-doctor run --nnodes 2"),
            "on every host: torchrun --nnodes 2 --nproc-per-node 2 --node-rank $NODE_RANK "
            "--master-addr nd0 --master-port 29500 train.py",
        ),
        (passed("srun", "nccl-doctor run"), "start the job as you started this, with srun"),
        (passed("env", "nccl-doctor run"), "start the job as you started this"),
        (
            passed("nccl-doctor", "nccl-doctor run --hostfile hosts"),
            "start the job on the hosts of hosts",
        ),
        (
            passed("srun", "nccl-doctor run", options={"select": ["clock"]}),
            "nccl-doctor run with the checks that were left out",
        ),
        (passed("nccl-doctor", "nccl-doctor run -- torchrun train.py"), ""),
        (passed("nccl-doctor", "nccl-doctor env", 1, alone=True), ""),
    ],
)
def test_after_a_pass_comes_the_job(made: Report, line: str) -> None:
    assert [step.line for step in next_steps(made)] == ([f"Next: {line}"] if line else [])
