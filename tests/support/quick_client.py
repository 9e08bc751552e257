"""A `python` that has torch imported as it starts: it asks the fork server to be it.

Runs without site and with modules of C only, so that it starts in some 15 ms. It stays as the
process that others see: signals go on to the real one, which ends with it. What cannot be forked
(options of Python, an environment that is read as Python or torch starts) runs in the Python that
it stands for. `tests.support.forkserver` puts the two lines before this text that it needs.
"""

import _socket
import os
import signal
import sys

FRESH, ENDED, KILLED = b"fresh", b"ended", b"killed"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def asked(words: list[str]) -> tuple[list[str], str]:
    """A module with its words, none if it is no such call, and the working directory.

    It may be called as `nccl_doctor.launch.ssh.program` calls it on another host.
    """
    if len(words) > 1 and words[0] == "-m":
        return words[1:], "."
    if (
        len(words) > 5
        and words[0] == "-c"
        and words[1].startswith("exec(")
        and words[4] == "module"
    ):
        return ["nccl_doctor", *words[6:]], words[2] if os.path.isdir(words[2]) else "."
    return [], "."


def main(python: str, door: str) -> None:
    words = sys.argv[1:]
    while words[:1] == ["-u"]:
        del words[0]
    module, folder = asked(words)
    if not module:
        os.execv(python, [python, *sys.argv[1:]])
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    sock.connect(door)
    env = [f"{name}={value}" for name, value in os.environ.items()]
    fields = [str(len(module)), *module, *env]
    handles = [0, 1, 2, os.open(folder, os.O_PATH)]
    packed = b"".join(handle.to_bytes(4, sys.byteorder) for handle in handles)
    for number in FORWARDED:
        # What is ignored stays so, as for any program.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sock.send(b"%d" % number))
    message = "\0".join(fields).encode(errors="surrogateescape")
    sock.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
    answer, _, number = sock.recv(100).partition(b" ")
    if answer == FRESH:
        os.execv(python, [python, *sys.argv[1:]])
    if answer == KILLED:
        if int(number) != signal.SIGKILL:
            signal.signal(int(number), signal.SIG_DFL)
        os.kill(os.getpid(), int(number))
    os._exit(int(number) if answer == ENDED else 1)
