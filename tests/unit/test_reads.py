"""Checks say whose facts they read (`reads`), and nobody else knows a check by name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints, is_typeddict

from tests.support.checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
TOOLKIT = "nccl_doctor.toolkit"
_READERS = ("facts", "evidence", "ended", "facts_on", "evidence_on")

ALSO_WORDS = {
    "deepspeed_config",
    "endpoints",
    "environment",
    "firewall",
    "groups",
    "init_method",
    "interfaces",
    "limits",
    "links",
    "master_addr",
    "memory",
    "paths",
    "port",
    "ranks",
    "rdma",
    "reach",
    "software",
    "timeouts",
}
"""Names of checks that are words of the report, of options or of commands as well."""


@dataclass
class Module:
    """The top-level definitions of a module, and what its names mean: (module, name)."""

    name: str
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


def source_of(name: str) -> tuple[Path, bool]:
    """The file of a module, and whether it is a package."""
    at = (
        ROOT.joinpath("checks", *name.split(".")[2:])
        if name.startswith("nccl_doctor.checks")
        else ROOT.joinpath(*name.split("."))
    )
    folder = at / "__init__.py"
    return (folder, True) if folder.is_file() else (at.with_suffix(".py"), False)


@cache
def module_of(name: str) -> Module | None:
    path, is_package = source_of(name)
    if not path.is_file():
        return None
    module = Module(name)
    for statement in ast.parse(path.read_text("utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            package = name if is_package else name.rpartition(".")[0]
            for _ in range(statement.level - 1):
                package = package.rpartition(".")[0]
            start = ".".join(filter(None, (package if statement.level else "", statement.module)))
            for each in statement.names:
                module.imported[each.asname or each.name] = (start, each.name)
        for word in defined_by(statement):
            module.defined.setdefault(word, []).append(statement)
    return module


def defined_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    if isinstance(statement, ast.AnnAssign):
        targets = (statement.target,)
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield node.id


def found_at(module: Module, word: str) -> tuple[Module, str] | None:
    """Where a name of a module is defined, in ours."""
    if word in module.defined:
        return module, word
    start, name = module.imported.get(word, ("", ""))
    other = module_of(start) if start.startswith("nccl_doctor.") else None
    return None if other is None else found_at(other, name)


def uses_of(module: Module, nodes: Iterable[ast.AST]) -> Iterator[tuple[Module, str]]:
    """Definitions that some code refers to, also those of a module that it imported whole."""
    for each in nodes:
        found = None
        if isinstance(each, ast.Name):
            found = found_at(module, each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            start, name = module.imported.get(each.value.id, ("", ""))
            whole = module_of(f"{start}.{name}") if start.startswith("nccl_doctor") else None
            found = found_at(whole, each.attr) if whole else None
        if found is not None:
            yield found


@cache
def reads_of(check: str) -> tuple[dict[str, set[str]], set[str]]:
    """What a check reads, and by what means.

    Returns: check → the definitions, as `module.name`, that read its facts, of the check and of all
    that it uses of the toolkit; and the modules that these are in.
    """
    start = f"nccl_doctor.checks.{check}"
    path, is_package = source_of(start)
    inner = sorted(path.parent.glob("[!_]*.py")) if is_package else []
    own = [start, *(f"{start}.{each.stem}" for each in inner)]
    modules = [module for each in own if (module := module_of(each))]
    todo = [(module, word) for module in modules for word in module.defined]
    seen: set[tuple[str, str]] = set()
    found: dict[str, set[str]] = {}
    while todo:
        module, word = todo.pop()
        if (module.name, word) in seen:
            continue
        seen.add((module.name, word))
        names, uses = in_definition(module.name, word)
        for name in names:
            found.setdefault(name, set()).add(f"{module.name}.{word}")
        todo += [each for each in uses if each[0].name in own or each[0].name.startswith(TOOLKIT)]
    return found, {name for name, _ in seen}


@cache
def in_definition(name: str, word: str) -> tuple[set[str], list[tuple[Module, str]]]:
    """Names of checks whose facts a definition reads, and definitions that it refers to."""
    module = module_of(name)
    assert module is not None
    names: set[str] = set()
    uses: list[tuple[Module, str]] = []
    for statement in module.defined[word]:
        nodes = list(ast.walk(statement))
        names |= names_read(module, nodes)
        uses += uses_of(module, nodes)
    return names, uses


def names_read(module: Module, nodes: Sequence[ast.AST]) -> set[str]:
    """Names of checks that some code gives to whatever reads the facts of a cluster."""
    bound: dict[str, list[ast.expr]] | None = None
    found: set[str] = set()
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        given = [*call.args, *(each.value for each in call.keywords)]
        by_method = isinstance(call.func, ast.Attribute) and call.func.attr in _READERS
        if by_method or any(is_cluster(each) for each in given):
            bound = bindings(nodes) if bound is None else bound
            for each in given:
                found |= texts(module, each, bound)
    return found & CHECKS.keys()


def is_cluster(node: ast.expr) -> bool:
    """`cluster`, `self.cluster`, `cluster.met`."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    names = [each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute))]
    return any("cluster" in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in names)


def bindings(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """What local names stand for: what loops go over, and defaults of parameters."""
    bound: dict[str, list[ast.expr]] = {}
    for each in nodes:
        if isinstance(each, (ast.For, ast.comprehension)):
            for name in ast.walk(each.target):
                if isinstance(name, ast.Name):
                    bound.setdefault(name.id, []).append(each.iter)
        elif isinstance(each, ast.FunctionDef):
            last = each.args.args[len(each.args.args) - len(each.args.defaults) :]
            for argument, default in zip(last, each.args.defaults, strict=True):
                bound.setdefault(argument.arg, []).append(default)
    return bound


def texts(module: Module, node: ast.expr, bound: dict[str, list[ast.expr]]) -> set[str]:
    """The texts that an argument may be: a literal, a constant, a loop over some of these."""
    if isinstance(node, ast.Starred):
        return texts(module, node.value, bound)
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, (ast.Tuple, ast.List)):
        return set().union(*(texts(module, each, bound) for each in node.elts))
    if not isinstance(node, ast.Name):
        return set()
    if node.id in bound:
        inner = {name: where for name, where in bound.items() if name != node.id}
        return set().union(*(texts(module, each, inner) for each in bound[node.id]))
    at = found_at(module, node.id)
    values = [each for each in at[0].defined[at[1]] if isinstance(each, ast.Assign)] if at else []
    return set().union(*(texts(at[0], each.value, {}) for each in values)) if at else set()


def test_a_check_declares_whose_facts_it_reads():
    declared = {name: check.reads for name, check in CHECKS.items()}
    assert declared == {name: tuple(sorted(reads_of(name)[0].keys() - {name})) for name in CHECKS}


def found_once() -> Iterator[tuple[str, set[str], set[str]]]:
    """Each call of `Cluster.once`: its place, the checks that it names, and those that it reads."""
    files = [*(ROOT / "nccl_doctor" / "toolkit").rglob("*.py"), *(ROOT / "checks").rglob("*.py")]
    for path in sorted(files):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        name = f"nccl_doctor.{dotted}" if dotted.startswith("checks.") else dotted
        module = module_of(name.removesuffix(".__init__"))
        assert module is not None
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "once":
                    bound = {
                        target.id: [value]
                        for each in node.body
                        if isinstance(each, ast.Assign)
                        for target, value in pairs_of(each)
                    }
                    named = texts(module, call.args[1], bound)
                    finds = [each for each in ast.walk(node) if each is not call]
                    yield f"{name}.{node.name}", named & CHECKS.keys(), closure(module, finds)


def pairs_of(statement: ast.Assign) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Name and value of each that an assignment binds."""
    for target in statement.targets:
        if isinstance(target, ast.Name):
            yield target, statement.value
        elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            both = zip(target.elts, statement.value.elts, strict=True)
            yield from ((name, value) for name, value in both if isinstance(name, ast.Name))


def closure(module: Module, nodes: Sequence[ast.AST]) -> set[str]:
    """Names of checks whose facts some code reads, by itself and by all that it uses."""
    found, todo = names_read(module, nodes), list(uses_of(module, nodes))
    seen: set[tuple[str, str]] = set()
    while todo:
        at, word = todo.pop()
        if (at.name, word) not in seen:
            seen.add((at.name, word))
            names, uses = in_definition(at.name, word)
            found |= names
            todo += uses
    return found


def test_what_is_found_once_names_all_that_it_reads():
    """Else it would be kept where what it follows from has changed."""
    calls = list(found_once())
    assert len(calls) >= 7
    assert {at: read - named for at, named, read in calls if read - named} == {}
    assert {"clock", "firewall", "loss", "uplink"} in [read for _, _, read in calls]


def test_what_is_read_is_a_check():
    assert {each for check in CHECKS.values() for each in check.reads} <= CHECKS.keys()


def test_facts_that_others_read_have_a_type():
    untyped = set()
    for name in {each for check in CHECKS.values() for each in check.reads}:
        made = type(CHECKS[name])
        hint = get_type_hints(made.observe, vars(sys.modules[made.__module__]))["return"]
        if not all(is_typeddict(each) for each in get_args(hint) or (hint,)):
            untyped.add(name)
    assert untyped == set()


def test_the_toolkit_reads_only_for_two_checks_or_more():
    """What one check alone reads of another belongs to that check."""
    readers: set[str] = set()
    users: dict[str, set[str]] = {}
    for name in CHECKS:
        found, modules = reads_of(name)
        readers |= {at.rpartition(".")[0] for each in found.values() for at in each}
        for module in modules:
            users.setdefault(module, set()).add(name)
    shared = {module: users[module] for module in readers if module.startswith(TOOLKIT)}
    assert shared
    assert {module: names for module, names in shared.items() if len(names) < 2} == {}


def test_nobody_but_checks_and_what_they_share_knows_a_check_by_name():
    words = CHECKS.keys() - ALSO_WORDS
    found = []
    for path in sorted((ROOT / "nccl_doctor").rglob("*.py")):
        if "toolkit" in path.parts or "checks" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and node.value in words:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
            if literal_read(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def literal_read(node: ast.AST) -> bool:
    """Whether this is `cluster.facts("name")` or its like."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _READERS
        and any(isinstance(each, ast.Constant) for each in node.args[:1])
    )
