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


def main(python: str, door: str) -> None:
    words = sys.argv[1:]
    while words[:1] == ["-u"]:
        del words[0]
    if len(words) < 2 or words[0] != "-m":
        os.execv(python, [python, *sys.argv[1:]])
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    sock.connect(door)
    env = [f"{name}={value}" for name, value in os.environ.items()]
    fields = [str(len(words) - 1), *words[1:], *env]
    handles = [0, 1, 2, os.open(".", os.O_PATH)]
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
