"""A report full of names that must stay inside, and of versions that may go out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.cluster import Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Finding, Severity, Where
from nccl_doctor.model.report import Report
from tests.support.clusters import change_rank, make_cluster
from tests.support.reports import RUN, kind, made_check

SECRETS = (
    *("gandalf", "bilbo17", "bilbo18", "bilbo19", "rivendell", "shire.example.com", "moria"),
    *("frodo", "samwise", "pippin", "palantir", "mithril", "silmaril", "hunter2", "sauron"),
    *("10.20.30.", "172.31.44.", "203.0.113.77", "fd12:3456", "2001:db8:77", "3456:789a"),
    *("0c:42:a1", "0c42:a103:003b:2c5a", "0c42a103003b2c5a", "8f453264", "3d1219c7c4c5404a"),
    *("1322421012345", "nd0-secret-key"),
    *("orc[01-03]", "orc02", "nazgul", "0c42.a100.0011", "ent[7-9]", "1f6d2a48adfd", "uruk"),
)
"""Parts of what must not be seen, in lower case."""
VERSIONS = (
    *("2.13.0+cu129", "570.86.15", "12.4.5.8", "9.1.0.70", "2.27.5", "28.39.1002", "0.19.8"),
    *("29500", "libnccl.so.2", "/sys/class/infiniband/mlx5_0", "/dev/shm", "eth0", "3.11.7"),
)
"""What has to stay readable."""

_LOG = """\
gandalf:4711:4720 [0] NCCL INFO Bootstrap: Using eth0:10.20.30.41<0>
gandalf:4711:4720 [0] NCCL INFO NET/IB: Using [0]mlx5_0:1/RoCE fe80::e42:a1ff:fe03:3b2c%eth0
gandalf:4711:4720 [0] NCCL WARN Connect to bilbo19.shire.example.com<29500> failed
cudnn 9.1.0.70 nvidia-cublas-cu12==12.4.5.8 api_key=hunter2
"""
_STACK = """\
  File "/home/frodo/mithril/train.py", line 3 in <module>
  File "/home/frodo/.venv/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9
"""
_LINK: dict[str, Any] = {
    "name": "eth0",
    "mac": "0c:42:a1:00:00:11",
    "addresses": ["10.20.30.41", "fd12:3456:789a::41"],
    "subnets": ["10.20.30.0/24", "fd12:3456:789a::/64"],
    "guid": "0c42:a103:003b:2c5a",
    "port": "/sys/class/infiniband/mlx5_0/ports/1",
    "10.20.30.42": "no answer",
}


def secret_cluster() -> Cluster:
    """Two hosts of two ranks, whose facts, environment and launch hold names of every type."""
    hung = Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=({"step": "connect to bilbo17:29500", "at_s": 1.0, "file": "mithril/x.py"},),
        stack=_STACK,
        log_tail=_LOG,
        witness={"said": "waits for 10.20.30.42", "peers": ["gandalf", "bilbo17"]},
        reason="ssh: connect to host bilbo18 port 22: No route to host",
    )
    cluster = make_cluster(
        ("gandalf", "bilbo17.shire.example.com"),
        check="made",
        by_host={"gandalf": _LINK, "bilbo17.shire.example.com": hung},
        by_rank={
            0: {
                "machine_id": "3d1219c7c4c5404aaa1f6d2a48adfda4",
                "uuid": "GPU-8f453264-8570-45ac-ae5e-228675ddc858",
                "serial": "1322421012345",
                "node_guid": "0x0c42a103003b2c5a",
                "torch": "2.13.0+cu129",
                "driver": "570.86.15",
                "python": "3.11.7",
                "cudnn_version": "9.1.0.70",
                "firmware": "28.39.1002",
                "wheels": {"nvidia-cublas-cu12": "12.4.5.8"},
                "by_host": {"gandalf": 1, "bilbo17": 2},
                "library": "/opt/silmaril/lib/libnccl.so.2 (NCCL 2.27.5)",
                "owner": "samwise@moria.example.org",
                "proxy": "https://pippin:hunter2@rivendell.shire.example.com:8443/palantir",
            }
        },
        env={
            0: {
                "MASTER_ADDR": "gandalf.shire.example.com",
                "SLURM_JOB_NODELIST": "gandalf,bilbo[17-19]",
                "SLURM_CLUSTER_NAME": "mithril",
                "SLURM_WORKING_CLUSTER": "uruk:nazgul:6817:10240:101",
                "NCCL_DEBUG_FILE": "/data/sauron/nccl.%h.%p",
                "LD_LIBRARY_PATH": "/usr/lib:/home/samwise/lib",
                "NCCL_SOCKET_IFNAME": "eth0",
                "UCX_NET": "172.31.44.0/24",
            }
        },
    )
    hosts = [replace(host, key=f"nd0-secret-key{host.id}") for host in cluster.hosts]
    hosts[0] = replace(hosts[0], addresses=("10.20.30.41", "203.0.113.77", "2001:db8:77::5"))
    hosts[1] = replace(hosts[1], addresses=("10.20.30.42",))
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    cluster = replace(cluster, hosts=tuple(hosts), ranks=ranks)
    return change_rank(
        cluster,
        0,
        launch={"master_addr": "gandalf.shire.example.com", "run_id": "palantir-7"},
        last_breadcrumb="call 10.20.30.42 port 29500",
    )


def secret_report() -> Report:
    """Report on that cluster, with names wherever a check can put them."""
    found = Finding(
        kind("port-made", severity=Severity.FAIL),
        "no answer from 10.20.30.42:29500 (bilbo17) within 3 s; [fd12:3456:789a::42]:29500 neither",
        Where(
            hosts=("gandalf",),
            ranks=(0, 1),
            links=(("gandalf", "bilbo17.shire.example.com"),),
            interfaces=("eth0",),
        ),
        evidence={
            "rules": ["ip saddr 10.20.30.0/24 drop", "ether saddr 0c:42:a1:00:00:12 drop"],
            "gandalf": "host",
            "hosts": {"gandalf": "a", "bilbo17": "b"},
            "path": "/scratch/frodo/palantir/x.json",
            "srun": "srun: error: orc[01-03]: Killed; switch port of 0c42.a100.0011; ent[7-9]",
            "more": "orc02 is down; GUID 0c42a103003b2c5a; container 1f6d2a48adfd; "
            "/sys/fs/cgroup/docker/1f6d2a48adfda43d1219c7c4c5404aaa1f6d2a48adfda43d1219c7c4c5404aaa",
            "id": "2 hosts have the machine id 3d1219c7c4c5404aaa1f6d2a48adfda4",
            "text": "BILBO18 and bilbo19 said: no; see /home/pippin/log and ~samwise/x",
            "versions": "torch 2.13.0+cu129, NCCL 2.27.5, DeepSpeed 0.19.8, /dev/shm",
        },
        fix='on gandalf: echo "10.20.30.42 bilbo17" >> /etc/hosts; ssh frodo@bilbo17',
        cause="gandalf's firewall drops connections from bilbo17 (nft inet filter input)",
    )
    run = replace(
        RUN,
        command="nccl-doctor run --json mithril.json --output-dir /home/frodo/palantir "
        "--master-addr gandalf -- /home/frodo/silmaril.sh …",
        options={
            "outputs": {"json": "mithril.json"},
            "output_dir": "palantir",
            "job": {"deepspeed_config": {"wandb": {"team": "sauron", "token": "hunter2"}}},
        },
        extra={"note": "rack of rivendell.shire.example.com"},
    )
    return conclude(secret_cluster(), [made_check("made", finds=[found])], run=run)


def leaks(text: str) -> list[str]:
    """Secrets that can be read in a text."""
    return [secret for secret in SECRETS if secret in text.lower()]
