"""Error texts of torch and NCCL, as seen, and what they mean."""

from __future__ import annotations

import pytest

from nccl_doctor.tools.groups.errors import meaning_of

NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, "
STORE = "DistNetworkError: The client socket has timed out after 60000ms while trying to connect "


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
         "not all ranks connected"),
        ("DistStoreError: wait timeout after 60000ms, keys: /worker/0/init/3", "never published"),
        (f"[W socket.cpp] getaddrinfo failed (gai error: -2 - Name or service not known)\n{STORE}",
         "cannot be resolved"),
        (f"[W socket.cpp:755] failed to connect (errno: 111 - Connection refused).\n{STORE}",
         "nothing listens"),
        (f"{STORE}to (nd0, 29500).", "dropped"),
        ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] timed out connecting: "
         "SO_ERROR: Connection refused, remote=[127.0.1.1]:4211", "loopback"),
        ("gloo/transport/tcp/pair.h:311] Connect timeout [none]", "victim"),
        ("DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from "
         "[0] via c10d key-value store by key '0', but store->get('0') got error: x", "first rank"),
        (f"{NCCL}remote process exited or there was a network error\nncclRemoteError: A call "
         "failed\nLast error:\nsocketProgress: Connection closed by remote peer nd1<4>", "exited"),
        (f"{NCCL}invalid usage\nncclInvalidUsage: x\nLast error:\n"
         "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 17000", "same GPU"),
        (f"{NCCL}ncclInvalidUsage\nMultiple Ranks are using the same GPU/Partition. Set X",
         "same GPU"),
        (f"{NCCL}unhandled system error\nncclSystemError: System call failed\nLast error:\n",
         "/dev/shm"),
        ("NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory", "locked"),
        ("Watchdog got stuck for 480 seconds without making progress", "hangs in this process"),
        ("WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600012 milliseconds before timing out.",
         "did not come"),
    ],
)  # fmt: skip
def test_a_known_text_has_a_meaning_and_a_question(text: str, word: str) -> None:
    for said in (text, text.upper(), f"{text}\n"):
        meaning = meaning_of(said)
        assert meaning is not None
        assert word in meaning.means
        assert meaning.ask


@pytest.mark.parametrize(
    "text",
    [
        "",
        "RuntimeError: CUDA error: out of memory",
        f"{NCCL}ncclSystemError: System call failed\nLast error:\nError: it says which",
        "\0\ud800 waiting for clients",
    ],
)
def test_other_text_has_none(text: str) -> None:
    assert meaning_of(text) is None


def test_a_huge_text_is_looked_at_from_its_end() -> None:
    assert meaning_of("x" * 5_000_000) is None
    assert meaning_of("x" * 5_000_000 + " Watchdog got stuck for 480 seconds") is not None
