"""`--help` as a manual page: complete, within 80 columns, and with examples that can be typed."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Iterator

import click
import pytest

from nccl_doctor import registry
from nccl_doctor.cli import cli
from nccl_doctor.cli.help import Example
from nccl_doctor.cli.options import grouped
from nccl_doctor.report.formats import formats
from tests.cli.program import program
from tests.ranks.ranks import free_port
from tests.support.rows import each_row


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command, with the words behind `nccl-doctor`."""
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, *path, name)


COMMANDS = dict(commands(cli))
EXAMPLES = [
    (path, example)
    for path, command in COMMANDS.items()
    for example in getattr(command, "examples", ())
]
every_command = each_row("path", COMMANDS)
every_example = each_row(("path", "example"), EXAMPLES)


def words_of(example: Example) -> list[str]:
    """What stands behind `nccl-doctor` or `-m nccl_doctor`, without what is for the shell."""
    line = re.split(r" [|>] ", example.line.replace("\\\n", " "))[0]
    words = shlex.split(line)
    at = next(i for i, word in enumerate(words) if word in ("nccl-doctor", "nccl_doctor"))
    return words[at + 1 :]


# --- the page ---


@every_command
def test_every_command_says_what_it_does_and_shows_how(path):
    help_ = program(*path, "--help", env={"COLUMNS": "80"})
    assert help_.returncode == 0
    assert max(map(len, help_.stdout.splitlines())) <= 80
    assert help_.stdout.startswith(f"Usage: {' '.join(['nccl-doctor', *path])} [OPTIONS]")
    assert "\nExamples:\n" in help_.stdout
    if path != ("report",):
        assert "\nExit codes:\n  0  " in help_.stdout
    for example in COMMANDS[path].examples:
        for line in example.line.splitlines():
            assert f"    {line}\n" in help_.stdout
    if isinstance(COMMANDS[path], click.Group):
        listed = help_.stdout.partition("\nCommands:\n")[2].partition("\n\n")[0]
        assert "..." not in listed, "a short_help is too long"


@every_command
def test_every_option_has_a_place_and_words(path):
    options = [p for p in COMMANDS[path].params if isinstance(p, click.Option) and not p.hidden]
    for option in options:
        assert option.help or option.name == "version", option.name
    if len(options) > 8:
        assert "Other options" not in dict(grouped([option.name for option in options]))


def test_every_format_is_described():
    options = {param.name: param for param in COMMANDS["run",].params}
    for name in formats():
        assert not options[name].help.endswith(f" as {name}."), "a word for it is missing"


def test_every_exit_code_of_run_is_told():
    assert set(COMMANDS["run",].exits) == {0, 1, 2, 3}


# --- the examples ---


@every_example
def test_every_example_is_about_its_command_and_parses(path, example):
    words = words_of(example)
    if path:
        assert tuple(words[: len(path)]) == path
    command, given = cli, words
    while isinstance(command, click.Group):
        command, given = command.commands[given[0]], given[1:]
    if "--" in given:
        given = given[: given.index("--")]
    # A command keeps the help option of its first context.
    context = click.Context(command, info_name=command.name, **cli.context_settings)
    values, left, order = command.make_parser(context).parse_args(list(given))
    assert left == []
    for param in order:
        value = values[param.name]
        if value not in (None, True) and not isinstance(param.type, click.Path):
            value = "1" if value == "$NODE_RANK" else value
            param.type_cast_value(context, value)
    if isinstance(values.get("select"), str):
        registry.load(values["select"].split(","))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real report of this machine."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    options = ("--select", "interfaces,limits,ranks", "--master-port", str(free_port()))
    done = program("run", *options, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return path.read_text(encoding="utf-8")


def what_is_typed(path: tuple[str, ...], example: Example) -> bool:
    """Whether it can be typed as it is: it needs no cluster."""
    return (
        path[:1] == ("report",)
        or "explain" in example.line
        or path in (("checks",), ("schema",), ("completion",))
    )


@pytest.mark.parametrize(
    ("path", "example"),
    [pytest.param(*each, id=each[1].what) for each in EXAMPLES if what_is_typed(*each)],
)
def test_examples_that_need_no_cluster_do_what_they_say(path, example, report, tmp_path):
    for folder in ("views", "past"):
        (tmp_path / folder).mkdir()
    (tmp_path / "nccl.log").write_text("NCCL INFO\n")
    for name in ("report.json", "report.node1.json", "monday.json", "views/node0.json"):
        (tmp_path / name).write_text(report)
    (tmp_path / "report.json.gz").write_bytes(gzip.compress(report.encode()))
    here = json.loads(report)["hosts"][0]["host"]
    words = [
        str(found)
        for word in words_of(example)
        for found in sorted(tmp_path.glob(word)) or [here if word == "gpu07" else word]
    ]
    done = program(*words, cwd=tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout
