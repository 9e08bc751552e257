"""The configuration file, good and bad."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nccl_doctor.cli.config import OPTIONS, ConfigError, load


def write(folder: Path, text: str, name: str = "nccl-doctor.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_no_file_is_no_configuration(tmp_path):
    assert load(None, tmp_path).values == {}


def test_every_option_and_section(tmp_path):
    write(
        tmp_path,
        """
        nnodes = 1
        node-rank = 0
        nproc-per-node = "gpu"
        master-addr = "head"
        master-port = 29501
        hostfile = "hosts"
        topology = "net.conf"
        backend = "gloo"
        level = "quick"
        with-dcgm = 2
        hold-idle = 300
        paths = ["/ckpt", "/data:ro"]
        endpoints = ["head:8265"]
        reach = ["https://hub"]
        init_method = "file:///shared/init"
        mesh = "dp=2,tp=4"
        groups = "many"
        deepspeed-config = "ds.json"
        expect-load-seconds = 900
        select = ["ranks", "port"]
        ignore = "dns-slow"
        timeout = 30
        join_timeout = 10.5
        collective-timeout = 5
        json = "out.json"
        html = "out.html"
        junit = "out.xml"
        markdown = "out.md"
        prometheus = "out.prom"
        termination = "message"
        github = true
        output-dir = "views"
        baseline = "past"
        key = "secret"
        exit-profile = "nagios"
        redact = true
        redact-key = "key"
        strict = true
        quiet = false
        verbose = 1
        [expected]
        gpus-per-host = 8
        """,
    )
    found = load(None, tmp_path).values
    assert set(found) == {name.replace("-", "_") for name in OPTIONS} | {"expected"}
    assert found["join_timeout"] == 10.5
    assert found["select"] == ["ranks", "port"]
    assert found["expected"] == {"gpus_per_host": 8}


def test_pyproject(tmp_path):
    write(tmp_path, "[project]\nname = 'x'\n[tool.nccl-doctor]\nstrict = true\n", "pyproject.toml")
    assert load(None, tmp_path).values == {"strict": True}
    write(tmp_path, "quiet = true")
    assert load(None, tmp_path).values == {"quiet": True}, "the file of our own wins"


@pytest.mark.parametrize("text", ["[project]\nname = 'x'", "not toml at all ["])
def test_a_pyproject_that_is_not_about_us_is_left_alone(tmp_path, text):
    write(tmp_path, text, "pyproject.toml")
    assert load(None, tmp_path).values == {}


def test_a_named_file(tmp_path):
    file = write(tmp_path, "strict = true", "site.toml")
    assert load(str(file), "/") == ({"strict": True}, str(file), ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("timout = 3", 'unknown key "timout"; did you mean "timeout"?'),
        ("zzz = 3", 'unknown key "zzz"; known: nnodes,'),
        ("mesch = 'dp=2'", 'unknown key "mesch"; did you mean "mesh"?'),
        ("timeout = '3'", "timeout is '3', not a number"),
        ("timeout = true", "timeout is True, not a number"),
        ("nnodes = 1.5", "nnodes is 1.5, not a whole number"),
        ("nproc-per-node = 1.5", "nproc-per-node is 1.5, not a whole number or a string"),
        ("strict = 1", "strict is 1, not true or false"),
        ("select = [1]", "select is [1], not a string or a list of strings"),
        ("json = 3", "json is 3, not a string"),
        ("expected = 3", "expected is not a table; write [expected]"),
        ("[expected]\ngpu-per-host = 8", 'unknown key "expected.gpu-per-host"; did you mean'),
        ("[expected]\ngpus-per-host = 'x'", "expected.gpus-per-host is 'x', not a whole number"),
        ("[thresholds]\nx = 1", 'unknown key "thresholds"'),
        ("timeout =", "is not TOML"),
    ],
)
def test_bad_files(tmp_path, text, words):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        load(None, tmp_path)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*no.toml: No such file"):
        load(str(tmp_path / "no.toml"), tmp_path)
    with pytest.raises(ConfigError, match="Is a directory"):
        load(str(tmp_path), tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"json = '\xe9'")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load(str(tmp_path / "latin.toml"), tmp_path)
    file = write(tmp_path, "[tool.other]", "pyproject.toml")
    with pytest.raises(ConfigError, match=r"has no table \[tool.nccl-doctor\]"):
        load(str(file), tmp_path)
    write(tmp_path, "tool.nccl-doctor = 3", "pyproject.toml")
    with pytest.raises(ConfigError, match=r"tool.nccl-doctor is not a table"):
        load(None, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_what_another_user_wrote_is_left_out_and_said(tmp_path):
    write(tmp_path, "strict = true", "pyproject.toml")  # not about us: nobody asks whose it is
    theirs = write(tmp_path, "json = 'x'")
    for path in tmp_path.iterdir():
        os.chown(path, 65533, 65533)
    found = load(None, tmp_path)
    assert (found.values, found.file) == ({}, "")
    (line,) = found.left_out
    assert line == (
        f"{theirs} is left out: nccl-doctor.toml belongs to another user (uid 65533); "
        "--config nccl-doctor.toml uses it all the same"
    )
    assert load(str(theirs), "/").values == {"json": "x"}, "somebody named it"
    write(tmp_path, "[tool.nccl-doctor]\nstrict = true\n", "pyproject.toml")
    os.chown(tmp_path / "pyproject.toml", 0, 0)
    found = load(None, tmp_path)
    assert (found.values, len(found.left_out)) == ({"strict": True}, 1)
