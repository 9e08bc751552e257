"""Settings that make NCCL's collectives slower than the hardware allows: for a test, to leave more
of the GPU to the program, or around a fault. Pure.

Source: NCCL user guide, environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from nccl_doctor.toolkit.nccl.conf import Setting

_ANY: tuple[str, ...] = ()
_ALWAYS: Mapping[str, tuple[str, ...]] = {
    "NCCL_ALGO": _ANY,
    "NCCL_PROTO": _ANY,
    "NCCL_MAX_NCHANNELS": _ANY,
    "NCCL_MAX_NRINGS": _ANY,
    "NCCL_MAX_CTAS": _ANY,
    "NCCL_CTA_POLICY": _ANY,
    "NCCL_NTHREADS": _ANY,
    "NCCL_BUFFSIZE": _ANY,
    "NCCL_GRAPH_FILE": _ANY,
}
INSIDE = {
    **_ALWAYS,
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_P2P_LEVEL": ("0", "LOC"),
    "NCCL_P2P_USE_CUDA_MEMCPY": ("1",),
}
"""Variable → the values that slow down collectives inside a host; empty: any may."""
NVLS_OFF = {**INSIDE, "NCCL_NVLS_ENABLE": ("0",), "NCCL_CUMEM_ENABLE": ("0",)}
"""The same, and those that turn NVLink SHARP off."""
BETWEEN = {
    **_ALWAYS,
    "NCCL_NET_GDR_LEVEL": ("0", "1", "LOC", "PIX"),
    "NCCL_NET_GDR_READ": ("0",),
    "NCCL_DMABUF_ENABLE": ("0",),
    "NCCL_IB_CUDA_SUPPORT": ("0",),
}
"""The same between hosts."""


def slowing(
    settings: Mapping[str, Setting], names: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """Those of the settings that slow collectives down: variable → value.

    Args:
        settings: from `nccl_settings`.
        names: `INSIDE` or `BETWEEN`.
    """
    found = {name: settings[name].value.strip() for name in names if name in settings}
    return {
        name: value
        for name, value in found.items()
        if value and (not names[name] or value.upper() in names[name])
    }
