"""The man page: every command and option, in roff that the formatters take."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man_page", ROOT / "scripts/man_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_and_every_option_of_it_stands_there(script: ModuleType) -> None:
    page = script.page().replace("\\-", "-").replace("\\(dq", '"')
    for context in script.contexts(script.cli, None, script.PROGRAM):
        if context.parent is None:
            continue
        section = page.partition(f'.SH "{context.command_path.upper()}"\n')[2].partition(".SH")[0]
        assert section, context.command_path
        shown = [p for p in context.command.params if isinstance(p, click.Option) and not p.hidden]
        for option in shown:
            assert re.search(rf"^\.B .*{option.opts[0]}\b", section, re.MULTILINE), option.opts[0]


def test_nothing_in_a_text_is_taken_for_roff(script: ModuleType) -> None:
    assert script._plain(".TH x") == "\\&.TH x"
    assert script._plain("'x' a\\b -c") == "\\(aqx\\(aq a\\eb \\-c"
    page = script.page()
    assert page.isascii()
    wrong = [
        line
        for line in page.splitlines()
        if re.match(r"'|\.(?!TH|SH|SS|PP|TP|B |br|nf|fi|R[SE])", line)
    ]
    assert not wrong


@pytest.mark.parametrize("formatter", ["groff", "mandoc"])
def test_a_formatter_takes_it_without_a_word(
    formatter: str, script: ModuleType, tmp_path: Path
) -> None:
    if shutil.which(formatter) is None:
        pytest.skip(f"{formatter} is not installed here")
    page = tmp_path / "nccl-doctor.1"
    assert script.main([str(page)]) == 0
    options = ("-man", "-Tascii", "-ww") if formatter == "groff" else ("-Tascii", "-Wwarning")
    done = subprocess.run(
        [formatter, *options, page], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(r".\x08|\x1b\[[0-9;]*m", "", done.stdout)
    assert "--master-addr HOST" in text
    assert "nccl-doctor run -- deepspeed train.py" in text
