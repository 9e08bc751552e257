"""The other hosts of an allocation, by the variables of a scheduler that numbers no ranks.

Such a scheduler starts one process on the first host, or one on each, and leaves the rest to its
script. Who examines that host alone has not examined the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from nccl_doctor.launch.launchers import first_words, number
from nccl_doctor.model.job import UnreadHosts


def _count(text: str, _: Mapping[str, str]) -> int:
    return number(text) or 0


def _of_condor(text: str, environ: Mapping[str, str]) -> int:
    """Processes of a job of the parallel universe; elsewhere sites put CPUs into that variable."""
    return number(text) or 0 if "_CONDOR_PROCNO" in environ else 0


def _of_batch_script(text: str, environ: Mapping[str, str]) -> int:
    """Hosts of a Slurm job; inside a step, the step is what counts."""
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return 0 if in_step else number(text) or 0


def _at_least(text: str, _: Mapping[str, str]) -> int:
    """Least number of pods of an indexed Job: a pod knows its own index, and not how many."""
    return (number(text) or 0) + 1


def _of_a_script(text: str, environ: Mapping[str, str]) -> int:
    """Least number of hosts, where a script gave this one a number.

    That is as many as the script says, or one more than the number, or two where it says how many
    ranks meet at an address.
    """
    told = _told_by_a_script(environ)
    ranks = number(environ.get("WORLD_SIZE", "")) or 0
    least = 2 if ranks > 1 and "MASTER_ADDR" in environ and not told else 0
    return max((number(text) or 0) + 1, told, least)


def _told_by_a_script(environ: Mapping[str, str]) -> int:
    return next(filter(None, (number(environ.get(name, "")) for name in SIZES)), 0)


def _in_json(text: str, _: Mapping[str, str]) -> int:
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        return 0
    return len(hosts) if isinstance(hosts, list) else 0


def _pairs(text: str, _: Mapping[str, str]) -> int:
    """Hosts of `a1 8 a2 8`, without the host of the batch script: sites with jsrun have it first,
    with one slot.
    """
    words = text.split()
    hosts, slots = words[::2], words[1::2]
    if slots[:1] == ["1"] and set(slots[1:]) - {"1"}:
        del hosts[0]
    return len(set(hosts))


def _in_file(text: str, _: Mapping[str, str]) -> int:
    """Different first words of the lines: a host for each, or a line for each of its slots."""
    return len(set(first_words(text)))


SIZES = ("NNODES", "NUM_NODES")
"""Variables in which scripts have the number of hosts."""
_Reader = Callable[[str, Mapping[str, str]], int]
_ON_EACH: Mapping[str, _Reader] = {  # the process is started on each host
    "SKYPILOT_NUM_NODES": _count,  # docs.skypilot.co, distributed jobs
    "DSTACK_NODES_NUM": _count,  # dstack, runner/internal/executor
    "LWS_GROUP_SIZE": _count,  # lws.sigs.k8s.io, environment variables
    "AWS_BATCH_JOB_NUM_NODES": _count,  # AWS Batch, multi-node parallel jobs
    "SM_HOSTS": _in_json,  # sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md
    "_CONDOR_NPROCS": _of_condor,  # HTCondor, parallel universe
    "JOB_COMPLETION_INDEX": _at_least,  # Kubernetes, Job with completionMode Indexed
    "NODE_RANK": _of_a_script,  # Lightning, general purpose cluster
    **dict.fromkeys(SIZES, _count),
}
_ON_THE_FIRST: Mapping[str, _Reader] = {  # a script on one host starts the others
    "PBS_NODEFILE": _in_file,
    "OAR_NODEFILE": _in_file,
    "PE_HOSTFILE": _in_file,  # Grid Engine: NAME SLOTS QUEUE RANGE
    "LSB_MCPU_HOSTS": _pairs,  # LSF
    "SLURM_JOB_NUM_NODES": _of_batch_script,
}


HOSTFILE_OF_4 = "OMPI_MCA_orte_default_hostfile"
"""Variable of Open MPI 4 that names a hostfile; kubeflow's operators set it."""


def ignored_hostfile(environ: Mapping[str, str]) -> UnreadHosts:
    """Hosts of a file that mpirun did not read, where all ranks are on this host; else empty.

    Open MPI 5 starts its ranks by PRRTE, which does not know the variables of its predecessor
    (5.0.11; kubeflow/trainer#4028).
    """
    sizes = {environ.get(f"OMPI_COMM_WORLD_{name}SIZE") for name in ("", "LOCAL_")}
    by_prrte = environ.get("PMIX_NAMESPACE", "").startswith("prterun-")
    if not by_prrte or len(sizes) > 1 or "PRTE_MCA_prte_default_hostfile" in environ:
        return UnreadHosts()
    count = _in_file(environ.get(HOSTFILE_OF_4, ""), environ)
    if count < 2:
        return UnreadHosts()
    said = f"{HOSTFILE_OF_4} has {count} hosts, and Open MPI 5 does not read that variable"
    return UnreadHosts(said, nnodes=str(count), variable=HOSTFILE_OF_4)


def other_hosts(environ: Mapping[str, str], *, command: bool) -> UnreadHosts:
    """Say by which variable an allocation has several hosts; empty if none does.

    Args:
        environ: of this process.
        command: a command of the job is known, which no launcher starts: where its scheduler starts
            it on each host, it may find the others by itself; elsewhere it stays on this host.
    """
    for variable, reader in (_ON_EACH if command else {**_ON_EACH, **_ON_THE_FIRST}).items():
        text = environ.get(variable, "")
        count = reader(text, environ) if text else 0
        if count > 1:
            if reader is _at_least:
                return UnreadHosts(f"{variable}={count - 1}", variable=variable)
            if reader is _of_a_script:
                shown = (variable, *SIZES, "WORLD_SIZE")
                said = " and ".join(f"{n}={environ[n][:9]}" for n in shown if n in environ)
                told = str(_told_by_a_script(environ) or "")
                at = environ.get("MASTER_ADDR", "")
                return UnreadHosts(said, nnodes=told, master_addr=at, variable=variable)
            return UnreadHosts(
                f"{variable} has {count} hosts", nnodes=str(count), variable=variable
            )
    return UnreadHosts()
