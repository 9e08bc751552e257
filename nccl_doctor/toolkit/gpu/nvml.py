"""Reading of one machine through NVIDIA's management library, call by call.

Every call is guarded: what a driver refuses (not supported, no permission, lost) is a
fact about that one field. A call may also never return, so this belongs in a probe child, and each
call is announced before it is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, TypedDict

STEP = "asking the GPU driver"
"""The step of every breadcrumb from here; `call` is the function, `gpu` the index, `device` the
name of that GPU in a finding."""

LOST = "GPU_IS_LOST"
ABSENT = "FUNCTION_NOT_FOUND"
_GONE = (ABSENT, "DEPRECATED")
"""Errors of a call that this driver does not have: another call may exist."""
_BAD = "BAD_ANSWER"
_UNEXPECTED = (TypeError, ValueError, AttributeError, IndexError, MemoryError)
"""What the bindings raise at an answer of another form: text that is no UTF-8 (a ValueError), more
elements than they made room for, a number of them that no memory holds."""

_ERRORS, RECOVERY = "NVML_ERROR_", "NVML_GPU_RECOVERY_ACTION_"
_P2P_STATUS, _TOPOLOGY = "NVML_P2P_STATUS_", "NVML_TOPOLOGY_"

Crumb = Callable[..., None]
Way = tuple[str, tuple[Any, ...]]
"""A function by its name in pynvml, and its arguments after the handle."""


class Refused(Exception):
    """An error of a call: `call`, and `name` as in NVML_ERROR_<name>."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call, self.name = call, name


def device_name(gpu: Mapping[str, Any]) -> str:
    """Name of a GPU in a finding: its UUID, else its bus id, else its number on the host."""
    return str(gpu.get("uuid") or gpu.get("bus_id") or f"GPU {gpu['index']}")


class Nvml:
    """pynvml with every error by its name."""

    def __init__(self, crumb: Crumb) -> None:
        """Raises: ImportError where nvidia-ml-py is not installed."""
        import pynvml

        self.nvml: Any = pynvml
        self._crumb = crumb
        self._names = names(pynvml, _ERRORS)
        # Raised for an unversioned function that this driver has not; not in every release.
        self._mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)

    def call(self, function: str, *arguments: Any, gpu: Mapping[str, Any] | None = None) -> Any:
        """Make one call and return its result.

        Raises:
            Refused: it failed, or this pynvml or this driver does not have it.
        """
        found = getattr(self.nvml, function, None)
        if found is None:
            raise Refused(function, ABSENT)
        place = {} if gpu is None else {"gpu": gpu["index"], "device": device_name(gpu)}
        self._crumb(STEP, call=function, **place)
        try:
            return found(*arguments)
        except self.nvml.NVMLError as error:
            raise Refused(function, self._names.get(error.value, f"error {error.value}")) from error
        except self._mismatch as error:
            raise Refused(function, ABSENT) from error
        except _UNEXPECTED as error:
            # A driver newer or older than the bindings may return an unexpected structure.
            raise Refused(function, _BAD) from error


class GpuAnswers:
    """The answers of one GPU: `facts`, and `refused`: error name → fields without an answer."""

    def __init__(self, library: Nvml, index: int) -> None:
        self._library = library
        self.handle: Any = None
        self.refused: dict[str, list[str]] = {}
        self.facts: dict[str, Any] = {"index": index, "lost": False, "refused": self.refused}

    def value(self, function: str, *arguments: Any) -> Any:
        """One answer; a lost GPU gets no further call, because each may take seconds.

        Raises:
            Refused: the driver does not answer.
        """
        if self.facts["lost"]:
            raise Refused(function, LOST)
        handle = () if self.handle is None else (self.handle,)
        try:
            return self._library.call(function, *handle, *arguments, gpu=self.facts)
        except Refused as refused:
            self.facts["lost"] |= refused.name == LOST
            raise

    def ask(
        self, field: str, *ways: Way, read: Callable[[Any], Any] = lambda answer: answer
    ) -> Any:
        """Store the answer of the first of `ways` that this driver has; return it, else None."""
        self.facts[field] = None
        error = ABSENT
        for function, arguments in ways:
            try:
                self.facts[field] = read(self.value(function, *arguments))
            except Refused as refused:
                error = refused.name
                if error in _GONE:
                    continue
            except _UNEXPECTED:
                error = _BAD
            else:
                return self.facts[field]
            break
        self.refuse(field, error)
        return None

    def refuse(self, field: str, error: str) -> None:
        """Note that a field has no answer."""
        self.facts[field] = None
        self.refused.setdefault(error, []).append(field)


@lru_cache
def names(nvml: ModuleType, prefix: str) -> Mapping[Any, str]:
    """Number → the rest of the name of the first constant with this prefix."""
    found: dict[Any, str] = {}
    for name, value in vars(nvml).items():
        if name.startswith(prefix) and isinstance(value, int):
            found.setdefault(value, name.removeprefix(prefix))
    return found


def prepare() -> None:
    """Import the bindings and read their names, before processes are forked that need them: each
    would spend longer on that than on its GPU. Calls no driver.
    """
    with contextlib.suppress(ImportError):
        import pynvml

        for prefix in (_ERRORS, RECOVERY, _P2P_STATUS, _TOPOLOGY):
            names(pynvml, prefix)


def start(crumb: Crumb) -> Nvml:
    """Load the library and start it.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        Refused: as by nvmlInit; `LIBRARY_NOT_FOUND` where there is no libnvidia-ml.so.1.
    """
    library = Nvml(crumb)
    library.call("nvmlInit")
    return library


class System(TypedDict):
    """Versions of driver, NVML and CUDA (None for what is refused), and the number of GPUs."""

    driver: str | None
    nvml: str | None
    cuda: str | None
    count: int


class Pairs(TypedDict):
    """Answers about pairs of GPUs, as `read_pairs` returns them."""

    p2p: dict[str, list[list[int]]]
    nearest: dict[str, list[list[int]]]
    pairs_refused: dict[str, dict[str, int]]


def read_system(library: Nvml) -> System:
    """Versions, and the number of GPUs.

    Raises:
        Refused: the GPUs cannot be counted.
    """
    found: dict[str, Any] = {}
    for field, function in (
        ("driver", "nvmlSystemGetDriverVersion"),
        ("nvml", "nvmlSystemGetNVMLVersion"),
        ("cuda", "nvmlSystemGetCudaDriverVersion"),
    ):
        try:
            found[field] = library.call(function)
        except Refused:
            found[field] = None
    if found["cuda"] is not None:
        found["cuda"] = f"{found['cuda'] // 1000}.{found['cuda'] % 1000 // 10}"
    return {
        "driver": found["driver"],
        "nvml": found["nvml"],
        "cuda": found["cuda"],
        "count": library.call("nvmlDeviceGetCount"),
    }


def read_pairs(library: Nvml, gpus: Iterable[Mapping[str, Any]]) -> Pairs:
    """Answers of the driver about each pair of these GPUs.

    Args:
        library: started.
        gpus: facts of those that answer.

    Returns: `p2p`: NVML_P2P_STATUS_<name> for reading → pairs of indices; `nearest`:
        NVML_TOPOLOGY_<name> of their common ancestor → pairs; `pairs_refused`: for each of the two,
        error name → number of pairs without an answer.
    """
    there: list[tuple[Mapping[str, Any], Any]] = []
    for gpu in gpus:
        try:
            handle = library.call("nvmlDeviceGetHandleByIndex", gpu["index"], gpu=gpu)
        except Refused as refused:
            handle = refused
        there.append((gpu, handle))
    # 0 is the index of reads; the constant of pynvml is a tuple, by a stray comma.
    p2p, p2p_refused = _ask_pairs(library, there, ("nvmlDeviceGetP2PStatus", (0,)), _P2P_STATUS)
    nearest, nearest_refused = _ask_pairs(
        library, there, ("nvmlDeviceGetTopologyCommonAncestor", ()), _TOPOLOGY
    )
    refusals = {"p2p": p2p_refused, "nearest": nearest_refused}
    return {"p2p": p2p, "nearest": nearest, "pairs_refused": refusals}


def _ask_pairs(
    library: Nvml, there: Sequence[tuple[Mapping[str, Any], Any]], way: Way, prefix: str
) -> tuple[dict[str, list[list[int]]], dict[str, int]]:
    """Answer, named by the constant with this prefix → pairs; error name → number of pairs."""
    named = names(library.nvml, prefix)
    function, arguments = way
    sides: dict[str, list[list[int]]] = {}
    errors: dict[str, int] = {}
    for number, (one, handle) in enumerate(there):
        for other, peer in there[number + 1 :]:
            try:
                for end in (handle, peer):
                    if isinstance(end, Refused):
                        raise end
                answer = library.call(function, handle, peer, *arguments, gpu=one)
            except Refused as refused:
                errors[refused.name] = errors.get(refused.name, 0) + 1
                continue
            pair = [one["index"], other["index"]]
            sides.setdefault(named.get(answer, str(answer)), []).append(pair)
    return sides, errors
