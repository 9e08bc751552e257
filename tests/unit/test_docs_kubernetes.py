"""docs/kubernetes.md: its manifests are valid, and their commands are read as they are meant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

from nccl_doctor.checks.shared_memory import SharedMemory
from nccl_doctor.cli import cli
from nccl_doctor.cli.line import COMMAND
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.launch.command_line.reader import read
from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.ranks import host_flags, names_of_nodes
from nccl_doctor.model.launch import Launch
from nccl_doctor.report.formats import termination
from tests.support.clusters import make_cluster
from tests.support.reports import RUN

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs" / "examples" / "kubernetes"
FILES = sorted(FOLDER.iterdir())
SCHEMAS = {
    path.name: json.loads(path.read_text()) for path in (ROOT / "tests" / "schemas").glob("*.json")
}
WHERE = {  # kind: the file of its schema
    "ConfigMap": "kubernetes.json",
    "Service": "kubernetes.json",
    "ServiceAccount": "kubernetes.json",
    "ClusterRoleBinding": "kubernetes.json",
    "DaemonSet": "kubernetes.json",
    "Job": "kubernetes.json",
    "JobSet": "jobset.json",
    "TrainJob": "trainer.json",
    "PyTorchJob": "training-operator.json",
}
NOT_OURS = Launch()
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
MESSAGE = re.compile(r"terminated\.message\}'\n(.*?)```", re.DOTALL)


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of(name: str, kind: str) -> dict[str, Any]:
    (found,) = (item for item in objects(name) if item["kind"] == kind)
    return found


def validate(item: Any, file: str, name: str) -> None:
    registry: Registry[Any] = Registry().with_resources(
        (uri, Resource.from_contents(schema)) for uri, schema in SCHEMAS.items()
    )
    schema = {"$ref": f"{file}#/$defs/{name}"}
    jsonschema.Draft202012Validator(schema, registry=registry).validate(item)


def test_the_page_shows_every_manifest() -> None:
    """As it is: `make docs` writes it there, and test_docs_pages compares."""
    shown = re.findall(r"^<!-- docs/examples/kubernetes/(\S+) -->$", PAGE, re.MULTILINE)
    assert sorted(shown) == [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_manifest_is_valid(path: Path) -> None:
    for item in objects(path.name):
        validate(item, WHERE[item["kind"]], item["kind"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "template", "spec", "containers", 0, "terminationMessagePolicy"), "Logs"),
        (("spec", "template", "spec", "containers", 0, "volumeMount"), []),
        (("spec", "template", "spec", "containers", 0, "resources", "limits", "cpu"), "many"),
        (("spec", "completions"), "2"),
        (("spec", "template", "spec", "volumes", 0, "emptyDir", "size"), "1Gi"),
        (("metadata", "nmae"), "x"),
        (("apiVersion",), "batch/v2"),
    ],
)
def test_a_mistake_in_one_is_seen(path: tuple[Any, ...], value: Any) -> None:
    job = of("job.yaml", "Job")
    inner: Any = job
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(job, "kubernetes.json", "Job")


# --- what the operators set, as read in their sources (tests/schemas/README.md) ---


def indexed(index: int) -> dict[str, str]:
    """The Job controller, in init containers too."""
    return {**POD, "JOB_COMPLETION_INDEX": str(index)}


def trainer(index: int) -> dict[str, str]:
    """Kubeflow Trainer v2, in the container `node`."""
    spec = of("trainjob.yaml", "TrainJob")["spec"]["trainer"]
    return {
        **indexed(index),
        "PET_NNODES": str(spec["numNodes"]),
        "PET_NPROC_PER_NODE": str(spec["numProcPerNode"]),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "llm-node-0-0.llm",
        "PET_MASTER_PORT": "29500",
    }


def pytorch(index: int) -> dict[str, str]:
    """The Training Operator, a newer release."""
    nproc = of("pytorchjob.yaml", "PyTorchJob")["spec"]["nprocPerNode"]
    return {
        **POD,
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456",
        "MASTER_ADDR": "llm-master-0",
        "WORLD_SIZE": str(2 * int(nproc)),
        "RANK": str(index),
        "PET_NPROC_PER_NODE": nproc,
        "PET_NODE_RANK": str(index),
        "PET_NNODES": "2",
    }


def expanded(words: list[str], environ: Mapping[str, str]) -> list[str]:
    """As the kubelet does: what is not set stays as it is."""
    return [re.sub(r"\$\((\w+)\)", lambda m: environ.get(m[1], m[0]), word) for word in words]


def parsed(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Options that the doctor is given, and the command behind them."""
    assert words[0] == "nccl-doctor"
    command = cli.commands[words[1]]
    with command.make_context(words[1], list(words[2:])) as ctx:
        return ctx.params, ctx.meta.get(COMMAND, [])


def in_front() -> Iterator[tuple[str, list[str], list[dict[str, str]], str]]:
    """Each manifest with the doctor in front of torchrun: its command, and two pods' variables."""
    job = of("jobset.yaml", "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    yield "JobSet", container["command"], [indexed(0), indexed(1)], "llm-node-0-0.llm"
    command = of("trainjob.yaml", "TrainJob")["spec"]["trainer"]["command"]
    yield "TrainJob", command, [trainer(0), trainer(1)], "llm-node-0-0.llm"
    replicas = of("pytorchjob.yaml", "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for it
    yield "PyTorchJob", container["command"], [pytorch(0), pytorch(1)], "llm-master-0"


@pytest.mark.parametrize(
    ("name", "words", "pods", "addr"), list(in_front()), ids=lambda v: str(v)[:12]
)
def test_the_topology_is_read_from_the_command_and_the_operator_s_variables(
    name: str, words: list[str], pods: list[dict[str, str]], addr: str
) -> None:
    for node, environ in enumerate(pods):
        given, command = parsed(expanded(words, environ))
        assert given["termination"] == "/dev/termination-log"
        line = read(command, environ, Path("/"))
        assert (line.launcher, line.nnodes, line.node_rank) == ("torchrun", 2, node)
        assert (line.nproc_per_node, line.master_addr) == ("8", addr)
        assert line.notes == ()
        found = detect(environ)
        assert found.problems == ()
        if name == "JobSet":
            assert found == NOT_OURS
            continue
        flags = host_flags(found, environ)
        assert flags is not None
        assert (flags.nnodes, flags.node_rank, flags.nproc_per_node) == (2, node, "8")
        assert (flags.master_addr, flags.master_port) == (addr, line.master_port or 29500)


def test_an_old_pytorch_job_counts_pods() -> None:
    environ = {**POD, "MASTER_ADDR": "llm-master-0", "MASTER_PORT": "23456"}
    environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    found = detect(environ)
    assert (found.per_host, found.node_rank, found.nnodes, found.problems) == (True, 1, 2, ())
    hint = re.search(r"give torchrun `([^`]+)` too", PAGE)
    assert hint is not None
    line = read(["torchrun", *expanded(hint[1].split(), environ), "train.py"], environ, Path("/"))
    assert (line.nnodes, line.node_rank, line.nproc_per_node) == (2, 1, "8")


def test_the_init_container_says_what_the_job_will_be_told() -> None:
    spec = of("job.yaml", "Job")["spec"]
    pod = spec["template"]["spec"]
    (doctor,), (train,) = pod["initContainers"], pod["containers"]
    for node in range(spec["completions"]):
        environ = indexed(node)
        assert detect(environ) == NOT_OURS
        given, command = parsed(expanded(doctor["command"], environ))
        line = read(expanded(train["command"], environ), environ, Path("/"))
        assert command == []
        for name in ("nnodes", "node_rank", "nproc_per_node", "master_addr"):
            assert str(given[name]) == str(getattr(line, name)), name
        assert (line.nnodes, line.node_rank, line.master_addr) == (2, node, "llm-0.llm")
    for name in ("image", "resources", "volumeMounts"):
        assert doctor[name] == train[name]
    service = of("job.yaml", "Service")
    assert service["spec"]["selector"] == {"job-name": of("job.yaml", "Job")["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize(
    ("first", "master", "second"),
    [
        ("llm-0", "llm-0.llm", "llm-1"),
        ("llm-node-0-0", "llm-node-0-0.llm", "llm-node-0-1"),
        ("llm-master-0", "llm-master-0", "llm-worker-0"),
    ],
)
def test_a_pod_that_never_came_has_its_name(first: str, master: str, second: str) -> None:
    assert names_of_nodes(POD, 2, master, [(0, first)]) == {0: first, 1: second}


def test_the_plug_in_of_node_problem_detector() -> None:
    config = json.loads(of("node-problem-detector.yaml", "ConfigMap")["data"]["nccl-doctor.json"])
    validate(config, "node-problem-detector.json", "CustomPluginConfig")
    (rule,), (condition,) = config["rules"], config["conditions"]
    assert rule["condition"] == condition["type"]  # or it refuses to start
    given, _ = parsed([Path(rule["path"]).name, *rule["args"]])
    assert given["exit_profile"] == "npd"
    assert config["pluginConfig"]["max_output_length"] == 80


def test_the_daemon_set_starts_the_detector_with_the_plug_in() -> None:
    config = of("node-problem-detector.yaml", "ConfigMap")
    plug_in = json.loads(config["data"]["nccl-doctor.json"])
    account, sets = of("daemonset.yaml", "ServiceAccount"), of("daemonset.yaml", "DaemonSet")
    (subject,) = of("daemonset.yaml", "ClusterRoleBinding")["subjects"]
    pod = sets["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (mount,) = container["volumeMounts"]
    assert sets["spec"]["selector"]["matchLabels"] == sets["spec"]["template"]["metadata"]["labels"]
    assert (volume["configMap"]["name"], volume["name"]) == (
        config["metadata"]["name"],
        mount["name"],
    )
    (file,) = config["data"]
    option = f"--config.custom-plugin-monitor={mount['mountPath']}/{file}"
    assert option in container["command"]
    for name, value in account["metadata"].items():
        assert subject[name] == value
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert sets["metadata"]["namespace"] == config["metadata"]["namespace"]
    recipe = (FOLDER.parent / "container" / "Containerfile.npd").read_text("utf-8")
    assert f"--tag {container['image']} " in recipe
    assert container["command"][0] in recipe
    home = re.search(
        r"python3 -m venv (\S+)", (FOLDER.parent / "container/Containerfile").read_text()
    )
    assert home is not None
    assert plug_in["rules"][0]["path"].startswith(f"{home[1]}/bin/")


def test_the_plug_in_of_the_page_on_monitoring() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    config = json.loads(block)
    validate(config, "node-problem-detector.json", "CustomPluginConfig")
    (rule,), (condition,) = config["rules"], config["conditions"]
    assert rule["condition"] == condition["type"]


def test_the_termination_message_is_what_the_tool_writes() -> None:
    mib = 1 << 20
    room = {"size": 16384 * mib, "free": 16384 * mib, "needed": 587 * mib, "error": "", "stale": []}
    small = {**room, "size": 64 * mib, "free": 64 * mib, "error": "No space left on device"}
    cluster = make_cluster(
        ("llm-0", "llm-1"),
        8,
        check="shared_memory",
        by_host={"llm-0": room, "llm-1": small},
        backend="nccl",
    )
    shown = MESSAGE.search(PAGE)
    assert shown is not None
    assert shown[1] == termination.render(conclude(cluster, [SharedMemory()], run=RUN))
