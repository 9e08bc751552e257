"""Flags are read as the launchers themselves read them: held against those that are installed."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nccl_doctor.launch.command_line import accelerate, accelerate_config, deepspeed, torchrun
from nccl_doctor.launch.command_line.installed import installed_flags
from nccl_doctor.launch.command_line.job_line import FlagTable, JobLineError, LineValue, read_flags
from nccl_doctor.launch.command_line.reader import read
from nccl_doctor.launch.ssh import hostfile
from tests.support.lazy import Lazy
from tests.support.rows import each_row
from tests.support.unsent import unsent
from tests.unit.test_ssh_hostfile import OF_DEEPSPEED

launch, run = Lazy("torch.distributed.launch"), Lazy("torch.distributed.run")
utils = Lazy("torch.distributed.elastic.rendezvous.utils")
pytestmark = pytest.mark.xdist_group("torch")


class Refused(Exception):
    pass


def parser_inside(parse_args: Callable[[list[str]], object]) -> argparse.ArgumentParser:
    """The parser that a launcher makes and does not show."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args: found.append(self))
        parse_args([])
    return found[0]


def installed(table: FlagTable) -> dict[str, bool]:
    """Every spelling of a flag of the installed launcher, and whether it takes a value."""
    found = installed_flags(table.parser)
    if not found:
        pytest.skip(f"{table.parser} is not installed")
    return {
        name: takes_value
        for spellings, takes_value in found.items()
        for name in spellings.split("/")
    }


def known(table: FlagTable) -> dict[str, bool]:
    return {
        name: takes_value
        for takes_value in (True, False)
        for names in table.flags(takes_value).values()
        for name in names
    }


OF_OTHER_RELEASES = {  # flag that this release has not → releases that have it
    torchrun.FLAGS: {
        "--numa_binding": "torch 2.8",
        "--duplicate_stdout_filters": "torch 2.10",
        "--duplicate_stderr_filters": "torch 2.10",
        "--signals_to_handle": "torch 2.9",
        "--shutdown_timeout": "torch 2.11",
        "--virtual_local_rank": "torch 2.9",
        "--log_line_prefix_template": "torch 2.15",
        "--print_completion": "torch 2.15",
    },
    deepspeed.FLAGS: {
        **dict.fromkeys(
            ("--elastic_training", "--min_elastic_nodes", "--max_elastic_nodes"),
            "DeepSpeed 0.7 to 0.18",
        ),
        **dict.fromkeys(
            ("--venv_script", "--log_level", "--quiet", "_q"), "DeepSpeed 0.17, and later"
        ),
    },
}


@pytest.mark.parametrize("table", OF_OTHER_RELEASES, ids=lambda table: table.parser)
def test_every_flag(table: FlagTable):
    theirs, ours = installed(table), known(table)
    assert theirs.items() <= ours.items()
    spare = {name.replace("-", "_").replace("__", "--", 1) for name in ours.keys() - theirs.keys()}
    assert spare <= OF_OTHER_RELEASES[table].keys()


def test_the_older_launcher_of_torch_has_one_flag_more():
    spellings = {
        name for each in parser_inside(launch.parse_args)._actions for name in each.option_strings
    }
    assert spellings - {"-h", "--help"} - known(torchrun.LAUNCH_FLAGS).keys() == set()
    assert {"--use_env", "--use-env"} <= spellings


def test_every_flag_of_accelerate():
    theirs, ours = installed(accelerate.FLAGS), known(accelerate.FLAGS)
    assert {
        name: takes_value
        for name, takes_value in theirs.items()
        if name not in ours
        and not (takes_value and name[2:].replace("-", "_").startswith(accelerate.FLAGS.families))
    } == {}
    assert theirs.keys().isdisjoint(
        name for name in theirs.keys() & ours.keys() if theirs[name] != ours[name]
    )


def test_a_flag_that_no_table_has_is_one_of_the_installed_launcher():
    lacks = replace(
        torchrun.FLAGS,
        values=torchrun.FLAGS.values.replace("--log_dir", ""),
        switches="--standalone",
    )
    words = ["--log-dir", "x", "--run-path", "--nnodes", "2", "t.py", "--log-dir", "y"]
    found = read_flags(lacks, words)
    said = {name: said.text for name, said in found.flags.items()}
    assert said == {"log_dir": "x", "run_path": "", "nnodes": "2"}
    assert found.script == "t.py"
    assert found.notes == (
        "--log-dir is not known here; it is ignored",
        "--run-path is not known here; it is ignored",
    )


@each_row("parser", ["", "no_such_module:main", "json:no_such_function", "json:dumps", "os:abort"])
def test_a_launcher_that_cannot_be_asked_has_no_flags(parser: str):
    assert installed_flags(parser) == {}


@pytest.fixture(scope="module")
def accelerates() -> argparse.ArgumentParser:
    commands = pytest.importorskip("accelerate.commands.launch")
    return commands.launch_command_parser()


# --- the configuration of accelerate, key by key ---

FILE = {"distributed_type": "MULTI_GPU", "num_processes": "4"}
TWO = {
    "num_processes": "16",
    "num_machines": "2",
    "machine_rank": "1",
    "main_process_ip": "10.0.0.1",
}
NOT_MULTI = {"distributed_type": "'NO'"}
GONE = object()
VALUES = {
    "compute_environment": ("LOCAL_MACHINE", "MULTI_MACHINE", "local_machine", "", "1"),
    "distributed_type": (
        *("MULTI_GPU", "multi_gpu", "MULTIGPU", "NO", "'NO'", "", "3", "MULTI_CPU"),
        *("FSDP", "MEGATRON_LM", "MULTI_XPU", GONE),
    ),
    "num_processes": (
        *("4", "'4'", "010", "0o10", "1_0", "0x8", "8:20", "+4", "08", "true", "-1", "", "four"),
        GONE,
    ),
    "num_machines": ("1", "'2'", "2.0", "two", "", GONE),
    "machine_rank": ("'1'", "x", "", GONE),
    "gpu_ids": ("all", "0", "'0'", "0,1", "'0,1'", "0, 1", "0_1", "[0, 1]", "", "1:20", GONE),
    "mixed_precision": ("no", "'no'", "bf16", "BF16", "bf17", "fp32", "1", "", "off"),
    "main_process_port": ("29511", "'29511'", "29511.0", "029511", "70000", "x", "", "0"),
    "rdzv_backend": ("c10d", "x", ""),
    "dynamo_backend": ("NO", "'NO'", "x", "inductor", "INDUCTOR"),
    "dynamo_config": ("{}", "{dynamo_backend: x}", "{backend: EAGER}", "x"),
    "fsdp_config": (
        "{fsdp_cpu_ram_efficient_loading: true, fsdp_sync_module_states: false}",
        "{cpu_ram_efficient_loading: false, fsdp_sync_module_states: false}",
    ),
    "fp16": ("true",),
    "strange": ("1",),
    "num_process": ("4",),
    "ipex_config": ("{}",),
    "debug": ("x", "no"),
    "use_cpu": ("true", "x"),
    "same_network": ("true", "x"),
    "downcast_bf16": ("x", "'no'"),
    "tpu_env": ("[]", "x"),
    "commands": ("[a]",),
}
TEXTS = ("", "# nothing\n", "---\n", "- a\n", "text\n", "a: [1\n", "a: 1\n---\nb: 2\n", "\ta: 1\n")


def files() -> list[tuple[str, str]]:
    """(what is odd, text) of every configuration."""
    made = [(repr(text), text) for text in TEXTS]
    for more, tried in (
        ({}, [*VALUES]),
        (TWO, ["num_processes", "num_machines", "machine_rank", "gpu_ids"]),
        ({"distributed_type": "FSDP"}, ["gpu_ids", "fsdp_config"]),
        (NOT_MULTI, ["num_processes", "mixed_precision"]),
    ):
        for name, text in [(key, value) for key in tried for value in VALUES[key]]:
            if more and text == "true":
                continue  # accelerate passes on True or 0 ranks, which end torchrun or mean 1
            keys = {**FILE, **more, name: text}
            lines = [f"{key}: {value}\n" for key, value in keys.items() if value is not GONE]
            made.append((f"{name}: {text}, {more}", "".join(lines)))
    return made


def of_accelerate(
    path: Path, parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str] | str | None:
    """(ranks here, hosts) with which it calls torchrun's code; "one" where it starts one process;
    None where it ends before.
    """
    commands = importlib.import_module("accelerate.commands.launch")
    called: list[tuple[str, str] | str] = []

    def start(args: argparse.Namespace) -> None:
        run.config_from_args(args)
        called.append((args.nproc_per_node, args.nnodes.partition(":")[0]))

    class Started:
        returncode = 0

        def __init__(self, *_: object, **__: object) -> None:
            called.append("one")

        def wait(self) -> None: ...

    monkeypatch.setattr(importlib.import_module("torch.distributed.run"), "run", start)
    monkeypatch.setattr(commands.subprocess, "Popen", Started)
    monkeypatch.setattr(commands, "check_cuda_p2p_ib_support", lambda: True)
    line = ["--config_file", str(path), "t.py"]
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(os, "environ", {"HOME": str(path.parent)})
        try:
            commands.launch_command(parser.parse_args(line))
        except Exception:  # whatever it is, the job does not start
            return None
    return called[0]


@each_row(("odd", "text"), files())
def test_a_configuration_is_refused_where_accelerate_ends(
    odd: str,
    text: str,
    accelerates: argparse.ArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    path = unsent(tmp_path) / "c.yaml"
    path.write_text(text)
    told = of_accelerate(path, accelerates, monkeypatch)
    try:
        ours = read(["accelerate", "launch", "--config_file", "c.yaml", "t.py"], {}, path.parent)
    except JobLineError:
        assert told is None
        return
    assert told is not None
    if told != "one":
        assert (int(told[0]), told[1]) == (int(ours.nproc_per_node or 0), str(ours.nnodes))


@each_row("text", [text for _, text in files()])
def test_a_configuration_is_the_same_without_pyyaml(text: str):
    yaml = pytest.importorskip("yaml")
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    lines = text.splitlines()
    for name, value in table.items() if isinstance(table, dict) else ():
        (line,) = (line for line in lines if line.startswith(f"{name}:"))
        if isinstance(value, (str, int, float, type(None))):
            found = accelerate_config.resolved(line.partition(":")[2])
            assert (found, type(found)) == (value, type(value))


def theirs(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return parser.parse_args(words)
        except SystemExit as error:
            raise Refused from error


TORCHRUN_WORDS = st.lists(
    st.sampled_from(
        [
            *("--nnodes=2", "--nnodes", "--nnode", "--nproc-per-node", "--nproc_per_node=gpu"),
            *("--node_rank=1", "--node-rank", "--master", "--master_a=h", "--rdzv-id", "--rdzv"),
            *(
                "-m",
                "-r",
                "-r3",
                "-t=1",
                "--standalone",
                "--stand",
                "--no-python",
                "--max-restarts",
            ),
            *("1", "2", "-1", "gpu", "train.py", "pkg.train", "--lr", "--lr=1", "-x", "--", "3"),
        ]
    ),
    max_size=8,
)


@given(words=TORCHRUN_WORDS)
def test_torchrun_reads_the_same(words: list[str]):
    parser = run.get_args_parser()
    parser.set_defaults(**dict.fromkeys(vars(parser.parse_args(["t.py"])), None))
    try:
        told = theirs(parser, words)
    except Refused:
        told = None
    try:
        ours = read_flags(torchrun.FLAGS, words)
    except JobLineError:
        assert told is None
        return
    if told is None:  # numbers are looked at later; a flag of another torch is passed over
        assert ours.notes or {"node_rank", "max_restarts"} & set(ours.flags)
        return
    assert ours.script == told.training_script
    for name, value in vars(told).items():
        if name in ("training_script", "training_script_args"):
            continue
        said = ours.flags.get(name)
        assert (value in (None, False)) == (said is None), name
        if said and value is not True:
            assert str(value) == said.text


@given(text=st.text(alphabet="ab.-_:[]0129 %/", max_size=12))
def test_an_endpoint_is_read_as_torch_reads_it(text: str):
    try:
        host, port = torchrun.parse_endpoint(LineValue(text, "--rdzv_endpoint"))
    except JobLineError:
        with pytest.raises(ValueError, match="rendezvous endpoint"):
            utils.parse_rendezvous_endpoint(text, -1)
        return
    assert utils.parse_rendezvous_endpoint(text, -1) == (host, -1 if port is None else port)


@pytest.mark.parametrize("conf", ["", " ", "a=1", "a=1,b=2", "a", "a=", "=1", "a=1,", "a = b=c "])
def test_a_rendezvous_conf_is_read_as_torch_reads_it(conf: str):
    told = {"rdzv_conf": LineValue(conf, "--rdzv_conf")}
    try:
        found = torchrun._conf(told)
    except JobLineError:
        with pytest.raises(ValueError, match="rendezvous configuration"):
            utils._parse_rendezvous_config(conf)
        return
    assert found == utils._parse_rendezvous_config(conf)


@each_row("text", [*OF_DEEPSPEED, "nd0\tslots=1\n\n #x\n"])
def test_a_hostfile_is_read_as_deepspeed_reads_it(text: str):
    runner = pytest.importorskip("deepspeed.launcher.runner")
    try:
        entries = hostfile.parse(text, "hosts", of_deepspeed=True)
    except hostfile.HostfileError as error:
        if all(words not in str(error) for words in ("host name", "more than")):  # ssh, and size
            with pytest.raises(ValueError, match=r"[Hh]ostfile"):
                runner._parse_hostfile(text.splitlines())
        return
    found = {entry.destination: entry.slots for entry in entries}
    assert runner._parse_hostfile(text.splitlines()) == found


SLOTS = {"a": 2, "b": 1, "c": 3}
PARTS = st.builds(
    lambda host, slots: f"{host}:{','.join(map(str, slots))}" if slots else host,
    st.sampled_from("abcd"),
    st.lists(st.integers(0, 3), max_size=3),
)
FILTERS = st.lists(PARTS, min_size=1, max_size=3).map("@".join)


@given(
    flags=st.one_of(
        st.tuples(st.sampled_from(["include", "exclude"]), FILTERS).map(lambda pair: dict([pair])),
        st.fixed_dictionaries(
            {}, optional={"num_nodes": st.integers(-1, 4), "num_gpus": st.integers(-1, 4)}
        ),
    )
)
def test_the_filters_of_deepspeed(flags: dict[str, str | int], tmp_path_factory):
    runner = pytest.importorskip("deepspeed.launcher.runner")
    folder = tmp_path_factory.getbasetemp()
    (folder / "hosts").write_text("".join(f"{host} slots={n}\n" for host, n in SLOTS.items()))
    words = [f"--{name}={value}" for name, value in flags.items()]
    try:
        found = read(["deepspeed", "--hostfile=hosts", *words, "t.py"], {}, unsent(folder)).hosts
        left_out = False
    except JobLineError as error:
        found, left_out = (), "leaves out" in str(error)
    try:
        active = runner.parse_inclusion_exclusion(
            dict(SLOTS), flags.get("include", ""), flags.get("exclude", "")
        )
        numbers = flags.get("num_nodes", -1), flags.get("num_gpus", -1)
        if numbers != (-1, -1):
            limited = getattr(runner, "apply_num_nodes_and_gpus", None)
            assume(limited is not None)  # before 0.19, within its main()
            active = limited(active, *numbers)
    except ValueError as error:
        assume("not in list" not in str(error))  # 0.14: what is excluded twice
        active = {}
    if left_out:  # 0.15.2 to 0.19.6
        wanted = {part.partition(":")[0] for part in str(flags["include"]).split("@")}
        assert set(active) < wanted
        return
    assert {entry.name: entry.slots for entry in found} == {
        host: len(slots) for host, slots in active.items()
    }
    assert [entry.name for entry in found] == list(active)
