"""Words that are never replaced: they identify no one, and a report needs them to be readable."""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMMON = _words("""
a an and any are as at be by can do for from had has have he her his i if in into is it its me my no
nor not of off on or our out own so than that the their them then there they this to too up us was
we were what when where which who why will with yes you your
abort accelerator acs action address addresses admin affinity agent all allowed alone answers asked
auto available backend beside blocked bond boot bound bridge built call calls check child class
client cluster code collective comm compute connect connection core count counts cpu cuda data
default defaults dev device devices direct dns docker done driver dummy elastic empty env
environment error established eth eth0 eth1 fabric fail faults file first fix flag free gateway gid
gloo gpu group groups guid handle head holder home host hosts hung ib ib0 ib1 id image info init
interface interfaces ip ipv4 ipv6 job kept kernel key kind knock lab launch layer level libaio
likely limit link links listen lo loaded local localhost locked log login lost made main manager
managers master may memory mesh message missing model models mount name nccl needed net network
networks nic node node0 nodes none numa offload ok open ops other others param parent pass path
paths pci peer peers picks pid pids plugin pod port ports process processes proxy python queue range
rank ranks rates read reason refused reply report resolved reverse ring road roads rocm role root
route rules run seat self send server serves service set settings shared side size skipped slurm
socket speed stack stale state status step steps store stuck subnet sys system taken tcp test thread
time timeout tmp told topology torch torchrun train training tree tried tries udp unknown user users
uuid value variables verbs version virtual wait wanted warn wheels where work worker workers world
write wrong
""")
"""A host or user of such a name gets its pseudonym where a name is expected, not in free text."""

DEVICES = _words("""
args axes axis bnxt bonds channel channels cores cpus cxi dim dims efa elements en eno enp ens eths
gpus hcas hfi ibp ibs indices irdma irq irqs lane lanes layers list lists mlx mlx5 nics nvme
nvmes pages queues roce seats sd shape slots sockets threads veth vfs wlan
""")
"""Words before numbers in brackets that name parts of a host, or anything but a host."""

LOCAL_NAMES = _words("""
localhost localhost.localdomain ip6-localhost ip6-loopback localhost4 localhost6
""")

SYSTEM_USERS = _words("""
root nobody daemon git ubuntu ec2-user centos azureuser opc vagrant
""")

PUBLIC_DOMAINS = (
    "github.com",
    "githubusercontent.com",
    "nvidia.com",
    "pytorch.org",
    "deepspeed.ai",
    "kernel.org",
    "python.org",
    "readthedocs.io",
    "schedmd.com",
    "open-mpi.org",
    "kubernetes.io",
    "man7.org",
    "rfc-editor.org",
    "ietf.org",
)
"""Addresses in fixes and references lead there."""

TOP_LEVEL = _words("""
com corp edu gov internal intra intranet lan local net org
""")
COUNTRIES = _words("""
ac ae ai at au be br ca ch cloud cn cz de dk es eu fi fr gr hk hpc ie il in io it jp kr mil
nl no nz pl priv pt ru se sg svc tw uk us za
""")
"""How names of hosts end, and names of files and modules do not: with a country, from three labels
on.
"""

HOST_VARIABLES = re.compile(
    r"MASTER_ADDR$|NODELIST$|NODENAME$|SUBMIT_HOST$|TOPOLOGY_ADDR$|RDZV_ENDPOINT$|HOSTNAME$"
    r"|NODE_ALIASES$|LAUNCH_NODE_IPADDR$|LOCAL_ADDR$|SRUN_COMM_HOST$|LAUNCHER_HOST"
)
LABEL_VARIABLES = re.compile(
    r"^SLURM_.*(?:CLUSTER_NAME|JOB_NAME|PARTITION|RESERVATION|QOS|WCKEY)$|^OMPI_.*REGEX$"
    r"|^PET_RDZV_ID$|^SLURM_.*LICENSES$"
)
"""Names that somebody chose: of clusters, queues, jobs and projects."""

HOST_KEYS = _words("""
host hosts hostname host_name host_names node_name nodename fqdn canonical query answers master_addr
master_address to_host from_host peer_host links hosts_or_ranks_tested launch_node own_name
expected_hosts
""")
"""Keys of facts and evidence behind which names of hosts stand, among others."""
LABEL_KEYS = _words("""
run_id job_name project team workspace experiment_name entity leaf_switch
""")
ID_KEYS = _words("""
machine_id boot_id container_id
""")
PATH_KEYS = re.compile(
    r"(?:^|_)(?:path|paths|file|folder|dir|directory|cwd|outputs|config|redact_key)$"
)
VERSION_KEYS = re.compile(
    r"version|^torch|cuda|cudnn|nccl|^nvidia|driver|firmware|(?:^|_)fw|python|release|kernel"
    r"|deepspeed|libc|build|_sha|vbios|-cu\d\d$|wheels"
)
"""Keys behind which four numbers are a version."""
SERIAL_KEYS = re.compile(r"serial|asset_tag")

LOCAL_ROOTS = ("/dev", "/proc", "/sys", "/lib", "/lib64", "/bin", "/sbin", "/usr")
"""What lies there is named by the system: it stays, but for what is beneath `/usr/local`."""

PATH_WORDS = _words("""
    backup bin boot cache conf config core data dist-packages env etc export fsx gpfs home include
    lib lib64 libexec local lustre media mnt nfs opt private root run sbin scratch shared
    site-packages software spack src srv sys tmp users usr var venv .venv .cache .local .config
    .conda .nccl.conf .deepspeed_env .triton .ssh conda anaconda3 miniconda3 miniforge3 envs pkgs
    nccl.conf nccl-doctor.toml pyproject.toml hosts hostname hostfile resolv.conf nsswitch.conf
    machine-id limits.conf limits.d sysctl.conf sysctl.d modprobe.d security systemd fstab
    daemon.json docker containers nvidia nvidia-smi cuda compat targets x86_64-linux
    x86_64-linux-gnu aarch64-linux-gnu stubs mpi openmpi ucx hpcx mellanox efa amazon aws-ofi-nccl
    log slurm slurmd termination-log shm lock serviceaccount secrets kubernetes.io python python3
    nccl-doctor torch nccl report.json report.txt manifest.json host_tmp jobs logs
    """)
"""Parts of a path that are much the same everywhere."""

PACKAGES = _words("""
    torch nvidia deepspeed nccl_doctor nccl numpy triton transformers accelerate mpi4py psutil
    importlib concurrent multiprocessing threading.py socket.py subprocess.py runpy.py asyncio json
    lightning pytorch_lightning megatron apex flash_attn cupy functorch torchvision click tabulate
    """)
"""Below `site-packages`: whose files stay as they are."""
PYTHON_HOME = re.compile(r"site-packages|dist-packages|python3\.\d+")

PATH_PATTERN = re.compile(
    r"[\d.,%*?<>{}$-]*(?:%[a-z][\d.,%*?-]*)*|\.{1,2}"
    r"|(?:python|cuda|cudnn|nccl|rocm|openmpi|nvidia|gcc|node|rank)[-_.]?v?[\d.]*"
    r"|lib[\w+-]*\.so(?:\.\d+)*|python[\d.]*-config",
    re.IGNORECASE,
)
"""Parts of a path that are made of a version, a library's name or a place-holder."""
ENDINGS = _words("""
py sh json yaml yml toml txt log out err xml cfg conf so ini ipynb md html prom csv gz tar
sock pid lock deb rpm whl pem crt
""")
GROUP_FILE = re.compile(r"(?:cpu|memory)\.[\w.]+")
"""A setting of a control group, by which a path is known to lead through such groups."""
GROUP_PART = re.compile(
    rf"{GROUP_FILE.pattern}|(?:cpu|cpuacct|memory|unified|systemd)(?:,\w+)*"
    r"|(?:system|user|machine|init|app|session|background|docker|podman|containerd|crio|libpod\w*"
    r"|slurm\w*|kubepods[\w-]*|burstable|besteffort)(?:\.(?:service|scope|slice))?"
    r"|(?:user[-@]|session-c?|uid_)\d+(?:\.\w+)?|(?:job|step|task)_\w+"
)
"""Control groups that systemd, Slurm and runtimes of containers make under the same names."""
