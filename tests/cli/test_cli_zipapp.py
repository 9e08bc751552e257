"""The one file, and what is done with it where there is no torch. Real ranks: tests/ranks."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest

from nccl_doctor import __version__
from tests.cli.program import error_of, program
from tests.support import many_calls
from tests.support.zipapp import ROOT, build, built, make_venv, make_zipapp, run

pytestmark = pytest.mark.xdist_group("zipapp")  # built once
Done = CompletedProcess[str]
PLUG_IN = ROOT / "docs" / "examples" / "nccl-doctor-hello" / "nccl_doctor_hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zipapp")


@pytest.fixture(scope="module")
def pyz(folder: Path) -> Path:
    return built(folder / "shared" / "nccl-doctor.pyz")


@pytest.fixture(autouse=True)
def nothing_beside(pyz: Path) -> Iterator[None]:
    """It may lie in a folder that is read-only."""
    yield
    assert list(pyz.parent.iterdir()) == [pyz]


@pytest.fixture(scope="module")
def python(folder: Path) -> Path:
    """One that has nothing but the standard library."""
    return make_venv(folder / "venv")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zipping", ROOT / "scripts" / "make_zipapp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- what it is ---


def test_two_builds_give_the_same_bytes(pyz: Path, folder: Path) -> None:
    assert build(folder / "again.pyz").read_bytes() == pyz.read_bytes()
    assert pyz.stat().st_mode & 0o777 == 0o755


def test_it_holds_what_a_wheel_would_and_what_that_requires(pyz: Path) -> None:
    held = zipfile.ZipFile(pyz)
    names = held.namelist()
    tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "nccl_doctor").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    tree |= {
        f"nccl_doctor/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "checks").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert {name for name in names if name.startswith("nccl_doctor/")} == tree
    ours = {"nccl_doctor", "__main__.py", "LICENSE", "carried"}
    ours |= {"zipapp_once.py", "zipapp_psutil.py"}
    others = {name.split("/")[0] for name in names} - ours
    assert others == {"click", "tabulate", "tomli", "pynvml.py", "licences"}
    for name in ("click", "psutil", "tabulate", "tomli"):
        folder = f"licences/{name}-{pinned_version(name)}"
        assert any(each.startswith(f"{folder}/LICENSE") for each in names), name
    assert not [name for name in names if name.endswith(".pyc")]


def test_it_carries_psutil_for_two_processors(pyz: Path) -> None:
    held = zipfile.ZipFile(pyz)
    carried = {name for name in held.namelist() if name.startswith("carried/")}
    compiled = {name: held.read(name) for name in carried if name.endswith(".so")}
    machine = {name: int.from_bytes(data[18:20], "little") for name, data in compiled.items()}
    assert machine == {  # e_machine of ELF: EM_X86_64, EM_AARCH64
        "carried/x86_64/_psutil_linux.abi3.so": 62,
        "carried/aarch64/_psutil_linux.abi3.so": 183,
    }
    assert "carried/psutil/__init__.py" in carried


def pinned_version(name: str) -> str:
    pinned = re.search(rf"^{name}==(.*)$", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


def test_a_wheel_that_is_another_one_or_cannot_be_had_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia_ml_py-1-py3-none-any.whl").write_bytes(b"another")
    with pytest.raises(script.Refused, match=r"SHA-256 [0-9a-f]+, make_zipapp\.py says 959b"):
        script.wheel_of(tmp_path, "nvidia-ml-py", "1", "any")
    with pytest.raises(script.Refused, match=r"never-was: make_zipapp\.py has no SHA-256 of it"):
        script.files_of(tmp_path, "never-was", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(script.Refused, match=r"psutil 1 for aarch64: .*No matching distribution"):
        script.wheel_of(tmp_path, "psutil", "1", "aarch64")
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia_ml_py-1-py3-none-any.whl"]


def test_its_size_is_what_the_page_says(pyz: Path) -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert f"`dist/nccl-doctor.pyz`, {pyz.stat().st_size / 1e6:.0f} MB:" in page


def test_no_half_file_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken.pyz").mkdir()
    (tmp_path / "file").touch()
    for target in (tmp_path / "taken.pyz", tmp_path / "file" / "x.pyz"):
        done = make_zipapp(target)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"zipapp: \[Errno \d+\] .*\n", done.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.pyz"]


def test_make_runs_the_script() -> None:
    """With a Python and pip: no linters, tests or tools for documents are installed for it."""
    done = run(
        "make", "--dry-run", "--no-print-directory", "-C", ROOT, "VENV=/dev/null/venv", "zipapp"
    )
    assert done.returncode == 0, done
    made, stamped, zipped = done.stdout.splitlines()
    assert "scripts/make_venv.sh" in made
    assert stamped == "touch /dev/null/venv/.python"
    assert zipped == "/dev/null/venv/bin/python scripts/make_zipapp.py"


# --- without torch ---


def test_it_starts_by_python_and_by_itself(python: Path, pyz: Path, tmp_path: Path) -> None:
    path = {"PATH": f"{python.parent}:/usr/bin:/bin"}
    named = shutil.copy(pyz, tmp_path / "nccl-doctor")
    for words in ([python, pyz], [python, "-I", pyz], [python, named], [pyz], [named]):
        done = run(*words, "--version", cwd=tmp_path, env=path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"nccl-doctor {__version__}\n"


def test_an_old_python_is_told_so(pyz: Path) -> None:
    # A newer one that takes itself for 3.9; what stands in __main__ is written for both.
    code = f"import runpy, sys; sys.version_info = (3, 9, 1); runpy.run_path({str(pyz)!r})"
    line = error_of(run(sys.executable, "-c", code))
    assert line == f"Python 3.10 or newer is needed; this is 3.9, {sys.executable}"


def test_a_wrong_option_is_one_line(python: Path, pyz: Path) -> None:
    assert "--wordl-size" in error_of(run(python, pyz, "run", "--wordl-size", "2"))


SAME = ("explain peer-blocked", "schema", "checks")
ISSUE = "report issue pytorch report.json"
VERSION = "--version -v"
JUDGE = "report judge --json - --html page.html report.json"
IMPORTS = """
import runpy

compiled = []
sys.addaudithook(lambda event, about: event == "compile" and compiled.append(str(about[1])))
sys.path.insert(0, {pyz!r})
import zipapp_once

zipapp_once.compile_once()
import zipapp_psutil

zipapp_psutil.carry()
import nccl_doctor.judge.conclusion, nccl_doctor.report.formats.html, nccl_doctor.report.issue
from nccl_doctor import cli, registry

registry.load()
del sys.path[0]
with open("compiled.json", "w") as file:
    json.dump(compiled, file)
"""


@dataclass(frozen=True)
class Answers:
    """What the file says: `env`, started as a user starts it, and the report that this wrote; and
    calls from one start of Python, in whose children it finds its modules imported. `compiled` are
    files that this one compiled.
    """

    env: Done
    report: dict[str, Any]
    calls: dict[str, Done]
    page: str
    compiled: list[str]


@pytest.fixture(scope="module")
def answers(python: Path, pyz: Path, folder: Path) -> Answers:
    here, temporary = folder / "answers", folder / "temporary"
    here.mkdir()
    temporary.mkdir()
    told = {"NCCL_DEBGU": "INFO", "TMPDIR": str(temporary)}
    env = run(python, pyz, "env", "--json", "report.json", env=told, cwd=here)
    assert list(temporary.iterdir()) == []
    words = [call.split() for call in (*SAME, VERSION, ISSUE, JUDGE)]
    code = many_calls.code(
        IMPORTS.format(pyz=str(pyz)), f"runpy.run_path({str(pyz)!r}, run_name='__main__')"
    )
    done = run(python, "-c", code, json.dumps(words), cwd=here, env={"COLUMNS": "100"})
    calls = {" ".join(ended.args): ended for ended in many_calls.ended(words, done)}
    report, page = ((here / name).read_text() for name in ("report.json", "page.html"))
    compiled = json.loads((here / "compiled.json").read_text())
    return Answers(env, json.loads(report), calls, page, compiled)


@pytest.mark.parametrize("call", SAME)
def test_it_says_what_the_module_says(call: str, answers: Answers) -> None:
    done = answers.calls[call]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == program(*call.split(), env={"COLUMNS": "100"}).stdout


def test_the_version_in_full_says_that_it_is_one_file(answers: Answers, pyz: Path) -> None:
    own, python, torch, *_ = answers.calls[VERSION].stdout.splitlines()
    assert own == f"nccl-doctor {__version__} (one file: {pyz})"
    assert python.startswith("python 3.")
    assert torch == "torch not installed"


def test_what_lies_beside_the_code_is_read(answers: Answers) -> None:
    """Tables, style sheet, issue form; and facts by the psutil that it carries: `env` fails on no
    check, and leaves nothing.
    """
    read = answers.report
    found = {finding["code"] for finding in read["findings"]}
    assert {"torch-missing", "env-unknown-variable"} <= found, answers.env
    assert not found & {"check-broke", "check-unusable"}
    status = {check["name"]: check["status"] for check in read["checks"]}
    assert status["interfaces"] == "pass"
    assert "### " in answers.calls[ISSUE].stdout
    assert "<style>" in answers.page
    judged = answers.calls[JUDGE]
    again = json.loads(judged.stdout)
    assert judged.returncode == answers.env.returncode == again["exit_code"]
    assert [f["code"] for f in again["findings"]] == [f["code"] for f in read["findings"]]


def test_each_module_is_compiled_once(answers: Answers, pyz: Path) -> None:
    ours = Counter(file for file in answers.compiled if file.startswith(f"{pyz}/nccl_doctor/"))
    assert f"{pyz}/nccl_doctor/checks/links/__init__.py" in ours
    assert f"{pyz}/nccl_doctor/judge/conclusion.py" in ours
    assert set(ours.values()) == {1}


REFUSED = """
def memfd_create(name, flags=0):
    raise PermissionError(13, "Permission denied")
os.memfd_create = memfd_create
"""
IMPORT = """
import os, sys
{before}
sys.path.insert(0, {pyz!r})
import zipapp_psutil
zipapp_psutil.carry()
assert "psutil" not in sys.modules
import psutil
works = psutil.Process().ppid() == os.getppid()
print(psutil.__file__, os.listdir(os.environ["TMPDIR"]), works, flush=True)
print([os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")
       if int(fd) > 2 and os.path.lexists(f"/proc/self/fd/{{fd}}")], flush=True)
if os.fork() == 0:
    print(bool(psutil.net_if_addrs()), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("before", ["", REFUSED])
def test_what_is_compiled_is_loaded_and_gone(
    before: str, python: Path, pyz: Path, tmp_path: Path
) -> None:
    """From memory; where the system refuses that, from a folder of this user alone."""
    code = IMPORT.format(before=before, pyz=str(pyz))
    done = run(python, "-c", code, env={"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    said, opened, child = done.stdout.splitlines()
    assert said == f"{pyz}/carried/psutil/__init__.py [] True"
    assert "memfd" not in opened
    assert child == "True"


def test_the_psutil_that_is_installed_comes_first(pyz: Path, folder: Path, tmp_path: Path) -> None:
    python = make_venv(folder / "with-psutil", ["psutil"])
    code = IMPORT.format(before="", pyz=str(pyz))
    done = run(python, "-c", code, env={"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert str(pyz) not in done.stdout


ELSEWHERE = "import platform\nplatform.machine = lambda: 'riscv64'"
EXPLAIN = """
import runpy, sys
{before}
sys.argv = ["nccl-doctor", "explain", "dataset-missing"]
runpy.run_path({pyz!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def explained(python: Path, pyz: Path, folder: Path) -> Done:
    """What the file says of a plug-in, without psutil. The plug-in is installed as pip leaves it:
    the module, and a folder with its entry points.
    """
    site = folder / "plug-in"
    shutil.copytree(PLUG_IN, site / PLUG_IN.name)
    info = site / "nccl_doctor_hello-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: nccl-doctor-hello\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[nccl_doctor.checks]\ndataset_folder = nccl_doctor_hello.dataset_folder\n"
    )
    code = EXPLAIN.format(before=ELSEWHERE, pyz=str(pyz))
    return run(python, "-c", code, env={"PYTHONPATH": str(site)})


def test_a_processor_that_it_has_nothing_for_is_left_to_what_is_installed(
    python: Path, pyz: Path, tmp_path: Path, explained: Done
) -> None:
    code = IMPORT.format(before=ELSEWHERE, pyz=str(pyz))
    done = run(python, "-c", code, env={"TMPDIR": str(tmp_path)})
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'psutil'"
    assert (explained.returncode, explained.stderr) == (0, "")


def test_a_plug_in_is_found(explained: Done) -> None:
    assert explained.returncode == 0, explained
    assert "DATASET_DIR" in explained.stdout


def test_a_child_reads_the_metadata_of_all_that_is_installed(pyz: Path, python: Path) -> None:
    """As torch 2.15 does in init_process_group. Python's metadata keeps an archive open, which a
    forked child closes with all files.
    """
    code = f"""
import os, sys
sys.path[:0] = [{str(pyz)!r}, {str(pyz / "carried")!r}]
from importlib import metadata
from nccl_doctor.system.forks import close_others
metadata.entry_points()
close_others([])
others = [os.open("/dev/zero", os.O_RDONLY) for _ in range(9)]  # get the numbers of the closed
names = [each.metadata["Name"] for each in metadata.distributions()]
print(names, len(metadata.entry_points(group="x")))
"""
    done = run(python, "-c", code)
    assert (done.returncode, done.stdout) == (0, "[] 0\n"), done
