"""Values that a library is asked to use, as its build alone decides which it takes."""

from __future__ import annotations

from collections.abc import Mapping

_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_REFUSED = "unsupported gloo device"
"""What torch says of a transport that its gloo does not have: GlooDeviceFactory.cpp."""


def try_values(env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Name → `text`, the value, and `error`, why the library refuses it, or empty.

    For a probe child: gloo reads its environment once, at the first device of the process. A name
    that is not set, or that cannot be tried, is left out.
    """
    if _TRANSPORT not in env:
        return {}
    try:
        from torch.distributed import ProcessGroupGloo
    except ImportError:  # no torch, or one without gloo: other checks report it
        return {}
    error = ""
    try:
        ProcessGroupGloo.create_device(interface="lo")
    except RuntimeError as refused:
        if _REFUSED not in str(refused):  # no loopback interface here
            return {}
        error = _REFUSED
    return {_TRANSPORT: {"text": env[_TRANSPORT], "error": error}}
