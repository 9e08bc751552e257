"""Error texts of torch and NCCL, as seen, and what they mean."""

from __future__ import annotations

import pytest

from nccl_doctor.toolkit.groups.errors import meaning_of
from tests.support.fixes import in_full
from tests.support.rows import each_row

NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, "
HARMLESS = (
    "[W1123 socket.cpp:464] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
)
"""Said by every store whose clients have no name for their address: torch wanted it for its log."""
STORE = "DistNetworkError: The client socket has timed out after 60000ms while trying to connect "


@each_row(
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
        ("RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: "
         "nosuch0", "GLOO_SOCKET_IFNAME"),
        ("RuntimeError: [enforce fail at device.cc:125] bind_rv == 0. Unable to find address for "
         "nd1; bind(2) for [192.168.77.2] failed with: Address already in use", "no free port"),
        ("RuntimeError: [enforce fail at device.cc:285] ss1.ss_family == ss2.ss_family. 2 vs 10",
         "IPv6"),
        (f"{HARMLESS}[W socket.cpp:755] failed to connect (errno: 111 - x).\n{STORE}",
         "nothing listens"),
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
        # By the formats in crypt.cc and in the library of 2.32.3, and the first bytes of TLS.
        ("NCCL WARN NCCL was built without TLS support but a pre-shared key was configured",
         "built without TLS"),
        ("NCCL WARN ncclCrypt: failed to open libssl.so.3: libssl.so.3: cannot open shared object",
         "no OpenSSL 3"),
        ("NCCL ATTN TLS handshake from 10.0.0.2<41998> failed, discarding peer connection",
         "one end of a connection encrypts"),
        ("NCCL WARN ncclCrypt: TLS handshake with 10.0.0.2<41998> failed: error:0A000438:SSL",
         "one end of a connection encrypts"),
        ("NCCL ATTN Socket magic mismatch from 10.0.0.2<41998> (peer 0x"
         f"{int.from_bytes(bytes.fromhex('16030100dc010000'), 'little'):016x}"
         " != expected 0x1234567890abcdef), discarding peer connection",
         "one end of a connection encrypts"),
        ("Watchdog got stuck for 480 seconds without making progress", "hangs in this process"),
        ("RuntimeError: makeDeviceForHostname(): unsupported gloo device", "GLOO_DEVICE_TRANSPORT"),
        ("WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600012 milliseconds before timing out.",
         "did not enter"),
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
        "RuntimeError: CUDA error: device-side assert triggered",
        HARMLESS,
        f"{NCCL}ncclSystemError: System call failed\nLast error:\nError: it says which",
        "\0\ud800 waiting for clients",
    ],
)
def test_other_text_has_none(text: str) -> None:
    assert meaning_of(text) is None


def test_a_huge_text_is_looked_at_from_its_end() -> None:
    assert meaning_of("x" * 5_000_000) is None
    assert meaning_of("x" * 5_000_000 + " Watchdog got stuck for 480 seconds") is not None


# Whole outputs, as a rank of torch over NCCL leaves them ------------------------------------------

LOG = "nd1:802:817 [0] "


def raised(kind: str, last: str, log: str = "") -> str:
    """What NCCL logged, and torch's exception: its last line is NCCL's last warning."""
    return (
        f"{LOG}NCCL INFO NET/Plugin: Could not find: libnccl-net.so.\n"
        f"{LOG}{log or f'misc/any.cc:803 NCCL WARN {last}'}\n"
        f"{LOG}NCCL INFO transport.cc:197 -> 1\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/job/train.py", line 802, in <module>\n'
        f"{NCCL}unhandled error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\n"
        f"{kind}: Call failed.\nLast error:\n{last}\n"
    )


def cuda(error: str, place: str = "misc/any.cc:803") -> str:
    last = f"Cuda failure {error}"
    return raised("ncclUnhandledCudaError", last, f"{place} NCCL WARN {last}")


def network(last: str, place: str = "transport/net_ib.cc:2244") -> str:
    said = f"{place} NCCL WARN {last}"
    return raised("ncclRemoteError", "", f"{said}\n{LOG}NCCL INFO transport/net.cc:1227 -> 6")


COMPLETION = "NET/IB: Got completion from peer 10.0.0.2<4242> with status="
GIDS = "(Recv) localGid ::ffff:10.1.0.1 remoteGids::ffff:10.1.0.2 hca mlx5_1"
ASYNC = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Exception raised from c10_cuda_check at /pytorch/c10/cuda/CUDAException.cpp:802\n"
)


@each_row(
    ("text", "means", "ask"),
    [
        (raised("ncclSystemError", "Error: failed to extend /dev/shm/nccl-a1B2c3 to 33030532 "
                "bytes, error: No space left on device (28)"), "no room", "--shm-size"),
        (raised("ncclSystemError", "Call to posix_fallocate failed : No space left on device"),
         "no room", "--shm-size"),
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
         "shared memory (shm).\nRuntimeError: DataLoader worker (pid 802) is killed by signal",
         "no room", "--shm-size"),
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_802_1>: "
         "No space left on device (28)", "no room", "--shm-size"),
        (raised("ncclSystemError", "Error while attaching to shared memory segment "
                "/dev/shm/nccl-\x01 (size 0), error: No such file or directory (2)"),
         "another from /dev/shm", "NCCL_CUMEM_HOST_ENABLE=0"),
        (raised("ncclSystemError", "Error while attaching to shared memory segment "
                "/dev/shm/nccl-a1B2c3 (size 9637888), error: No such file or directory (2)"),
         "do not share /dev/shm", "--ipc=host"),
        (raised("ncclSystemError", "Accept failed: Too many open files"), "limit of open files",
         "ulimit -n"),
        (raised("ncclSystemError", "Call to pthread_create failed: Resource temporarily "
                "unavailable"), "threads", "ulimit -u"),
        (raised("ncclSystemError", "Call to ibv_create_cq failed with error Cannot allocate "
                "memory"), "locked", "ulimit -l"),
        (cuda("1 'invalid argument'", "transport/nvls.cc:311"), "NVLink SHARP",
         "NCCL_NVLS_ENABLE=0"),
        (cuda("217 'peer access is not supported between these two devices'",
              "transport/shm.cc:590"), "host memory from CUDA", "NCCL_CUMEM_HOST_ENABLE=0"),
        (cuda("217 'peer access is not supported between these two devices'",
              "transport/p2p.cc:287"), "each other's memory", "NCCL_P2P_DISABLE=1"),
        (cuda("801 'operation not supported'", "init.cc:426"), "virtual GPU", "enable_uvm=1"),
        (cuda("'operation not supported'", "transport/shm.cc:177"), "NUMA",
         "NCCL_CUMEM_HOST_ENABLE=0"),
        (cuda("802 'system not yet initialized'"), "NVSwitch fabric", "fabricmanager"),
        (cuda("'uncorrectable ECC error encountered'"), "ECC", "drain the host"),
        (cuda("2 'out of memory'"), "memory is used by", "nvidia-smi"),
        ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda "
         "functions before calling NumCudaDevices() that might have already set an error? Error "
         "802: system not yet initialized", "NVSwitch fabric", "fabricmanager"),
        (f"torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n{ASYNC}"
         "WorkNCCL(SeqNum=5) ran for 600012 milliseconds before timing out.", "ECC", "ECC"),
        (f"torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of "
         f"range, do you have enough GPUs?\n{ASYNC}", "with that number", "CUDA_VISIBLE_DEVICES"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 802.00 MiB. GPU 0 has a "
         "total capacity of 79.10 GiB", "memory is used by", "nvidia-smi"),
        ("RuntimeError: No backend type associated with device type cpu", "has no backend",
         "cpu:gloo,cuda:nccl"),
        ("RuntimeError: Tensors must be CUDA and dense", "has no backend", "cpu:gloo,cuda:nccl"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "no GPU",
         "--gpus"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
         "too old", "upgrade"),
        (raised("ncclInvalidUsage", "Mismatched NCCL version detected : rank 0 version 22703 "
                "rank 1 version 22602"), "different versions of NCCL", "image"),
        (network(f"{COMPLETION}12 opcode=0 len=0 vendor err 129 {GIDS}"), "not answered",
         "show_gids"),
        (network(f"{COMPLETION}IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RECV_RDMA_WITH_IMM(129) "
                 "vendor_err=129 hca mlx5_1"), "not answered", "show_gids"),
        (network("NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129"),
         "not answered", "show_gids"),
        (network(f"{COMPLETION}12 opcode=1 len=0 vendor err 129 (Send)\n"
                 f"{COMPLETION}5 opcode=1 len=0 vendor err 249 (Recv)"), "not answered",
         "show_gids"),
        (network(f"{COMPLETION}IBV_WC_LOC_LEN_ERR(1) opcode=IBV_WC_SEND(0) vendor_err=104"),
         "longer than", "MTU"),
        (network(f"{COMPLETION}1 opcode=129 len=4 vendor err 104 {GIDS}"), "longer than", "MTU"),
        (network(f"{COMPLETION}4 opcode=0 len=0 vendor err 81 (Send) hca mlx5_0"), "GPUDirect",
         "nvidia_peermem"),
        (network(f"{COMPLETION}5 opcode=0 len=0 vendor err 249 (Recv)"), "victim", "first error"),
        (raised("ncclSystemError", "", "NCCL WARN NET/OFI Could not find any optimal provider"),
         "libfabric offers no network", "fi_info"),
        (raised("ncclInternalError", "", "NCCL WARN NET/OFI Unable to insert remote address into "
                "address vector for device 0. RC: Operation timed out"), "security group",
         "security group"),
    ],
)  # fmt: skip
def test_a_whole_output_finds_its_own_row(text: str, means: str, ask: str) -> None:
    meaning = meaning_of(text)
    assert meaning is not None
    assert means in meaning.means
    assert ask in in_full(meaning.ask)


def test_what_is_no_line_of_cuda_s_gives_no_meaning_by_its_numbers() -> None:
    for text in (
        f"{LOG}NCCL INFO comm 0x1 rank 0 nranks 4 cudaDev 0 - Init COMPLETE\n802 803 done",
        f"{LOG}NCCL INFO cuMem host allocations do not appear to be working; falling back to a "
        "/dev/shm/ based implementation",
        f"{LOG}NCCL INFO NET/OFI Could not find any optimal provider supporting GPUDirect RDMA",
        f"{LOG}NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
        f"RuntimeError: CUDA error: device-side assert triggered\n{ASYNC}",
        "OSError: [Errno 28] No space left on device: '/scratch/checkpoint-802.pt'",
        "OSError: [Errno 95] Operation not supported: 'sendfile'",
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        "ValueError: invalid argument: peer 12, status=12, error 12",
        "loss 8.02, 802 ms per step, shared memory 12 MiB, 0 errors",
    ):
        assert meaning_of(text) is None, text
