"""GPUs of this host: what the kernel shows, what the driver says, what torch sees.

Only `host_gpus` may be called in a process that must survive; the others wake the GPU driver,
which can take seconds, hang or kill the process, and belong in a probe child.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which GPUs are hidden from a process."""


def host_gpus(root: Path = Path("/")) -> dict[str, Any]:
    """What the kernel shows of GPUs, without waking the driver.

    Returns: `nodes` = number of /dev/nvidia<N> (in a container: those it was given), `proc` =
    GPUs in /proc/driver/nvidia/gpus (those of the machine), `kfd` = AMD render nodes where
    /dev/kfd exists, `driver` = version of the NVIDIA kernel module or None.
    """
    dev, proc = root / "dev", root / "proc/driver/nvidia"
    nodes = [path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    has_kfd = (dev / "kfd").exists()
    return {
        "nodes": len(nodes),
        "proc": len(list(proc.glob("gpus/*"))),
        "kfd": len(list(dev.glob("dri/renderD*"))) if has_kfd else 0,
        "driver": _kernel_driver(proc / "version"),
    }


def _kernel_driver(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no NVIDIA kernel module
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.[\d.]+)", text)
    return found.group(1) if found else None


def start_cuda_driver() -> dict[str, Any]:
    """Call `cuInit`, whose error code says more than torch's text.

    Returns: `driver_cuda` = newest CUDA version that the driver runs (`"12.4"`) or None, and
    `error` = None or `{"code": int | None, "name": str, "text": str}`; code None means that
    libcuda.so.1 could not be loaded.
    """
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"driver_cuda": None, "error": driver_error(None, "libcuda.so.1", str(error))}
    version = ctypes.c_int(0)
    # Does not need cuInit, so it is known even where that fails.
    libcuda.cuDriverGetVersion(ctypes.byref(version))
    code = int(libcuda.cuInit(0))
    return {
        "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "error": None if code == 0 else driver_error(code, *_words(libcuda, code)),
    }


def _words(libcuda: ctypes.CDLL, code: int) -> tuple[str, str]:
    words = []
    for function in (libcuda.cuGetErrorName, libcuda.cuGetErrorString):
        text = ctypes.c_char_p()
        function(code, ctypes.byref(text))
        words.append((text.value or b"").decode())
    return words[0] or f"CUresult {code}", words[1] or "no text"


def driver_error(code: int | None, name: str, text: str) -> dict[str, Any]:
    """The shape of a driver error in the facts."""
    return {"code": code, "name": name, "text": text}


def torch_devices() -> dict[str, Any]:
    """Initialise torch's GPU runtime (CUDA or ROCm) and list what it sees.

    Returns: `error` as above, and `devices`, in torch's order, each
    `{index, name, uuid, memory_bytes, capability: [major, minor], arch}`; `uuid` is written as
    nvidia-smi does, or None; `arch` is the gfx name on ROCm, else None. No context is made, so a
    GPU in exclusive mode is left alone.
    """
    import torch

    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        text = str(error).strip().split("\n")[0]
        if re.search(r"No (CUDA|HIP) GPUs are available", text):
            return {"devices": [], "error": None}  # the driver works; there is nothing to see
        found = re.search(r"Error (\d+)", text)
        code = int(found.group(1)) if found else None
        return {"devices": [], "error": driver_error(code, "torch.cuda.init", text)}
    return {"devices": [_device(index) for index in range(count)], "error": None}


def _device(index: int) -> dict[str, Any]:
    import torch

    seen = torch.cuda.get_device_properties(index)
    uuid = getattr(seen, "uuid", None)  # not in old versions of torch
    gfx = getattr(seen, "gcnArchName", None) if torch.version.hip else None
    return {
        "index": index,
        "name": seen.name,
        "uuid": None if uuid is None else re.sub(r"^(?!GPU-|MIG-)", "GPU-", str(uuid)),
        "memory_bytes": seen.total_memory,
        "capability": [seen.major, seen.minor],
        "arch": gfx.split(":")[0] if gfx else None,
    }
