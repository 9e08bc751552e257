"""Names of hosts that never signed in, from the naming rules of the scheduler. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nccl_doctor.toolkit.slurm import slurm_hosts


def names_of_nodes(
    environ: Mapping[str, str],
    nnodes: int,
    master_addr: str,
    here: Iterable[tuple[int | None, str]],
) -> Mapping[int, str]:
    """Node rank → host name, for all nodes of the job, or nothing.

    Under Slurm the n-th name of the node list is node n; in Kubernetes the pods of one job count
    in their names. Nobody has to number hosts like that: a naming that contradicts a host that did
    come is not used.

    Args:
        environ: of the coordinator, unfiltered.
        nnodes: of the job.
        master_addr: of the job. In Kubernetes it is the name of pod 0, unless the pods share the
            network, and with it the names, of their machines.
        here: (node rank, host name) of those that came.
    """
    came = tuple(here)
    first = next((name for node, name in came if node == 0), "")
    names = _in_slurm(environ, nnodes)
    if not names and "KUBERNETES_SERVICE_HOST" in environ and _short(master_addr) == _short(first):
        names = _pods(nnodes, first)
    expected = dict(enumerate(names))
    fits = all(node in expected and _short(expected[node]) == _short(name) for node, name in came)
    return expected if fits else {}


def _in_slurm(environ: Mapping[str, str], nnodes: int) -> Sequence[str]:
    """A step may run on a part of the allocation, or one step on each host."""
    lists = (environ.get(f"SLURM_{of}_NODELIST", "") for of in ("STEP", "JOB"))
    return next((names for names in map(slurm_hosts, lists) if len(names) == nnodes), ())


def _pods(nnodes: int, first: str) -> Sequence[str]:
    """Pods of a StatefulSet (`SET-K`), of Kubeflow's Trainer (`JOB-node-0-K`), and of a PyTorchJob,
    where `JOB-worker-K` is node K + 1 behind `JOB-master-0`.
    """
    job = _short(first).removesuffix("-0")
    if job == _short(first):
        return ()
    if job.endswith("-master"):
        workers = job.removesuffix("master") + "worker"
        return (first, *(f"{workers}-{node}" for node in range(nnodes - 1)))
    return tuple(f"{job}-{node}" for node in range(nnodes))


def _short(name: str) -> str:
    return name.partition(".")[0].lower()
