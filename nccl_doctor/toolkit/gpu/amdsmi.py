"""Reading of AMD GPUs through AMD's management library (libamd_smi.so), call by call.

Every call is guarded, as in `nccl_doctor.toolkit.gpu.nvml`: what is refused is a fact about that
one field; a call may never return, so this belongs in a child, and each call is announced.

Functions, structures and numbers are those of amdsmi.h: ROCm/amdsmi at rocm-6.2.0, rocm-6.2.2 and
amd-staging of 2024-10 (library 24.6 and 24.7), AMD's bindings `amdsmi` 6.2.1, 6.2.4, 6.3.0, 6.3.3,
6.4.0, 6.4.4, 7.0.0 and 7.0.2 (24.6 to 26.0), and ROCm/rocm-systems at 019df16 (26.5). Used is only
what lies at the same place in all of these, or where the version, or the answer itself, shows the
place. Every buffer is larger than any of these structures, so a longer one of a later release does
not overflow. A library whose first number is not known here breaks its own layout, by AMD's rule
("Major version should be changed for every header change that breaks ABI"): it is not read.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nccl_doctor.toolkit.gpu.nvml import ABSENT, STEP, Crumb, Refused, device_name

NO_LIBRARY = "LIBRARY_NOT_FOUND"
UNKNOWN_RELEASE = "UNKNOWN_RELEASE"
_NAMES = ("libamd_smi.so", "libamd_smi.so.26", "libamd_smi.so.25", "libamd_smi.so.24")
_SINCE_6_2 = "amdsmi_clean_gpu_local_data"
"""A function of ROCm 6.2 and later. The lock of older ones cannot be kept in the process."""
_OWN_LOCK = "RSMI_MUTEX_THREAD_ONLY"
"""Variable (third_party/shared_mutex, ROCm 6.2) that makes the library lock its GPUs for its own
process only. Else it makes files in /dev/shm that stay, and a reader that is killed keeps the lock
that RCCL waits for (ROCm/rocm_smi_lib issue 88); RCCL does the same (ROCm/rccl pull request 1169).
"""
_GPUS = 2  # AMDSMI_INIT_AMD_GPUS
_IS_GPU = 1  # AMDSMI_PROCESSOR_TYPE_AMD_GPU
_VRAM = 0  # AMDSMI_MEM_TYPE_VRAM
_GFX_CLOCK = 0  # AMDSMI_CLK_TYPE_GFX
_XGMI_BLOCK = 0x80  # AMDSMI_GPU_BLOCK_XGMI_WAFL
_XGMI_LINK = 2  # AMDSMI_LINK_TYPE_XGMI, AMDSMI_IOLINK_TYPE_XGMI
_HOTSPOT, _MEMORY = 1, 2  # AMDSMI_TEMPERATURE_TYPE_*
_NOW, _CRITICAL = 0, 5  # AMDSMI_TEMP_*
_MOST = 1024
_SPARE = ("_spare", ctypes.c_ubyte * 16384)
_POISON = 0xA5
_STATUS = {
    1: "INVAL", 2: "NOT_SUPPORTED", 3: "NOT_YET_IMPLEMENTED", 4: "FAIL_LOAD_MODULE",
    5: "FAIL_LOAD_SYMBOL", 6: "DRM_ERROR", 7: "API_FAILED", 8: "TIMEOUT", 9: "RETRY",
    10: "NO_PERM", 11: "INTERRUPT", 12: "IO", 13: "ADDRESS_FAULT", 14: "FILE_ERROR",
    15: "OUT_OF_RESOURCES", 16: "INTERNAL_EXCEPTION", 17: "INPUT_OUT_OF_BOUNDS", 18: "INIT_ERROR",
    19: "REFCOUNT_OVERFLOW", 30: "BUSY", 31: "NOT_FOUND", 32: "NOT_INIT", 33: "NO_SLOT",
    34: "DRIVER_NOT_LOADED", 40: "NO_DATA", 41: "INSUFFICIENT_SIZE", 42: "UNEXPECTED_SIZE",
    43: "UNEXPECTED_DATA", 52: "FILE_NOT_FOUND", 56: "CORRUPTED_EEPROM",
}  # fmt: skip
"""amdsmi_status_t without its prefix; the numbers are the same in all releases."""
PAGES = {0: "reserved", 1: "pending", 2: "unreservable"}  # AMDSMI_MEM_PAGE_STATUS_*
LINKS = {0: "down", 1: "up", 2: "disabled"}  # AMDSMI_XGMI_LINK_*
LEVELS = {
    0: "auto", 1: "low", 2: "high", 3: "manual", 4: "stable_std", 5: "stable_peak",
    6: "stable_min_mclk", 7: "stable_min_sclk", 8: "determinism",
}  # fmt: skip
"""AMDSMI_DEV_PERF_LEVEL_*."""
HELD_BY = ("prochot", "ppt", "socket", "vr", "hbm")
"""The first bytes of `active_*` in amdsmi_violation_status_t, in this order, in all releases."""


class _Process(NamedTuple):
    """Places in amdsmi_proc_info_t: bytes of one, and of the fields that are read."""

    pid: int
    memory: int


_PROCESSES = {224: _Process(32, 128), 672: _Process(256, 352), 704: _Process(256, 352)}
"""By the size of the structure: of 6.2 and 6.3, of 6.4.0, and of 6.4.4 and later."""


class _Errors(ctypes.Structure):
    _fields_ = [
        ("correctable", ctypes.c_uint64),
        ("uncorrectable", ctypes.c_uint64),
        ("deferred", ctypes.c_uint64),
        _SPARE,
    ]


class _Pcie(ctypes.Structure):
    _fields_ = [
        ("max_width", ctypes.c_uint16),
        ("max_speed", ctypes.c_uint32),
        ("_static", ctypes.c_ubyte * 88),
        ("width", ctypes.c_uint16),
        ("speed", ctypes.c_uint32),
        ("bandwidth", ctypes.c_uint32),
        ("replays", ctypes.c_uint64),
        _SPARE,
    ]


class _PowerCap(ctypes.Structure):
    _fields_ = [("now", ctypes.c_uint64), ("default", ctypes.c_uint64), _SPARE]


class _Clock(ctypes.Structure):
    _fields_ = [
        ("now", ctypes.c_uint32),
        ("least", ctypes.c_uint32),
        ("most", ctypes.c_uint32),
        _SPARE,
    ]


class _LinkStates(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint32), ("states", ctypes.c_uint32 * 8), _SPARE]


class _RetiredPage(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("status", ctypes.c_uint32),
    ]


class _TextStructure(ctypes.Structure):
    """A structure that begins with a text."""

    _fields_ = [("text", ctypes.c_char * 256), _SPARE]


class Release(NamedTuple):
    """The version of the library: 24.6 and 24.7 are of ROCm 6.2 and 6.3, 25 of 6.4, 26 of 7."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def is_known(self) -> bool:
        """True if its structures are those that are read here."""
        return self.major in (25, 26) or (self.major == 24 and self.minor in (6, 7))

    @property
    def violations_at(self) -> int | None:
        """Place of the first `active_*` in amdsmi_violation_status_t; None before there was one."""
        return {24: 104 if self.minor >= 7 else None}.get(self.major, 120)


class AmdSmi:
    """libamd_smi.so, with every error by its name."""

    def __init__(self, crumb: Crumb, folders: Sequence[str] = ()) -> None:
        """Load it: as the loader finds it, else from one of `folders`.

        Raises:
            Refused: NO_LIBRARY.
        """
        self._crumb = crumb
        os.putenv(_OWN_LOCK, "1")  # for the C library; this process is a child that ends soon
        places = (*_NAMES, *(os.path.join(folder, "libamd_smi.so") for folder in folders))
        for place in places:
            crumb(STEP, call=f"dlopen({place})")
            try:
                self._library = ctypes.CDLL(place)
            except OSError:
                continue
            break
        else:
            raise Refused("dlopen(libamd_smi.so)", NO_LIBRARY)

    def has(self, function: str) -> bool:
        """True if this release has a function."""
        return hasattr(self._library, function)

    def call(self, function: str, *arguments: Any, gpu: Mapping[str, Any] | None = None) -> None:
        """Make one call.

        Raises:
            Refused: it failed, or this release does not have it.
        """
        if not self.has(function):
            raise Refused(function, ABSENT)
        place = {} if gpu is None else {"gpu": gpu["index"], "device": device_name(gpu)}
        self._crumb(STEP, call=function, **place)
        status = getattr(self._library, function)(*arguments) & 0xFFFFFFFF
        if status:
            raise Refused(function, _STATUS.get(status, f"error {status}"))

    def start(self) -> Release:
        """Start it, for GPUs alone.

        Raises:
            Refused: UNKNOWN_RELEASE, or as by amdsmi_init.
        """
        if not self.has(_SINCE_6_2):
            raise Refused("amdsmi_get_lib_version", f"{UNKNOWN_RELEASE} before ROCm 6.2")
        self.call("amdsmi_init", ctypes.c_uint64(_GPUS))
        # Since 26 without the year, which was the first number before.
        numbers = (ctypes.c_uint32 * 256)()
        self.call("amdsmi_get_lib_version", ctypes.byref(numbers))
        release = Release(int(numbers[0]), int(numbers[1]))
        if not release.is_known:
            raise Refused("amdsmi_get_lib_version", f"{UNKNOWN_RELEASE} {release}")
        return release

    def gpus(self) -> list[Any]:
        """Handles of the GPUs, in the order of the library.

        Raises:
            Refused: they cannot be listed.
        """
        return [
            gpu
            for socket in self._handles("amdsmi_get_socket_handles")
            for gpu in self._handles("amdsmi_get_processor_handles", socket)
            if self.number("amdsmi_get_processor_type", gpu) == _IS_GPU
        ]

    def _handles(self, function: str, *of: Any) -> list[Any]:
        count = ctypes.c_uint32(0)
        self.call(function, *of, ctypes.byref(count), None)
        found = (ctypes.c_void_p * max(1, min(count.value, _MOST)))()
        count.value = min(count.value, _MOST)
        if count.value:
            self.call(function, *of, ctypes.byref(count), found)
        return [ctypes.c_void_p(handle) for handle in found[: count.value]]

    def number(
        self,
        function: str,
        *arguments: Any,
        kind: type[Any] = ctypes.c_uint32,
        gpu: Mapping[str, Any] | None = None,
    ) -> int:
        """The number that a call writes behind its last argument."""
        out = (kind * 8)()  # longer than what any release writes
        self.call(function, *arguments, ctypes.byref(out), gpu=gpu)
        return int(out[0])

    def filled(
        self, kind: type[Any], function: str, *arguments: Any, gpu: Mapping[str, Any] | None = None
    ) -> Any:
        """The structure that a call fills in."""
        made = kind()
        self.call(function, *arguments, ctypes.byref(made), gpu=gpu)
        return made


class Gpu:
    """One GPU and its answers: `facts`, and `refused`: error name → fields without an answer."""

    def __init__(self, library: AmdSmi, release: Release, index: int) -> None:
        self._library, self._release = library, release
        self.refused: dict[str, list[str]] = {}
        self.facts: dict[str, Any] = {"index": index, "lost": False, "refused": self.refused}
        self._handle: Any = None

    def find(self, handles: Sequence[Any]) -> None:
        """Take its handle and its name on the bus; then every breadcrumb names it."""
        self._handle = handles[self.facts["index"]]
        self.ask("bus_id", self._bus_id)
        self.ask("uuid", self._uuid)

    def ask(self, field: str, read: Callable[[], Any]) -> None:
        """Store an answer, or why there is none."""
        self.facts[field] = None
        try:
            self.facts[field] = read()
        except Refused as refused:
            self.refused.setdefault(refused.name, []).append(field)
        except (ValueError, TypeError, LookupError):
            self.refused.setdefault("BAD_ANSWER", []).append(field)

    def _number(self, function: str, *arguments: Any, kind: type[Any] = ctypes.c_uint32) -> int:
        return self._library.number(function, self._handle, *arguments, kind=kind, gpu=self.facts)

    def _filled(self, kind: type[Any], function: str, *arguments: Any) -> Any:
        return self._library.filled(kind, function, self._handle, *arguments, gpu=self.facts)

    def _bus_id(self) -> str:
        """Bus id as the kernel writes it; bits: 3 of function, 5 of device, 8 of bus, domain."""
        bits = self._number("amdsmi_get_gpu_device_bdf", kind=ctypes.c_uint64)
        domain, bus, device = bits >> 16, bits >> 8 & 0xFF, bits >> 3 & 0x1F
        return f"{domain:04x}:{bus:02x}:{device:02x}.{bits & 7}"

    def _uuid(self) -> str | None:
        length, text = ctypes.c_uint32(256), ctypes.create_string_buffer(4096)
        self._library.call(
            "amdsmi_get_gpu_device_uuid",
            self._handle,
            ctypes.byref(length),
            text,
            gpu=self.facts,
        )
        return text.value.decode("ascii") or None

    def text(self, function: str) -> str | None:
        """The text with which a structure begins."""
        text = bytes(self._filled(_TextStructure, function).text).decode("utf-8").strip()
        return None if text in ("", "N/A") else text

    def partition(self, function: str) -> str | None:
        """The division of the GPU: `SPX`, `NPS1`."""
        text = ctypes.create_string_buffer(4096)
        self._library.call(function, self._handle, text, ctypes.c_uint32(256), gpu=self.facts)
        return text.value.decode("ascii").strip() or None

    def memory(self) -> dict[str, int]:
        """Bytes of its memory: all, and those in use."""
        wide, vram = ctypes.c_uint64, ctypes.c_uint32(_VRAM)
        return {
            "total": self._number("amdsmi_get_gpu_memory_total", vram, kind=wide),
            "used": self._number("amdsmi_get_gpu_memory_usage", vram, kind=wide),
        }

    def temperature(self, *, of_memory: bool, limit: bool) -> int | None:
        """Degrees Celsius now, or the critical ones; None where that sensor says none."""
        sensor, metric = _MEMORY if of_memory else _HOTSPOT, _CRITICAL if limit else _NOW
        degrees = self._number(
            "amdsmi_get_temp_metric",
            ctypes.c_uint32(sensor),
            ctypes.c_uint32(metric),
            kind=ctypes.c_int64,
        )
        return degrees if 0 < degrees < 1000 else None

    def errors(self) -> dict[str, int]:
        """ECC errors of all its blocks since the driver was loaded."""
        return _counts(self._filled(_Errors, "amdsmi_get_gpu_total_ecc_count"))

    def xgmi_errors(self) -> dict[str, int]:
        """ECC errors of its xGMI links since the driver was loaded."""
        block = ctypes.c_uint64(_XGMI_BLOCK)
        return _counts(self._filled(_Errors, "amdsmi_get_gpu_ecc_count", block))

    def pages(self) -> dict[str, int]:
        """Bad pages of its memory, by what became of them."""
        function, count = "amdsmi_get_gpu_bad_page_info", ctypes.c_uint32(0)
        self._library.call(function, self._handle, ctypes.byref(count), None, gpu=self.facts)
        found = dict.fromkeys(PAGES.values(), 0)
        # One more may come in between.
        records = (_RetiredPage * (count.value + 64))()
        if count.value:
            self._library.call(function, self._handle, ctypes.byref(count), records, gpu=self.facts)
        for record in records[: min(count.value, len(records))]:
            found[PAGES[record.status]] += 1
        return found

    def most_pages(self) -> int | None:
        """Bad pages from which the driver does not start the GPU any more."""
        number = self._number("amdsmi_get_gpu_bad_page_threshold")
        return number if 0 < number < 0xFFFFFFFF else None

    def pcie(self) -> dict[str, int | None]:
        """Lanes and speed (MT/s) of its PCIe link."""
        seen = self._filled(_Pcie, "amdsmi_get_pcie_info")
        return {
            "width": _unless_void(seen.width, 0xFFFF),
            "max_width": _unless_void(seen.max_width, 0xFFFF),
            "speed": _unless_void(seen.speed, 0xFFFFFFFF),
            "max_speed": _unless_void(seen.max_speed, 0xFFFFFFFF),
        }

    def power_cap(self) -> dict[str, int] | None:
        """Milliwatts: the limit now, and the default; in ROCm on Linux they are in microwatts."""
        seen = self._filled(_PowerCap, "amdsmi_get_power_cap_info", ctypes.c_uint32(0))
        micro = 1_000_000
        if not all(micro < value < 100_000 * micro for value in (seen.now, seen.default)):
            return None
        return {"now": seen.now // 1000, "default": seen.default // 1000}

    def most_clock(self) -> int | None:
        """The highest clock of its compute units in MHz."""
        kind = ctypes.c_uint32(_GFX_CLOCK)
        return _unless_void(self._filled(_Clock, "amdsmi_get_clock_info", kind).most, 0xFFFFFFFF)

    def level(self) -> str | None:
        """The control of its clocks: `auto`, or the level that is set by hand."""
        return LEVELS.get(self._number("amdsmi_get_gpu_perf_level"))

    def throttle(self) -> list[str]:
        """Reasons that hold its clocks down now, of HELD_BY.

        Raises:
            Refused: also where this release has no such call.
        """
        at = self._release.violations_at
        if at is None:
            raise Refused("amdsmi_get_violation_status", ABSENT)
        seen = self._filled(ctypes.c_ubyte * 32768, "amdsmi_get_violation_status")
        active = dict(zip(HELD_BY, seen[at : at + len(HELD_BY)], strict=True))
        # 255: not reported.
        return [name for name, value in active.items() if value == 1]

    def xgmi_links(self) -> list[str]:
        """The state of each xGMI link: of LINKS."""
        seen = self._filled(_LinkStates, "amdsmi_get_gpu_xgmi_link_status")
        states = seen.states[: min(seen.count, len(seen.states))]
        return [LINKS.get(state, "unknown") for state in states]

    def xgmi_peers(self, handles: Sequence[Any]) -> int:
        """Number of the other GPUs that it reaches over xGMI."""
        return sum(
            self._link_type(other) == _XGMI_LINK
            for number, other in enumerate(handles)
            if number != self.facts["index"]
        )

    def _link_type(self, other: Any) -> int:
        hops = (ctypes.c_uint64 * 8)()
        return self._number("amdsmi_topo_get_link_type", other, ctypes.byref(hops))

    def processes(self) -> list[tuple[int, int]]:
        """Process id, and bytes of the GPU's memory that it holds.

        The size of an entry differs between releases and is not told: it is taken from how much
        the library has written, of which the last bytes are always zero.
        """
        buffer = (ctypes.c_ubyte * (_MOST * max(_PROCESSES)))()
        ctypes.memset(buffer, _POISON, len(buffer))
        count = ctypes.c_uint32(_MOST)
        self._library.call(
            "amdsmi_get_gpu_process_list",
            self._handle,
            ctypes.byref(count),
            buffer,
            gpu=self.facts,
        )
        data = bytes(buffer)
        written = len(data.rstrip(bytes([_POISON])))
        if not count.value:
            return []
        size, rest = divmod(written, min(count.value, _MOST))
        places = _PROCESSES.get(size)
        if rest or places is None:
            raise Refused("amdsmi_get_gpu_process_list", "BAD_ANSWER")
        return [
            (
                int.from_bytes(data[start + places.pid :][:4], "little"),
                int.from_bytes(data[start + places.memory :][:8], "little"),
            )
            for start in range(0, written, size)
        ]


def _counts(seen: _Errors) -> dict[str, int]:
    return {
        "correctable": seen.correctable,
        "uncorrectable": seen.uncorrectable,
        "deferred": seen.deferred,
    }


def _unless_void(value: int, void: int) -> int | None:
    """None for the value that stands for an unknown one, and for zero."""
    return None if value in (0, void) else int(value)
