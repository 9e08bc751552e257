"""Who may import whom, what every check shows to people, and what the wheel holds."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from nccl_doctor import registry
from nccl_doctor.cli import cli
from nccl_doctor.model.kinds import ENGINE_KINDS, HISTORY_KINDS, REMOTE_KINDS
from nccl_doctor.report import manual

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "nccl_doctor"
ENGINE_FILES = sorted(ENGINE.rglob("*.py"))
CHECK_FILES = sorted(path for path in (ROOT / "checks").glob("*.py") if path.stem != "__init__")
BUILT_IN = [
    check for check in registry.load().checks if check.name in {p.stem for p in CHECK_FILES}
]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- the arrows ---


def imports(node: ast.AST, package: str, late: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether only a function imports it) for every import below a node.

    `from a import b` gives `a.b` too: b may be a module.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parents = package.split(".")
            above = parents[: len(parents) - child.level + 1] if child.level else []
            module = ".".join([*above, *([child.module] if child.module else [])])
            yield module, late
            yield from ((f"{module}.{alias.name}", late) for alias in child.names)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(child, package, late or inside)


def imports_of(path: Path) -> set[tuple[str, bool]]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    if path.parent.name == "checks":
        package = "nccl_doctor.checks"
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), package))


def of(module: str, *packages: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def test_the_reader_of_imports():
    source = """
import os.path
from nccl_doctor import checks
from . import sibling
from ..verdict import place
if TYPE_CHECKING:
    import torch
class A:
    def f(self):
        import subprocess
"""
    found = set(imports(ast.parse(source), "nccl_doctor.report"))
    assert {
        ("os.path", False),
        ("nccl_doctor.checks", False),
        ("nccl_doctor.report.sibling", False),
        ("nccl_doctor.judge.place", False),
        ("torch", False),
        ("subprocess", True),
    } <= found
    assert ("subprocess", False) not in found


@pytest.mark.parametrize("path", CHECK_FILES, ids=named)
def test_a_check_imports_the_api_and_the_standard_library(path: Path):
    # The API alone, so that a third party's check can look the same; what is heavy or starts
    # processes only when it observes, so that judging a saved report needs none of it.
    for module, late in imports_of(path):
        if of(module, "torch", "pynvml", "subprocess"):
            assert late, f"{module} at module level"
        elif not of(module, "nccl_doctor.api"):
            assert module.split(".")[0] in sys.stdlib_module_names, module


@pytest.mark.parametrize("path", ENGINE_FILES, ids=named)
def test_the_engine_knows_no_check_and_only_the_command_line_knows_renderers(path: Path):
    modules = {module for module, _ in imports_of(path)}
    others = ("nccl_doctor.checks", "checks", "nccl_doctor.api")
    assert not [module for module in modules if of(module, *others)]
    renders = named(path).startswith("nccl_doctor/report/")
    if path.parent.name != "cli" and not renders and named(path) != "nccl_doctor/report/output.py":
        assert not [module for module in modules if of(module, "nccl_doctor.report")]
    if path.parent.name != "cli" and named(path) != "nccl_doctor/__main__.py":
        assert not [module for module in modules if of(module, "nccl_doctor.cli")]
    if path.parent.name != "cli":
        assert not [module for module in modules if of(module, "nccl_doctor.report.output")]
    if path.parent.name not in ("cli", "fleet"):
        fleet = {module for module in modules if module.startswith("nccl_doctor.launch.ssh.")}
        assert all(of(module, "nccl_doctor.launch.ssh.hostfile") for module in fleet)


@pytest.mark.parametrize("path", sorted((ENGINE / "tools").rglob("*.py")), ids=named)
def test_a_tool_knows_the_records_alone(path: Path):
    known = ("tools", "model", "cluster", "redact", "contract", "job")
    for module, _ in imports_of(path):
        assert not of(module, "nccl_doctor") or of(module, *(f"nccl_doctor.{k}" for k in known))


TOUCHING = {  # rooms of tools that judge, and what in them touches the system
    "binding": {"deepspeed"},
    "deepspeed": {"host"},
    "gpu": {"apart", "fabricmanager", "fields", "gather", "kernlog", "nvml"},
    "groups": {"exercise", "forming", "making", "recorder", "witness"},
    "history": {"reading"},
    "isolation": set(),
    "mesh": {"build"},
    "sidegroup": {"meeting"},
    "speed": {"stopwatch"},
    "timeouts": {"gather"},
}
PURE = [
    path
    for path in ENGINE_FILES
    if path.parent.name in ("verdict", "report", "formats", "page", "pseudonyms")
    or path.stem
    in (
        *("model", "cluster", "blame", "kinds", "silence", "record", "launch", "launchers"),
        *("matrix", "profiles"),
    )
    or path.stem not in TOUCHING.get(path.parent.name, {path.stem})
]


@pytest.mark.parametrize("path", PURE, ids=named)
def test_what_judges_and_renders_touches_nothing(path: Path):
    impure = ("os", "time", "subprocess", "socket", "random", "datetime", "torch", "psutil")
    assert not [module for module, _ in imports_of(path) if of(module, *impure)]


OPENS = {  # modules outside of tools that open files themselves
    "files": "the door to those of the user",
    **dict.fromkeys(("bundle", "output", "views"), "in a child, by errands.send"),
    **dict.fromkeys(("child", "identity"), "/proc, which always answers"),
    **dict.fromkeys(
        ("report/formats/html", "report/issue", "cli/pages"), "what is shipped with the program"
    ),
    "streams": "stdout and stderr",
}
NO_FILE = ("os", "tarfile", "formatter")
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}


@pytest.mark.parametrize(
    "path", [path for path in ENGINE_FILES if "tools" not in path.parts], ids=named
)
def test_files_of_the_user_are_opened_at_the_door(path: Path):
    """Their disk may never answer, and nothing that is waited for may wait for it."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id == "open":
            lines.append(node.lineno)
        elif isinstance(called, ast.Attribute) and called.attr in OPENING:
            lines += [node.lineno] * (ast.unparse(called.value) not in NO_FILE)
    why = OPENS.get(path.relative_to(ENGINE).with_suffix("").as_posix())
    if why is None:
        assert not lines
    elif "errands" in why:
        assert "nccl_doctor.toolkit.errands" in {module for module, _ in imports_of(path)}


# --- what a check shows to people ---

HEADINGS = ["What it checks", "Why it matters", "How to fix", "When it is wrong", "References"]


@pytest.mark.parametrize("path", CHECK_FILES, ids=named)
def test_the_page_of_a_check(path: Path):
    page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    question, *rest = page.splitlines()
    assert question.endswith("?")
    assert [line for line in rest if line in HEADINGS] == HEADINGS
    for text in re.split("|".join(f"^{heading}$" for heading in HEADINGS), page, flags=re.M)[1:]:
        assert text.strip("-\n ")


def test_every_file_of_a_check_is_a_check():
    assert not registry.load().problems
    assert [check.name for check in BUILT_IN] != []
    assert {check.name for check in BUILT_IN} == {path.stem for path in CHECK_FILES}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, check.name) for check in BUILT_IN for kind in check.kinds]
    + [(kind, "the engine itself") for kind in (*ENGINE_KINDS, *REMOTE_KINDS, *HISTORY_KINDS)],
    ids=lambda value: value if isinstance(value, str) else value.code,
)
def test_every_kind_is_explained(kind, name):
    for words in (kind.title, kind.why, kind.fix):
        assert words.strip() == words != ""
    assert not kind.title.endswith(".")
    page = CliRunner().invoke(cli, ["explain", kind.code])
    assert page.exit_code == 0
    said = " ".join(page.output.split())  # lines are broken for a terminal
    for words in (kind.code, kind.title, kind.why, kind.fix, name):
        assert " ".join(manual.shown(words).split()) in said
    for check in BUILT_IN:
        if check.name == name:
            assert manual.check_page(check) in page.output


# --- what is shipped ---


def packages_of_the_tree() -> set[str]:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in ENGINE.rglob("__init__.py")}
    return found | {"nccl_doctor.checks"}


def test_the_list_of_packages_is_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_of_the_tree()


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the source tree keeps no traces."""
    source = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("nccl_doctor", "checks"):
        shutil.copytree(ROOT / folder, source / folder, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, str(source / "dist"), cwd=source)
    (file,) = (source / "dist").glob("*.whl")
    return file


def test_the_wheel_holds_every_check_and_all_data(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (
        *ENGINE_FILES,
        *ENGINE.rglob("*.json"),
        *ENGINE.rglob("*.toml"),
        *ENGINE.rglob("*.md"),
        *(ENGINE / "report").rglob("*.[cj]s*"),
        ENGINE / "py.typed",
    ):
        assert named(path) in names
    held = {name for name in names if name.startswith("nccl_doctor/checks/")}
    assert held == {f"nccl_doctor/{named(path)}" for path in (ROOT / "checks").glob("*.py")}
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nccl_doctor"}


def test_the_wheel_runs_from_anywhere(wheel: Path, tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    run(*pip, "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel), cwd=tmp_path)
    there = "import nccl_doctor.checks; print(nccl_doctor.checks.__file__)"
    env = {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    path = run(sys.executable, "-c", there, cwd=Path("/"), **env).strip()
    assert path == str(tmp_path / "nccl_doctor/checks/__init__.py")
    table = run(sys.executable, "-m", "nccl_doctor", "checks", cwd=Path("/"), **env)
    for check in BUILT_IN:
        assert re.search(rf"^{check.name} ", table, re.M)
        for kind in check.kinds:
            assert kind.code in table
