"""Many calls of the program from one start of Python, which imports everything before them.

Importing takes most of the time of a call. Where the start itself is not what is tested, one of
them is enough for all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from subprocess import CompletedProcess

_IN_ONE = """
import json, os, sys, tempfile

from nccl_doctor.__main__ import program

streams = [os.dup(number) for number in (1, 2)]
ended = []
for folder, words in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.argv = ["nccl-doctor", *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code = program()
        sys.stdout.flush()
        sys.stderr.flush()
        ended.append([code, *(file.seek(0) or file.read() for file in (out, err))])
for number, stream in enumerate(streams, 1):
    os.dup2(stream, number)
print(json.dumps(ended))
"""
"""Calls in one process, without the one that watches each: for those that end before they begin."""

_CODE = """
import json, os, sys, tempfile

{before}
ended = []
for words in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["nccl-doctor", *words]
            {call}
            os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended.append([code, *(file.seek(0) or file.read() for file in (out, err))])
print(json.dumps(ended))
"""


def code(before: str, call: str) -> str:
    """Python that does what comes `before`, then `call` in a child for each list of words of its
    first argument, and prints how they ended.
    """
    return _CODE.format(before=before, call=call)


def in_one() -> str:
    """Python that makes the calls of its first argument, of folders and words, one after the other
    in this process, and prints how they ended.
    """
    return _IN_ONE


def ended(
    lists: Sequence[Sequence[str]], done: CompletedProcess[str]
) -> list[CompletedProcess[str]]:
    """End of each call, from how that Python ended."""
    assert (done.returncode, done.stderr) == (0, "")
    return [
        CompletedProcess(words, code, stdout, stderr)
        for words, (code, stdout, stderr) in zip(lists, json.loads(done.stdout), strict=True)
    ]
