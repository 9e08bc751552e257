"""Fixes for limits of processes and memory, by who sets them. Pure data."""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.model.commands import Command, shell
from nccl_doctor.model.fixes import Fix, Step


def _for_logins(item: str, value: str) -> Fix:
    file = f"/etc/security/limits.d/90-{item}.conf"
    return Fix(
        Step(
            shell("# echo '* - {:name} {:name}' >> {}", item, value, file),
            undo=shell("# rm {}", file),
            note="for logins, as root; then log in again",
            persists=True,
        )
    )


def more_files(number: int, soft: int | None = None, *, allowed: bool = True) -> Fix:
    """The fix for too few open files.

    Args:
        number: how many there are to be.
        soft: the limit now.
        allowed: whether the hard limit lets a user have as many.
    """
    ways = [
        _for_logins("nofile", str(number)),
        Fix(text=f"in a systemd service: LimitNOFILE={number} in its unit"),
        Fix(Step(shell("# docker run --ulimit nofile={}", number))),
    ]
    if not allowed:
        return Fix(*ways[0].steps, alternatives=ways[1:])
    here = Step(
        shell("ulimit -n {}", number),
        undo=shell("ulimit -n {}", soft) if soft is not None else Command(),
    )
    return Fix(here, alternatives=ways)


MORE_ADDRESSES = Fix(
    Step(shell("ulimit -v unlimited")),
    alternatives=["in a batch system: request memory by another option than h_vmem"],
)
LOCK_MORE = Fix(
    Step(shell("ulimit -l unlimited")),
    alternatives=[
        Fix(Step(shell("# docker run --ulimit memlock=-1"))),
        Fix(Step(shell("# docker run --cap-add=IPC_LOCK"))),
        "in a systemd service: LimitMEMLOCK=infinity in its unit",
        _for_logins("memlock", "unlimited"),
    ],
)
LOCK_MORE_ROOTLESS = Fix(
    replace(_for_logins("memlock", "unlimited").steps[0], note="on the host; then log in again"),
    Step(shell("# podman run --ulimit memlock=-1"), note="then start the container in that way"),
    alternatives=["where a service starts it: LimitMEMLOCK=infinity in the unit of the service"],
)
"""Root of a user namespace cannot raise the hard limit of the user who started it."""
_AS_ROOT = "in securityContext of the container: runAsUser: 0, and IPC_LOCK in capabilities.add"


def lock_more_in_container(runtime: str, *, is_root: bool) -> Fix:
    """The fix inside of a container, where no shell may raise the hard limit.

    A capability that a runtime adds is lost by a user who is not root, and Kubernetes has no option
    for limits: a pod has those of the service of its runtime (capabilities(7); the OCI runtime
    specification, process.rlimits).

    Args:
        runtime: from `container_of`.
        is_root: whether this process is root there.
    """
    service = "containerd" if runtime == "kubernetes" else "docker"
    folder = f"/etc/systemd/system/{service}.service.d"
    unit = Fix(
        Step(
            shell(
                "# mkdir -p {} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' > {}/memlock.conf",
                folder,
                folder,
            ),
            undo=shell("# rm {}/memlock.conf", folder),
            note="on the machine itself, as root",
            persists=True,
        ),
        Step(
            shell("# systemctl daemon-reload && systemctl restart {:name}", service),
            note="then start the container again",
        ),
    )
    if runtime == "kubernetes":
        if is_root:
            return Fix(
                text="in securityContext of the container: IPC_LOCK in capabilities.add",
                alternatives=[unit],
            )
        return Fix(*unit.steps, alternatives=[_AS_ROOT])
    option = Fix(Step(shell("# {:name} run --ulimit memlock=-1", runtime)))
    capability = Fix(Step(shell("# {:name} run --cap-add=IPC_LOCK", runtime)))
    others = [capability] if is_root else []
    return Fix(*option.steps, alternatives=[*others, *([unit] if runtime == "docker" else [])])


MORE_PROCESSES = Fix(
    Step(shell("ulimit -u unlimited")),
    alternatives=[
        _for_logins("nproc", "unlimited"),
        "in a systemd service: LimitNPROC=infinity in its unit",
    ],
)
MORE_TASKS = Fix(
    Step(shell("# docker run --pids-limit=-1")),
    alternatives=[
        "in a systemd service: TasksMax=infinity in its unit",
        "in Kubernetes: podPidsLimit of the kubelet",
    ],
)
"""Where a control group limits them, and no limit of the user."""
MORE_PROCESSES_OR_TASKS = Fix(*MORE_PROCESSES.steps, alternatives=[MORE_TASKS])
MORE_MEMORY = Fix(
    Step(shell("# docker run --memory=SIZE")),
    alternatives=[
        Fix(Step(shell("# srun --mem=SIZE"), note="Slurm")),
        "in Kubernetes: more of resources.limits.memory",
        "start fewer ranks on the host",
    ],
)
NO_HIGH = Fix(
    Step(
        shell("# systemctl set-property --runtime NAME MemoryHigh=infinity"),
        note="as root; NAME is the unit",
    ),
    alternatives=[
        Fix(Step(shell("# srun --mem=SIZE"), note="Slurm")),
        *MORE_MEMORY.alternatives[1:],
    ],
)
"""Where memory.high slows processes down."""
