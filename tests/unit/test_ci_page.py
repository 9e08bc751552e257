"""docs/ci.md and action.yml: valid by the published schemas, and about the program as it is."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nccl_doctor.cli import cli
from nccl_doctor.cli.config import load
from nccl_doctor.model.findings import Status
from nccl_doctor.report.formats import formats, prometheus
from tests.support.ci import report_of
from tests.unit.test_readme import doctor, options

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
BLOCKS = {
    language: re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for language in ("toml", "yaml", "groovy", "sh")
}
WORKFLOW, GITLAB = (yaml.safe_load(text) for text in BLOCKS["yaml"])
(PIPELINE,) = BLOCKS["groovy"]
STEPS = ACTION["runs"]["steps"]


def on_as_github_reads_it(workflow: dict[Any, Any]) -> dict[Any, Any]:
    """YAML 1.1 takes the key `on` for true, GitHub does not."""
    return {"on" if key is True else key: value for key, value in workflow.items()}


VALID = {  # what is validated, and by which definition of which file of tests/schemas
    "action.yml": (ACTION, "github-action.json", "Action"),
    "the workflow": (on_as_github_reads_it(WORKFLOW), "github-workflow.json", "Workflow"),
    "the GitLab job": (GITLAB, "gitlab-ci.json", "Pipeline"),
}
PLANTED = {  # a mistake in each, at a place and with a value
    "action.yml": [
        (("inputs", "gpus", "descripton"), "x"),
        (("inputs", "level", "default"), 1),
        (("runs", "steps", 0, "shell"), None),
        (("runs", "steps", 0, "timeout-minutes"), 3),
        (("runs", "using"), "compound"),
        (("outputs", "verdict", "value"), None),
    ],
    "the workflow": [
        (("on",), ["pushed"]),
        (("jobs", "gpus", "runs-on"), ["gpu"]),
        (("jobs", "gpus", "timeout"), 10),
        (("jobs", "gpus", "steps"), []),
        (("jobs", "gpus", "steps", 0, "use"), "x"),
        (("jobs", "gpus", "steps", 0, "shell"), "bash"),
        (("jobs", "1st"), {"runs-on": "ubuntu-latest"}),
    ],
    "the GitLab job": [
        (("gpu-smoke-test", "artifact"), {}),
        (("gpu-smoke-test", "artifacts", "when"), "ever"),
        (("gpu-smoke-test", "artifacts", "reports", "junits"), "x.xml"),
        (("gpu-smoke-test", "script"), []),
        (("gpu-smoke-test", "timeout"), 10),
        (("gpu-smoke-test", "tags"), "gpu"),
    ],
}


def validate(item: Any, file: str, name: str) -> None:
    text = (ROOT / "tests" / "schemas" / file).read_text(encoding="utf-8")
    schema = {**json.loads(text), "$ref": f"#/$defs/{name}"}
    jsonschema.Draft202012Validator(schema).validate(item)


@pytest.mark.parametrize("name", VALID)
def test_it_is_valid_by_the_published_schema(name: str):
    item, file, definition = VALID[name]
    validate(json.loads(json.dumps(item)), file, definition)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [(name, path, value) for name, mistakes in PLANTED.items() for path, value in mistakes],
    ids=str,
)
def test_a_mistake_in_it_is_seen(name: str, path: tuple[Any, ...], value: Any):
    """`None`: the key is missing."""
    item, file, definition = VALID[name]
    item = inner = copy.deepcopy(item)
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(item, file, definition)


def check_step(step: dict[str, Any]) -> None:
    """One step of a workflow or a composite action: it runs something, or uses something."""
    known = {"name", "id", "if", "shell", "env", "run", "uses", "with"}
    assert set(step) <= known
    assert ("run" in step) != ("uses" in step)
    assert all(isinstance(value, str) for value in step.get("env", {}).values())
    if "uses" in step:
        assert re.fullmatch(r"\./[\w.-]+|[\w.-]+/[\w.-]+@[\w.-]+", step["uses"])
        assert "with" not in step or isinstance(step["with"], dict)
    else:
        assert "with" not in step


def test_the_action_is_a_composite_action():
    assert set(ACTION) == {"name", "description", "inputs", "outputs", "runs"}
    assert set(ACTION["runs"]) == {"using", "steps"}
    assert ACTION["runs"]["using"] == "composite"
    for name, given in ACTION["inputs"].items():
        assert re.fullmatch(r"[a-z][a-z0-9-]*", name)
        assert set(given) <= {"description", "required", "default"}
        assert isinstance(given.get("default", ""), str), "the runner knows strings only"
        assert given.get("required", False) is ("default" not in given)
    for name, told in ACTION["outputs"].items():
        assert set(told) == {"description", "value"}
        assert told["value"] == f"${{{{ steps.examine.outputs.{name} }}}}"
    for step in STEPS:
        check_step(step)
        assert step["shell"] == "bash", "a composite action has to name it"
    assert [step["id"] for step in STEPS if "id" in step] == ["examine"]


def test_the_action_hands_every_input_on_and_none_of_them_is_code():
    used = re.findall(r"inputs\.([a-z-]+)", (ROOT / "action.yml").read_text(encoding="utf-8"))
    assert set(used) == set(ACTION["inputs"])
    for step in STEPS:
        assert "${{" not in step["run"]
        set_here = set(re.findall(r"\$\{?([A-Z]+)\b", step["run"])) - {"GITHUB_OUTPUT"}
        assert {name for name in set_here if not name.startswith("GITHUB")} <= set(step["env"])
        done = subprocess.run(["bash", "-n"], input=step["run"], text=True, check=False)
        assert done.returncode == 0
    told = re.findall(r'echo "([a-z-]+)=', STEPS[-1]["run"])
    assert set(told) == set(ACTION["outputs"])


def test_the_action_gives_options_that_exist():
    given = set(re.findall(r"(?<=[ (])--[a-z-]+", STEPS[-1]["run"]))
    assert "--json" in given
    assert given <= options(cli.commands["run"], hidden=False)


def test_the_page_says_what_the_action_takes_and_gives():
    section = PAGE.partition("\n## GitHub Actions\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split(" | ")[0])}
    assert told == set(ACTION["inputs"])
    for name in ACTION["outputs"]:
        assert f"`{name}`" in section
    for row in rows:
        for name, default in zip(
            re.findall(r"`([a-z-]+)`", row.split(" | ")[0]),
            row.split(" | ")[1].split(", "),
            strict=False,
        ):
            there = ACTION["inputs"][name].get("default", "must be given")
            assert default == (there or "none")


def test_the_workflow():
    assert set(WORKFLOW) == {"name", True, "jobs"}, "YAML 1.1 reads `on` as true, GitHub does not"
    (job,) = WORKFLOW["jobs"].values()
    assert set(job) == {"runs-on", "timeout-minutes", "steps"}
    for step in job["steps"]:
        check_step(step)
    (used,) = [step for step in job["steps"] if step.get("uses", "").startswith("./")]
    (checkout,) = [s for s in job["steps"] if "repository" in s.get("with", {})]
    assert used["uses"] == f"./{checkout['with']['path']}"
    assert set(used["with"]) <= set(ACTION["inputs"])
    assert {n for n, i in ACTION["inputs"].items() if i.get("required")} <= set(used["with"])
    for name in re.findall(r"steps\.(\w+)\.outputs\.([a-z-]+)", BLOCKS["yaml"][0]):
        assert name[0] == used["id"]
        assert name[1] in ACTION["outputs"]


def test_the_gitlab_job():
    (job,) = GITLAB.values()
    assert set(job) == {"stage", "tags", "timeout", "script", "artifacts"}
    assert all(isinstance(line, str) for line in [*job["script"], *job["tags"]])
    assert job["artifacts"]["when"] == "always"
    written = shlex.split(job["script"][-1])
    assert written[written.index("--junit") + 1] == job["artifacts"]["reports"]["junit"]
    assert [written[written.index("--json") + 1]] == job["artifacts"]["paths"]


def test_the_pipeline():
    pairs = {"}": "{", ")": "(", "]": "["}
    left: list[str] = []
    for char in re.sub(r"'[^'\n]*'", "", PIPELINE):
        if char in pairs.values():
            left.append(char)
        elif char in pairs:
            assert left.pop() == pairs[char]
    assert not left
    assert re.match(r"pipeline \{\n    agent ", PIPELINE)
    install, line = re.findall(r"sh '(.*)'", PIPELINE)
    words = shlex.split(line)
    assert f"junit testResults: '{words[words.index('--junit') + 1]}'" in PIPELINE
    assert f"artifacts: '{words[words.index('--json') + 1]}'" in PIPELINE
    assert [install, line] == next(iter(GITLAB.values()))["script"]
    assert install.startswith("python3 -m pip install ")


def test_the_configuration_is_one(tmp_path: Path):
    (text,) = BLOCKS["toml"]
    (tmp_path / "nccl-doctor.toml").write_text(text)
    found = load(None, tmp_path).values
    assert (found["backend"], found["nproc_per_node"]) == ("nccl", 8)
    assert found["expected"] == {"gpus_per_host": 8}


def test_every_command_on_the_page_exists():
    page = re.sub(r"sh '(.*)'", r"\1", PAGE)
    called = [words for words in doctor(page) if words and re.fullmatch(r"[a-z]+", words[0])]
    assert len(called) > 4
    for words in called:
        command = cli.commands[words[0]]
        if words[0] == "report":
            command = command.commands[words[1]]  # type: ignore[attr-defined]
            assert words[words.index("--format") + 1] in formats()
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options(command, hidden=False)


def test_the_readme_points_here():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    part = readme.partition("\n## In CI\n")[2].partition("\n## ")[0]
    assert "docs/ci.md" in part
    for name in ("--github", "--junit", "--markdown", "--prometheus"):
        assert f"`{name}" in PAGE or f" {name} " in PAGE, name


def test_every_metric_is_described():
    text = prometheus.render(report_of())
    metrics = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) | {"nccl_doctor_findings"}
    section = PAGE.partition("\n## As metrics\n")[2]
    rows = [row.split(" | ")[0] for row in section.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == metrics
    for number, status in enumerate(Status):
        assert f"{number} {status.value}" in section
