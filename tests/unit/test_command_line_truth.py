"""Flags are read as the launchers themselves read them: held against those that are installed."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.launch.command_line import accelerate, deepspeed, torchrun
from nccl_doctor.launch.command_line.flags import FlagTable, read_flags
from nccl_doctor.launch.command_line.job_line import JobLineError, Said
from nccl_doctor.launch.command_line.reader import read
from tests.support.lazy import Lazy
from tests.support.unsent import unsent

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


def flags_of(parser: argparse.ArgumentParser, takes_value: bool) -> set[str]:
    return {
        name
        for action in parser._actions
        for name in action.option_strings
        if (action.nargs != 0) == takes_value and action.dest != "help"
    }


def known(table: FlagTable, takes_value: bool) -> set[str]:
    return {name for names in table.flags(takes_value).values() for name in names}


@pytest.fixture(scope="module")
def of_deepspeed() -> argparse.ArgumentParser:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    return parser_inside(runner.parse_args)


def test_every_flag_of_torchrun():
    parser = run.get_args_parser()
    old = parser_inside(launch.parse_args)
    for takes_value in (True, False):
        assert known(torchrun.FLAGS, takes_value) == flags_of(parser, takes_value)
        assert known(torchrun.LAUNCH_FLAGS, takes_value) == flags_of(old, takes_value)


def test_every_flag_of_deepspeed(of_deepspeed: argparse.ArgumentParser):
    for takes_value in (True, False):
        assert known(deepspeed.FLAGS, takes_value) == flags_of(of_deepspeed, takes_value)


def test_every_flag_of_accelerate():
    commands = pytest.importorskip("accelerate.commands.launch")
    parser = commands.launch_command_parser()
    ours = known(accelerate.FLAGS, True), known(accelerate.FLAGS, False)
    of_a_family = {
        name
        for name in flags_of(parser, True)
        if name[2:].replace("-", "_").startswith(accelerate.FLAGS.families)
    }
    assert flags_of(parser, True) - of_a_family <= ours[0]
    assert flags_of(parser, False) <= ours[1]
    assert not flags_of(parser, True) & ours[1]


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
        host, port = torchrun.parse_endpoint(Said(text, "--rdzv_endpoint"))
    except JobLineError:
        with pytest.raises(ValueError, match="rendezvous endpoint"):
            utils.parse_rendezvous_endpoint(text, -1)
        return
    assert utils.parse_rendezvous_endpoint(text, -1) == (host, -1 if port is None else port)


@pytest.mark.parametrize("conf", ["", " ", "a=1", "a=1,b=2", "a", "a=", "=1", "a=1,", "a = b=c "])
def test_a_rendezvous_conf_is_read_as_torch_reads_it(conf: str):
    told = {"rdzv_conf": Said(conf, "--rdzv_conf")}
    try:
        found = torchrun._conf(told)
    except JobLineError:
        with pytest.raises(ValueError, match="rendezvous configuration"):
            utils._parse_rendezvous_config(conf)
        return
    assert found == utils._parse_rendezvous_config(conf)


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
    except JobLineError:
        found = ()
    try:
        active = runner.parse_inclusion_exclusion(
            dict(SLOTS), flags.get("include", ""), flags.get("exclude", "")
        )
        active = runner.apply_num_nodes_and_gpus(
            active, flags.get("num_nodes", -1), flags.get("num_gpus", -1)
        )
    except ValueError:
        active = {}
    assert {entry.name: entry.slots for entry in found} == {
        host: len(slots) for host, slots in active.items()
    }
    assert [entry.name for entry in found] == list(active)
