"""Findings about hosts where nccl-doctor could not be started, with the message of ssh.

The phrases are those of OpenSSH's client (ssh.c, sshconnect.c, packet.c), the same since 7.x.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nccl_doctor.launch.ssh.connection import MARKER, MORE, CommandEnd
from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Finding, Kind, Where
from nccl_doctor.model.fixes import Fix, Step, fill, look
from nccl_doctor.model.kinds import (
    CONFIG_BAD_VALUE,
    LAUNCHING,
    REMOTE_COMMAND_FAILED,
    RUN_INTERRUPTED,
    SSH_FAILED,
)
from nccl_doctor.system.terminal import safe

_SSH_EXIT = 255
"""Exit code of ssh itself; also of a command that was killed by a signal."""
_NOT_FOUND = (126, 127)
_USAGE = 2
_WORDS_MAX = 240

_PHRASES = (  # (in what ssh says, what to do); ADDRESS is the host as ssh is given it, NAME
    # less the user. The message is what `words` and `more` match: all but the name of the host.
    (
        r"(?P<words>Could not resolve hostname) [^\s:]+(?P<more>: .*)",
        "correct the name in the hostfile, or give it an address on the host that launches the "
        "job: DNS, /etc/hosts, or HostName in ~/.ssh/config",
    ),
    (
        r"connect to host \S+ (?P<words>port \d+: Connection refused)",
        Fix(
            Step(shell("systemctl start ssh"), undo=shell("systemctl stop ssh"), note="as root"),
            alternatives=["set the port of its ssh server in ~/.ssh/config"],
        ),
    ),
    (
        r"connect to host \S+ (?P<words>port \d+: (?:Connection|Operation) timed out)",
        Fix(
            look(shell("ping -c 3 NAME"), "is the host up?", on=LAUNCHING),
            alternatives=["see that no firewall drops the port"],
        ),
    ),
    (
        r"connect to host \S+ (?P<words>port \d+: .*)",
        Fix(look(shell("ip route get NAME"), "is the host up, and this the route?", on=LAUNCHING)),
    ),
    (
        r"(?P<words>REMOTE HOST IDENTIFICATION HAS CHANGED)",
        Fix(
            Step(shell("# ssh-keygen -R NAME"), LAUNCHING, note="if the host was reinstalled"),
            Step(shell("# ssh ADDRESS true"), LAUNCHING, note="once by hand"),
            alternatives=["find out why the host key has changed"],
        ),
    ),
    (
        r"(?P<words>Host key verification failed)",
        Fix(
            Step(
                shell("# ssh ADDRESS true"),
                LAUNCHING,
                note="once by hand; compare the key it shows",
            ),
            alternatives=[Fix(Step(shell("# ssh-keyscan NAME >> ~/.ssh/known_hosts"), LAUNCHING))],
        ),
    ),
    (
        r"(?P<words>Permission denied \(.*\)|Too many authentication failures)",
        Fix(
            Step(
                shell("# ssh-copy-id ADDRESS"), LAUNCHING, note="the log-in then needs no password"
            ),
            alternatives=["load the key into the ssh-agent"],
        ),
    ),
    (
        r"(?P<words>[Bb]ad configuration option.*|Bad owner or permissions on .*)",
        "correct the ssh configuration on the host that launches the job",
    ),
    (
        r"(?P<words>(?:kex|ssh)_exchange_identification: .*"
        r"|Connection (?:closed|reset) by|Connection timed out during banner exchange)",
        Fix(
            look(shell("journalctl -u ssh"), "why its ssh server closed the connection"),
            alternatives=[
                "possible causes: too many sessions at once (MaxStartups), no memory left, or "
                "another service on this port"
            ],
        ),
    ),
)


@dataclass(frozen=True)
class _Fault:
    """One fault of one or more hosts; `fix` may name {to}, {name}, and of our own words {python}
    , {program} (all of them) and {file} (the last).
    """

    kind: Kind
    message: str
    fix: str = ""


@dataclass(frozen=True)
class SilentHost:
    """A host that nothing was heard of: as the report calls it, as ssh is given it, its end."""

    host: str
    name: str
    to: str
    ended: CommandEnd


def findings(failed: Iterable[SilentHost], own_words: Sequence[str]) -> list[Finding]:
    """One finding for each way to fail, with all hosts that failed that way.

    `own_words` are those that were to start this program there. The whole end of what each host
    complained is in the evidence.
    """
    same: dict[_Fault, list[SilentHost]] = defaultdict(list)
    for one in failed:
        same[_fault(one, own_words)].append(one)
    return [
        Finding(
            fault.kind,
            fault.message,
            Where(hosts=tuple(sorted(one.host for one in group))),
            evidence={"each": [_evidence(one) for one in group]}
            if len(group) > 1
            else _evidence(group[0]),
            fix=fill(fault.fix, ADDRESS=group[0].to, NAME=group[0].name),
        )
        for fault, group in same.items()
    ]


def _evidence(one: SilentHost) -> Mapping[str, object]:
    return {
        "ssh": one.to,
        "exit": one.ended.code,
        "seconds": one.ended.seconds,
        "stderr": _lines(one.ended.stderr)[-20:],
    }


def _fault(one: SilentHost, own_words: Sequence[str]) -> _Fault:
    ended = one.ended
    words = _last_words(one)
    if ended.code is None and not ended.ready:
        return _Fault(
            REMOTE_COMMAND_FAILED,
            f"the log-in was not complete after {ended.seconds:.0f} s",
            "log in to the host by hand: a home folder on a file server that does not answer, or "
            "a start-up script that waits, blocks the log-in",
        )
    if ended.code is None:
        return _Fault(RUN_INTERRUPTED, f"no report in time{_said(words)}")
    if ended.code == _SSH_EXIT:
        return _lost(words) if ended.ready else _refused(one, words)
    text = "\n".join(_lines(ended.stderr))
    complaint = re.search(r"^nccl-doctor: error: (.*)", text, re.MULTILINE)
    if ended.code == _USAGE and complaint:
        return _Fault(CONFIG_BAD_VALUE, complaint[1])
    text = f"exit {ended.code}{_said(words)}"
    if ended.code in _NOT_FOUND:
        fix = f"install the same Python environment on the host, so that {own_words[0]} exists"
        return _Fault(REMOTE_COMMAND_FAILED, text, fix)
    if re.search(r"No module named '?nccl_doctor", text):
        return _Fault(
            REMOTE_COMMAND_FAILED,
            text,
            Fix(Step(shell("{} -m pip install nccl-doctor", own_words[0]), persists=True)),
        )
    if "can't open file" in text:
        fix = f"put {own_words[-1]} at the same path on the host"
        return _Fault(REMOTE_COMMAND_FAILED, text, fix)
    again = shell("ssh ADDRESS {} env", own_words)
    return _Fault(REMOTE_COMMAND_FAILED, text, Fix(look(again, on=LAUNCHING)))


def _refused(one: SilentHost, words: str) -> _Fault:
    text = "\n".join(_lines(one.ended.stderr))
    for phrase, fix in _PHRASES:
        found = re.search(phrase, text)
        if found:
            more = found.groupdict().get("more", "")
            return _Fault(SSH_FAILED, found["words"] + more, fix)
    nothing = "ssh ended with exit code 255 and printed nothing"
    return _Fault(
        SSH_FAILED, words or nothing, Fix(look(shell("ssh -v ADDRESS true"), on=LAUNCHING))
    )


def _lost(words: str) -> _Fault:
    if words:
        return _Fault(RUN_INTERRUPTED, f"the ssh connection was lost: {words}")
    return _Fault(RUN_INTERRUPTED, "killed on the host, or the ssh connection was cut")


def _last_words(one: SilentHost) -> str:
    """The last line that says something, without the names of the host."""
    lines = [line for line in _lines(one.ended.stderr) if not line.startswith((MARKER, MORE))]
    words = lines[-1] if lines else ""
    for name in (one.to, one.name):
        words = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", "the host", words)
    return words[:_WORDS_MAX]


def _lines(text: str) -> list[str]:
    return [line for line in map(safe, text.splitlines()) if line]


def _said(words: str) -> str:
    return f": {words}" if words else ""
