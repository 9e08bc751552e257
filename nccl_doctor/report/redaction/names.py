"""Names of hosts, users and what else people name, and which of them a record holds. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from nccl_doctor.report.redaction.book import Book
from nccl_doctor.system.masking import MASK
from nccl_doctor.toolkit.slurm import slurm_hosts

# Words that are never replaced: they identify no one, and a report needs them to be readable.


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


COMMON = words("""
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

DEVICES = words("""
args axes axis bnxt bonds channel channels cores cpus cxi dim dims efa elements en eno enp ens eths
gpus hcas hfi ibp ibs indices irdma irq irqs lane lanes layers list lists mlx mlx5 nics nvme
nvmes pages queues roce seats sd shape slots sockets threads veth vfs wlan
""")
"""Words before numbers in brackets that name parts of a host, or anything but a host."""

LOCAL_NAMES = words("""
localhost localhost.localdomain ip6-localhost ip6-loopback localhost4 localhost6
""")

SYSTEM_USERS = words("""
root nobody daemon git ubuntu ec2-user centos azureuser opc vagrant
""")

PUBLIC_DOMAINS = words("""
github.com githubusercontent.com nvidia.com pytorch.org deepspeed.ai kernel.org python.org
readthedocs.io schedmd.com open-mpi.org kubernetes.io man7.org rfc-editor.org ietf.org
""")
"""Addresses in fixes and references lead there."""

TOP_LEVEL = words("""
com corp edu gov internal intra intranet lan local net org
""")
COUNTRIES = words("""
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

HOST_KEYS = words("""
host hosts hostname host_name host_names node_name nodename fqdn canonical query answers master_addr
master_address to_host from_host peer_host links hosts_or_ranks_tested launch_node own_name
expected_hosts
""")
"""Keys of facts and evidence behind which names of hosts stand, among others."""
LABEL_KEYS = words("""
run_id job_name project team workspace experiment_name entity leaf_switch
""")
ID_KEYS = words("""
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

PATH_WORDS = words("""
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

PACKAGES = words("""
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
ENDINGS = words("""
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


_HOST = re.compile(r"(?=.{1,253}\.?$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.?)+", re.I)
_EC2 = re.compile(r"ip-\d{1,3}(?:-\d{1,3}){3}|ip-(?:[0-9a-f]{1,4}-){2,7}[0-9a-f]{1,4}", re.I)
_VARIABLE = re.compile(
    r"(?:SLURM|OMPI|PMIX?|PET|MASTER|TORCHELASTIC|MPI|MV2|NCCL|LOCAL|WORLD|GROUP|NODE|KUBERNETES)_"
)
"""A launch says of each field which variable it is from."""
_USER = re.compile(r"[A-Za-z_][\w.-]{0,63}")
_PIECES = re.compile(r"([-_.])")
_DIGITS = re.compile(r"\d+")
_PADDED = re.compile(r"[\[,-]0\d")
_MOST_LISTED, _MOST_BRACKETS = 4096, 5
"""Hosts, and numbers in brackets, of one list in free text; of a longer one none is shown."""
_MOST_SHOWN = 64
"""Hosts of one list in free text that get their pseudonyms; the others are counted."""
_MOST_LEARNT = 65_536
"""Hosts that lists in free text may tell: more than any cluster has."""
_MOST_EXPANDED = 1_000_000
"""Hosts of all lists in free text: a hostile text is full of lists."""
_MOST_PIECES = 12
"""Of a name that are joined by dots and dashes."""


def is_host_name(text: str) -> bool:
    """True if a text can be the name of a host: no number, no address, and not this host's own."""
    bare = text.rstrip(".")
    return (
        bool(_HOST.fullmatch(bare))
        and any(c.isalpha() for c in bare)
        and not _VARIABLE.match(bare)
        and bare.lower() not in LOCAL_NAMES
    )


def is_public(name: str) -> bool:
    """True if a host belongs to no cluster: documentation and sources that fixes refer to."""
    lower = name.lower()
    return any(lower == each or lower.endswith("." + each) for each in PUBLIC_DOMAINS)


class KnownNames:
    """The names that a record is known to hold, and their pseudonyms.

    Names of hosts are told apart without regard to case. A name with a domain has the pseudonym of
    its first label, a dot, and the domain's, so that both forms are seen to be one host.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._hosts: set[str] = set()
        self._families: set[str] = set()
        self._users: set[str] = set()
        self._domains: set[str] = set()
        self._left = _MOST_EXPANDED
        self._expanded = lru_cache(maxsize=256)(self._hosts_of)
        self.list_of = lru_cache(maxsize=4096)(self._list_of)
        self.in_word = lru_cache(maxsize=65536)(self._in_word)

    def know_host(self, name: str) -> None:
        """A host of this name is in the record; what cannot be one is not noted."""
        if not is_host_name(name):
            return
        short, _, domain = name.rstrip(".").lower().partition(".")
        if short in self._hosts and (not domain or domain in self._domains):
            return
        self.in_word.cache_clear()
        self.list_of.cache_clear()
        self._hosts.add(short)
        if re.search(r"[a-z]{2}", short) and re.search(r"\d", short):
            stem = re.sub(r"[\d_-]+$", "", short)
            if stem not in COMMON and stem.rstrip("0123456789") not in COMMON:
                self._families.add(_DIGITS.sub("#", short))
        if domain and domain not in PUBLIC_DOMAINS:
            self._domains.add(domain)

    def know_list(self, text: str) -> None:
        """A host list stands in free text: its hosts are in the record."""
        if len(self._hosts) < _MOST_LEARNT and _looks_like_hosts(text):
            for name in self._expanded(text):
                self.know_host(name)

    def _list_of(self, text: str) -> str | None:
        """The pseudonyms of the hosts of a list, `gpu[001-003]`; None where it is none of hosts."""
        hosts = self._expanded(text)
        if not (_looks_like_hosts(text) or any(map(self.knows_host, hosts[:_MOST_SHOWN]))):
            return None
        shown = ",".join(map(self.host, hosts[:_MOST_SHOWN])) or MASK
        more = len(hosts) - _MOST_SHOWN
        return f"{shown} and {more} more" if more > 0 else shown

    def _hosts_of(self, text: str) -> tuple[str, ...]:
        """The hosts of a list; none if it is too long."""
        if len(text) > _MOST_LISTED or text.count("[") > _MOST_BRACKETS or self._left < 0:
            return ()
        hosts = slurm_hosts(text, _MOST_LISTED)
        self._left -= len(hosts) or _MOST_LISTED
        return hosts

    def know_user(self, name: str) -> None:
        """A user of this name is in the record."""
        if _USER.fullmatch(name) and name not in SYSTEM_USERS and name not in self._users:
            self.in_word.cache_clear()
            self._users.add(name)

    def host(self, name: str) -> str:
        """The pseudonym of a host's name, whether it is known or not; of `localhost`, itself."""
        bare = name.rstrip(".")
        if bare.lower() in LOCAL_NAMES:
            return name
        short, dot, domain = bare.lower().partition(".")
        if dot and is_public(bare.lower()):
            return name
        made = self._book.pseudonym("host", short, shown=bare.partition(".")[0])
        return f"{made}.{self.domain(domain)}" if dot else made

    def domain(self, name: str) -> str:
        """The pseudonym of a domain."""
        return self._book.pseudonym("domain", name.lower())

    def user(self, name: str) -> str:
        """The pseudonym of a user; that of a system's own user is the same name."""
        return name if name in SYSTEM_USERS else self._book.pseudonym("user", name)

    def label(self, name: str) -> str:
        """Pseudonym of a name that a user chose: of a cluster, a queue, a job."""
        return self._book.pseudonym("name", name)

    def knows_host(self, name: str) -> bool:
        """True if the record holds a host of this name, with or without its domain."""
        short = name.lower().partition(".")[0]
        return short in self._hosts or bool(_EC2.fullmatch(short)) or self._in_family(short)

    def _in_word(self, word: str) -> str:
        """A word of free text (letters and digits, joined by `-`, `_` or `.`), with the known names
        in it replaced.
        """
        lower = word.lower()
        if lower in LOCAL_NAMES or is_public(lower):
            return word
        if self._is_foreign_host(lower):
            return self.host(word)
        pieces = _PIECES.split(word)
        out: list[str] = []
        at = 0
        while at < len(pieces):
            end = self._longest(pieces, at)
            if end is None:
                out.append(pieces[at])
                at += 1
                continue
            out.append(self._replaced("".join(pieces[at:end])))
            at = end
            if at < len(pieces) and pieces[at] == "." and _is_domain(pieces[at + 1 :]):
                out.append("." + self.domain("".join(pieces[at + 1 :])))
                break
        return "".join(out)

    def _is_foreign_host(self, lower: str) -> bool:
        """True if a word with dots is a host's full name, though no such host is known."""
        _, dot, domain = lower.partition(".")
        if not dot:
            return bool(_EC2.fullmatch(lower))
        if "_" in lower:
            return False
        last = lower.rpartition(".")[2]
        return (
            any(domain == each or domain.endswith("." + each) for each in self._domains)
            or last in TOP_LEVEL
            or ("." in domain and last in COUNTRIES)
            or bool(_EC2.fullmatch(lower.partition(".")[0]))
        )

    def _longest(self, pieces: list[str], start: int) -> int | None:
        """End of the longest known name that begins at a piece."""
        if start % 2:  # a separator
            return None
        last = min(len(pieces), start + 2 * _MOST_PIECES - 1)
        for end in range(last, start, -2):
            text = "".join(pieces[start:end])
            if self._is_known(text):
                return end
        return None

    def _is_known(self, text: str) -> bool:
        lower = text.lower()
        if len(text) < 2 or lower in COMMON:
            return False
        return (
            lower in self._hosts
            or text in self._users
            or self._in_family(lower)
            or bool(_EC2.fullmatch(lower))
        )

    def _replaced(self, text: str) -> str:
        lower = text.lower()
        if text in self._users and lower not in self._hosts:
            return self.user(text)
        return self.host(text)

    def _in_family(self, lower: str) -> bool:
        """True if it is like a known name, but for its numbers: `nd7`, where `nd0` is known."""
        return bool(self._families) and _DIGITS.sub("#", lower) in self._families


def _looks_like_hosts(text: str) -> bool:
    """True if a word with several numbers in brackets lists hosts: the numbers are padded, or the
    word before them is not one for parts of a host.
    """
    stem = text.partition("[")[0].rstrip("0123456789_-.").lower()
    several = "," in text or "-" in text.partition("[")[2]
    is_thing = len(stem) < 2 or stem in COMMON or stem in DEVICES
    return several and (bool(_PADDED.search(text)) or not is_thing)


def _is_domain(pieces: list[str]) -> bool:
    """True if what follows a host's name and a dot is a domain, and not the ending of a file."""
    last = pieces[-1].lower()
    return "_" not in pieces and last.isalpha() and len(last) > 1 and last not in ENDINGS
