"""Rows of the comparison: a host, variables and configuration files. Data alone.

`@etc`, `@home`, `@owner`, `@named` in `files` are /etc/nccl.conf, .nccl.conf in the folder that
HOME names, the one in the home folder of the user database, and the file that NCCL_CONF_FILE may
name; in values, `@named` is the path of that file, and `@log` that of a file that nobody may write.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

IFNAME, FAMILY, COMM_ID = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID"
CONF, PLUGIN = "NCCL_CONF_FILE", "NCCL_ENV_PLUGIN"

HOSTS: dict[str, str] = {
    "many": """
        add eth0 fe80::1/64
        nic eth1 10.1.0.1/16
        label eth1 eth1:1 10.2.0.1/24
        nic six0 2001:db8:6::1/64 fe80::6/64
        nic eth10 192.168.88.1/24 2001:db8:88::1/64 fe80::a/64
        nic docker0 172.17.0.1/16
        nic virbr0 192.168.122.1/24
        nic down0 192.168.99.1/24
        cut down0
        nic bare0
    """,
    "ib": """
        nic eth1 10.1.0.1/16
        nic ib0 10.9.0.1/24
        nic ibs1 10.8.0.1/24
    """,
    "six": """
        flush eth0
        nic six0 2001:db8:6::1/64
    """,
    "inside": """
        flush eth0
        nic virbr0 192.168.122.1/24
        nic docker0 172.17.0.1/16
    """,
    "alone": """
        flush eth0
    """,
}
"""What each host has beside lo and eth0 (192.168.77.x), a line a step; `cut`: no carrier."""


@dataclass(frozen=True)
class Row:
    """One question. `quick`: `make test` asks it too."""

    host: str
    env: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)
    quick: bool = False
    plugin: str = ""

    @property
    def text(self) -> str:
        """In words, unique."""
        said = [f"`{name}={_short(value)}`" for name, value in self.env.items()]
        said += [f"{name[1:]}: `{_short(text)}`" for name, text in self.files.items()]
        return "; ".join(said) or "nothing set"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def _short(text: str) -> str:
    text = text.encode("unicode_escape").decode()
    return text if len(text) < 60 else f"{text[:24]}… ({len(text)} characters)"


def _many(name: str, *values: str, quick: tuple[str, ...] = (), **more: str) -> list[Row]:
    return [Row("many", {name: value, **more}, quick=value in quick) for value in values]


_SEVENTEEN = ",".join([*(f"x{number}" for number in range(16)), "eth10"])
_EXCLUDED = ",".join([*(f"x{number}" for number in range(16)), "eth0"])
_WINDOWS = f"{IFNAME}==eth10\r\n"

ROWS: tuple[Row, ...] = (
    Row("many", {}, quick=True),
    Row("ib", {}, quick=True),
    Row("six", {}),
    Row("inside", {}),
    Row("alone", {}),
    # Lists of names.
    *_many(
        IFNAME,
        *("", "e", "^", "=", "^=", "eth", "eth1", "=eth1", "=eth10", "eth10,docker0"),
        *("docker0,eth10", "^eth", "^eth0", "^=eth1", "^=eth0,lo,eth1", "^docker,lo,virbr"),
        *("eth10:4791", "=eth10:1:2:3", ":1,eth10", "==eth10", "=^eth10", "^^eth0", " eth10"),
        *("eth10 ", "eth10,", ",,eth10", "ETH10", "lo", "=lo", "docker", "virbr", "down0"),
        *("bare0", "wlan0", "wlan0,eth10", "down0,eth10", "eth1:1", "six0", "=six0"),
        *(_SEVENTEEN, f"={_SEVENTEEN}", f"^{_EXCLUDED}"),
        quick=("^=eth0,lo,eth1", "==eth10", "down0"),
    ),
    *(Row("ib", {IFNAME: value}) for value in ("=eth0", "^ib", "^ib0", "eth1", "ib", "=ib")),
    *(Row("inside", {IFNAME: value}) for value in ("virbr", "^docker0", "^docker0,lo")),
    Row("alone", {IFNAME: "eth0"}),
    # Families.
    *_many(FAMILY, "AF_INET", "AF_INET6", "AF_UNSPEC", "", quick=("AF_INET6",)),
    *_many(FAMILY, "AF_INET6", **{IFNAME: "^eth0"}, quick=("AF_INET6",)),
    *_many(FAMILY, "AF_INET6", **{IFNAME: "=eth10"}),
    *_many(FAMILY, "AF_INET6", **{IFNAME: "=lo"}),
    *_many(FAMILY, "AF_INET", **{IFNAME: "six"}),
    Row("six", {FAMILY: "AF_INET"}),
    Row("six", {IFNAME: "^lo"}),
    # The root of the bootstrap.
    *_many(
        COMM_ID,
        *("192.168.88.7:5000", "192.168.88.7", "10.1.9.9:1", "10.2.0.9:1", "192.168.99.9:1"),
        *("127.0.0.1:1", "8.8.8.8:1", "172.17.3.3:1", "nd0:1", "localhost:1", "nobody:1", "", "1"),
        *(",192.168.88.7:1", "fe80::1", "[2001:db8:88::9]:1", "[2001:db8:6::9]:1", "[::1]:1"),
        *("[fe80::9%six0]:1", "[fe80::9%eth10]:1", "[fe80::9]:1", "[2001:db8:88::9"),
        *("[2001:db8:88::9%eth77]:1", "[2001:db8:88::9%eth10]:1"),
        quick=("192.168.88.7:5000", "nobody:1"),
    ),
    *_many(COMM_ID, "192.168.88.7:1", **{IFNAME: "=eth1"}),
    *_many(COMM_ID, "192.168.88.7:1", **{FAMILY: "AF_INET6"}),
    Row("ib", {COMM_ID: "10.1.9.9:1"}),
    Row("six", {COMM_ID: "[2001:db8:6::9]:1"}),
    # Configuration files.
    Row("many", {}, {"@etc": f"{IFNAME}==eth10\n"}, quick=True),
    Row("many", {}, {"@home": f"{IFNAME}==eth10\n"}, quick=True),
    Row("many", {}, {"@owner": f"{IFNAME}==eth10\n"}),
    Row("many", {}, {"@home": f"{IFNAME}==eth10\n", "@owner": f"{IFNAME}==eth1\n"}),
    Row("many", {}, {"@home": f"{IFNAME}==eth10\n", "@etc": f"{IFNAME}==eth1\n"}),
    Row("many", {}, {"@owner": f"{IFNAME}==eth10\n", "@etc": f"{IFNAME}==eth1\n"}),
    Row("many", {"HOME": ""}, {"@owner": f"{IFNAME}==eth10\n"}),
    Row("many", {"HOME": "-"}, {"@owner": f"{IFNAME}==eth10\n"}),
    Row("many", {IFNAME: "=eth1"}, {"@etc": f"{IFNAME}==eth10\n"}),
    Row("many", {IFNAME: ""}, {"@etc": f"{IFNAME}==eth10\n"}),
    Row("many", {CONF: "@named"}, {"@named": f"{IFNAME}==eth10\n", "@home": f"{IFNAME}==eth1\n"}),
    Row("many", {CONF: "@named"}, {"@named": "NCCL_ALGO=Ring\n", "@home": f"{IFNAME}==eth1\n"}),
    Row("many", {CONF: "@named"}, {"@named": f"{IFNAME}==eth10\n", "@etc": f"{IFNAME}==eth1\n"}),
    Row("many", {CONF: "/nonexistent"}, {"@home": f"{IFNAME}==eth1\n"}),
    Row("many", {CONF: "/nonexistent"}, {"@etc": f"{IFNAME}==eth1\n"}),
    Row("many", {CONF: ""}, {"@home": f"{IFNAME}==eth1\n", "@owner": f"{IFNAME}==eth1\n"}),
    Row("many", {}, {"@home": f"{CONF}=@named\n", "@named": f"{IFNAME}==eth1\n"}),
    Row("many", {}, {"@etc": _WINDOWS}),
    Row("many", {}, {"@etc": f"{IFNAME}==eth10\r\r\n"}),
    Row("many", {}, {"@etc": f"# ours\n{IFNAME}==eth10"}),
    Row("many", {}, {"@etc": f"#{IFNAME}==eth10\n"}),
    Row("many", {}, {"@etc": f" #{IFNAME}==eth10\n"}),
    Row("many", {}, {"@etc": f" {IFNAME}==eth10\n"}),
    Row("many", {}, {"@etc": f"{IFNAME} ==eth10\n"}),
    Row("many", {}, {"@etc": f"{IFNAME}= =eth10\n"}),
    Row("many", {}, {"@etc": f"{IFNAME}==eth10 # ours\n"}),
    Row("many", {}, {"@etc": f'{IFNAME}="=eth10"\n'}),
    Row("many", {}, {"@etc": f"export {IFNAME}==eth10\n"}),
    Row("many", {}, {"@etc": f"{IFNAME}\n=eth10\n\nnonsense\n{IFNAME}==eth10\n"}),
    Row("many", {}, {"@etc": f"{IFNAME}==eth10\n{IFNAME}==eth1\n"}),
    Row("many", {}, {"@etc": f"{IFNAME}=\n"}),
    Row("many", {}, {"@etc": f"{IFNAME}={'x' * 1020},eth10,eth1\n"}),
    Row("many", {}, {"@etc": f"{COMM_ID}=192.168.88.7:1\n"}),
    Row("many", {}, {"@etc": f"{FAMILY}=AF_INET6\nNCCL_ALGO=Ring\nMY_TOKEN=x\n"}, quick=True),
    Row("many", {}, {"@etc": "NCCL_DEBUG_FILE=@log\nNCCL_DEBUG=WARN\n"}, quick=True),
    Row("many", {"NCCL_DEBUG_FILE": "@log", "NCCL_DEBUG": "TRACE"}),
    # The plug-in for variables.
    Row("many", {PLUGIN: "@plugin"}, plugin=f"{IFNAME}==eth10", quick=True),
    Row("many", {PLUGIN: "@plugin", IFNAME: "=eth1"}, plugin=f"{IFNAME}==eth10"),
    Row("many", {PLUGIN: "@plugin"}, {"@etc": f"{IFNAME}==eth1\n"}, plugin=f"{IFNAME}==eth10"),
    Row("many", {PLUGIN: "none"}, {"@etc": f"{IFNAME}==eth1\n"}),
    Row("many", {PLUGIN: "/nonexistent.so"}, {"@etc": f"{IFNAME}==eth1\n"}),
)
