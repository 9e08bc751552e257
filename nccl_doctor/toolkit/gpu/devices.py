"""GPUs of this host, by the kernel, by the driver and by torch.

`see_gpus` wakes the GPU driver, which can take seconds, hang or kill the process, and belongs in a
probe child. The others may be called in a process that must survive.
"""

from __future__ import annotations

import ctypes
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.toolkit.host import text_of

EXCLUSIVE_PROCESS = 3
"""CUcomputemode of a GPU on which one process at a time may have a context."""
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
_MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which GPUs are hidden from a process."""


class HostGpus(TypedDict):
    """The GPUs of a host, as `host_gpus` returns them."""

    nodes: int
    proc: int
    kfd: int
    driver: str | None
    nouveau: int


class TorchBuild(TypedDict):
    """Versions that torch was built with, as `torch_build` returns them."""

    torch: str
    cuda: str | None
    rocm: str | None
    nccl: str | None
    nccl_built: bool
    gloo_built: bool


class DriverError(TypedDict):
    """Error of the driver: a CUresult, its name and text; `code` is None if not known."""

    code: int | None
    name: str
    text: str


class Device(TypedDict):
    """A GPU that torch lists; see `see_gpus`."""

    index: int
    name: str
    uuid: str | None
    memory_bytes: int
    capability: list[int]
    arch: str | None
    compute_mode: int | None
    multicast: bool | None
    bus_id: str | None


class SeenGpus(TypedDict):
    """The driver and the GPUs, as `see_gpus` returns them."""

    driver_cuda: str | None
    driver_error: DriverError | None
    devices: list[Device]
    arch_list: list[str]
    start_s: float


def host_gpus(root: Path = Path("/")) -> HostGpus:
    """The GPUs that the kernel shows, without waking the driver.

    Returns: `nodes` = number of /dev/nvidia<N> (in a container: those it was given), `proc` =
    GPUs in /proc/driver/nvidia/gpus (those of the machine), `kfd` = AMD's (in a container: those
    that it was given), `driver` = version of the NVIDIA kernel module or None, `nouveau` = devices
    that the kernel's own driver has instead.
    """
    dev, proc = root / "dev", root / "proc/driver/nvidia"
    nodes = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return {
        "nodes": len(nodes),
        "proc": len(list(proc.glob("gpus/*"))),
        "kfd": _amd_gpus(root),
        "driver": _kernel_driver(proc / "version"),
        "nouveau": len(list(root.glob("sys/bus/pci/drivers/nouveau/*:*:*.*"))),
    }


def _amd_gpus(root: Path) -> int:
    """Number of AMD's GPUs for computing whose render node is here.

    An MI300 or later has eight render nodes, one for each part that it can be divided into, whether
    it is divided or not: the kernel's list says which of them stand for a GPU or a part.
    Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
    """
    if not (root / "dev/kfd").exists():
        return 0
    nodes = {path.name for path in (root / "dev/dri").glob("renderD*")}
    listed = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    minors = [re.search(r"^drm_render_minor (\d+)$", text_of(path), re.M) for path in listed]
    known = sum(found is not None and f"renderD{found.group(1)}" in nodes for found in minors)
    return known or len(nodes)  # a list without them is of an old kernel


def count_gpus(gpus: Mapping[str, Any]) -> int:
    """Number of GPUs in the result of `host_gpus`, without those that a container hides."""
    return int(gpus["nodes"] or gpus["proc"] or gpus["kfd"])


def see_other_gpus(environments: Iterable[Mapping[str, str]]) -> bool:
    """True if CUDA_VISIBLE_DEVICES shows different GPUs to each of these processes."""
    visible = [env.get("CUDA_VISIBLE_DEVICES") for env in environments]
    return None not in visible and len(set(visible)) == len(visible)


def index_of_own(local_rank: int | None, count: int) -> int:
    """Index of a process's own GPU among the `count` GPUs that it sees.

    LOCAL_RANK modulo their number: that of the rank if it sees all GPUs of the host, and the only
    one if launchers hide the others (one CUDA_VISIBLE_DEVICES per rank, `srun --gpus-per-task=1`).
    Accelerate (`PartialState.set_device`) and torch 2.15 by default do the same. A program that
    calls `set_device(LOCAL_RANK)`, as most scripts and DeepSpeed do, uses the same one, or fails if
    LOCAL_RANK is not below the number of GPUs that it sees.
    """
    local = local_rank or 0
    return local % count if count else local  # without GPUs torch reports the error


def own_device(local_rank: int | None) -> Any:
    """The `torch.device` of this process's own GPU.

    Counting GPUs wakes the driver: leave a breadcrumb first.
    """
    import torch

    return torch.device("cuda", index_of_own(local_rank, torch.cuda.device_count()))


def _kernel_driver(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no NVIDIA kernel module
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.[\d.]+)", text)
    return found.group(1) if found else None


def torch_build() -> TorchBuild:
    """Versions that torch was built with: `torch`, `cuda`, `rocm` and `nccl`, or None; and
    `nccl_built`, `gloo_built`.
    """
    import torch
    from torch import distributed

    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    version = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else ()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": ".".join(str(part) for part in version[:3]) if has_nccl and version else None,
        "nccl_built": has_nccl,
        "gloo_built": distributed.is_available() and distributed.is_gloo_available(),
    }


def see_gpus(build: TorchBuild, before: Callable[[str], None]) -> SeenGpus:
    """Start the driver, then torch's GPU runtime, and list what torch sees.

    Args:
        build: what `torch_build` returned. A build without CUDA and ROCm touches no driver.
        before: called with the name of each call that may hang, before it is made.

    Returns:
        `driver_cuda`: newest CUDA version that the driver runs (`"12.4"`) or None.
        `driver_error`: `name` is that of the CUresult, `"libcuda.so.1"` if that could not be
        loaded, or `"torch.cuda.init"`.
        `devices`: in torch's order; `uuid` is written as nvidia-smi does, or None; `capability` is
        [major, minor]; `arch` is the gfx name on ROCm, else None; `compute_mode` and `multicast` as
        `compute_mode` and `has_multicast` return them; `bus_id` as the kernel writes it, or None
        with a torch that does not give it. No context is made, so a GPU in exclusive mode stays
        free.
        `arch_list`: architectures that the build has code for.
        `start_s`: seconds that all this took, most of them in the driver.
    """
    started = time.monotonic()
    seen: SeenGpus = {
        "driver_cuda": None,
        "driver_error": None,
        "devices": [],
        "arch_list": [],
        "start_s": 0.0,
    }
    if build["cuda"]:
        before("cuInit")
        seen["driver_cuda"], seen["driver_error"] = _start_cuda_driver()
    if (build["cuda"] or build["rocm"]) and seen["driver_error"] is None:
        import torch

        before("torch.cuda.init")
        seen["devices"], seen["driver_error"] = _torch_devices()
        seen["arch_list"] = list(torch.cuda.get_arch_list())
    seen["start_s"] = round(time.monotonic() - started, 2)
    return seen


def _start_cuda_driver() -> tuple[str | None, DriverError | None]:
    """Newest CUDA version and error of `cuInit`, whose error code is clearer than torch's text."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return None, _error(None, "libcuda.so.1", str(error))
    version = ctypes.c_int(0)
    # Does not need cuInit, so it is known even where that fails.
    libcuda.cuDriverGetVersion(ctypes.byref(version))
    code = int(libcuda.cuInit(0))
    newest = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return newest, None if code == 0 else _error(code, *_words(libcuda, code))


def _words(libcuda: ctypes.CDLL, code: int) -> tuple[str, str]:
    words = []
    for function in (libcuda.cuGetErrorName, libcuda.cuGetErrorString):
        text = ctypes.c_char_p()
        function(code, ctypes.byref(text))
        words.append((text.value or b"").decode())
    return words[0] or f"CUresult {code}", words[1] or "no text"


def _error(code: int | None, name: str, text: str) -> DriverError:
    return {"code": code, "name": name, "text": text}


def _torch_devices() -> tuple[list[Device], DriverError | None]:
    import torch

    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        text = str(error).strip().split("\n")[0]
        if re.search(r"No (CUDA|HIP) GPUs are available", text):
            return [], None  # the driver works; there is no GPU
        found = re.search(r"Error (\d+)", text)
        return [], _error(int(found.group(1)) if found else None, "torch.cuda.init", text)
    return [_device(index) for index in range(count)], None


def _device(index: int) -> Device:
    import torch

    seen = torch.cuda.get_device_properties(index)
    name = getattr(seen, "uuid", None)  # not in old versions of torch
    if name is None and torch.version.cuda:
        name = uuid_by_driver(index)
    gfx = getattr(seen, "gcnArchName", None) if torch.version.hip else None
    return {
        "index": index,
        "name": seen.name,
        "uuid": None if name is None else re.sub(r"^(?!GPU-|MIG-)", "GPU-", str(name)),
        "memory_bytes": seen.total_memory,
        "capability": [seen.major, seen.minor],
        "arch": gfx.split(":")[0] if gfx else None,
        "compute_mode": compute_mode(index) if torch.version.cuda else None,
        "multicast": has_multicast(index) if torch.version.cuda else None,
        "bus_id": _bus_id(seen),
    }


def _bus_id(seen: Any) -> str | None:
    """The PCI address of a GPU by its properties; None with a torch that does not give it."""
    numbers = [getattr(seen, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def compute_mode(index: int) -> int | None:
    """CUcomputemode of a GPU: 0 if all processes may use it, 2 for none, 3 for one at a time.

    By the driver, which must have been started, and which numbers GPUs as torch does. None if not
    known.
    """
    return _attribute(index, _COMPUTE_MODE)


def has_multicast(index: int) -> bool | None:
    """True if NVSwitches copy and add up what this GPU sends, as NVLink SHARP needs it; NCCL asks
    the same. None if not known, as with a driver before CUDA 12.1.

    By the driver, as `compute_mode`.
    """
    said = _attribute(index, _MULTICAST)
    return None if said is None else bool(said)


def _attribute(index: int, number: int) -> int | None:
    """An attribute of a GPU by the driver, which must have been started; None if not known."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    if libcuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    if libcuda.cuDeviceGetAttribute(ctypes.byref(value), number, device):
        return None
    return value.value


def uuid_by_driver(index: int) -> str | None:
    """UUID of a GPU by the index that torch gives it; None if the driver does not give it.

    It distinguishes ranks that see one GPU each from ranks that share one. The driver must have
    been started. Source: CUDA driver API, cuDeviceGetUuid (_v2 knows parts of a GPU).
    """
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
        ask = getattr(libcuda, "cuDeviceGetUuid_v2", None) or libcuda.cuDeviceGetUuid
    except (OSError, AttributeError):
        return None
    device, data = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if libcuda.cuDeviceGet(ctypes.byref(device), index) or ask(ctypes.byref(data), device):
        return None
    return str(uuid.UUID(bytes=bytes(data)))
