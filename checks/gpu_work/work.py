"""A little work for one device: exact products, copies, and the speed of both.

Runs in a probe child. The device is a parameter; on the CPU everything is the same except pinned
memory and events.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

from nccl_doctor.api import Untested

from .peers import TO_PEER

CONTEXT = "making a context on the GPU"
MULTIPLY = "multiplying matrices on the GPU"
TO_DEVICE = "copying to the GPU"
INSIDE = "copying within the GPU"
TO_HOST = "copying to the host"
STRESS = "measuring the GPU"
GPU_STEPS = (CONTEXT, MULTIPLY, TO_DEVICE, INSIDE, TO_HOST, STRESS)
"""Breadcrumbs of calls that only a GPU or its driver can block."""

_SHARES = {"half": 0.55, "copy": 0.15, "to_device": 0.1, "to_host": 0.1}
"""Shares of the time of one measurement; the rest is for making buffers and warming up."""
_WARM_S = 0.3
_BATCH_S = 0.05
_LOOK_BATCHES = 4
"""Batches at once while the GPU's state is read: it must not become idle meanwhile."""
_SIZES = {"cuda": (8192, 1 << 30, 1 << 28), "cpu": (128, 1 << 20, 1 << 18)}
"""Rows of a matrix; bytes that are copied within the device, and from and to the host."""
_ROWS = {"cuda": 2048, "cpu": 256}
"""Rows of matrices with a known product: so many that every processor of the GPU gets a part."""
_LEFT_ALONE = 4
"""No buffer takes more than the free memory divided by this."""
_LEAST_FREE = 2 << 30
"""With less, matrices and buffers are so small that a good GPU looks slow, or only its cache is
measured."""

_U = (1, -2, 3, -1, 2, -3)
_W = (2, 1, -1, -2)
_DOT = 32


class WrongElements(TypedDict):
    """Wrong elements of a result: how many of how many, and the first."""

    what: str
    count: int
    of: int
    example: str


def operands(size: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Two square matrices on the CPU, and their product.

    All elements, the sums over neighbouring terms, and the result are whole numbers of at most 192
    (8 bits), so bfloat16, float16, TF32 and float32 hold them exactly: any difference from the
    product is an error. Element (i, j) of it is 32 u(i) w(j). `size` is even, and at least 32.
    """
    import torch

    u = torch.tensor(_U).repeat(size // len(_U) + 1)[:size]
    w = torch.tensor(_W).repeat(size // len(_W) + 1)[:size]
    signs = torch.tensor([1, -1]).repeat(size // 2 + 1)[:size]
    inner = torch.ones(size, dtype=torch.int64)
    inner[:_DOT] = signs[:_DOT]  # so many pairs add up; the others cancel out
    left = torch.outer(u, signs).to(dtype)
    right = torch.outer(inner, w).to(dtype)
    product = torch.outer(u, w) * int((signs * inner).sum())
    return left, right, product.to(torch.float32)


def is_gpu_error(error: BaseException) -> bool:
    """True if a RuntimeError of torch comes from the device, and not from a mistake in a call."""
    text = str(error).lower()
    return re.search(r"(cuda|hip)( \w+)? (error|out of memory)|(cu|roc|hip)blas", text) is not None


class DeviceWork:
    """Work of one rank on one device."""

    def __init__(self, breadcrumb: Callable[..., None], device: Any) -> None:
        """`device` is a `torch.device`; no context is made yet."""
        self.breadcrumb = breadcrumb
        self._device = device
        self.step = ""
        """The step that was started last."""

    def context(self) -> float:
        """Make the context; return the seconds it took."""
        import torch

        self._enter(CONTEXT)
        started = time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)
        self._settle()
        return time.monotonic() - started

    def products(self, size: int = 0) -> list[WrongElements]:
        """Multiply matrices whose product is known, in float32 and in the half type.

        Args:
            size: rows and columns; 0 for what suits the device.

        Returns: the wrong results.
        """
        import torch

        size = size or _ROWS[self._device.type]
        found = []
        for dtype in (torch.float32, self._half()):
            name = str(dtype).removeprefix("torch.")
            self._enter(MULTIPLY, type=name, size=size)
            left, right, product = operands(size, dtype)
            got = left.to(self._device) @ right.to(self._device)
            found += differences(f"product in {name}", got.cpu().to(torch.float32), product)
        return found

    def copies(self, count: int = 1 << 24) -> list[WrongElements]:
        """Copy `count` 32-bit numbers to the device, within it, and back."""
        import torch

        numbers = torch.arange(count, dtype=torch.int32) ^ 0x5A5A5A5A
        self._enter(TO_DEVICE, bytes=4 * count)
        there = numbers.to(self._device)
        self._settle()
        self._enter(INSIDE, bytes=4 * count)
        second = there.clone()
        self._settle()
        self._enter(TO_HOST, bytes=4 * count)
        back = second.cpu()
        return differences("copy to the GPU and back", back, numbers)

    def peer_copy(self, peer: Any, uuid: str | None, count: int = 1 << 22) -> list[WrongElements]:
        """Copy numbers to another device, and from there to the host.

        The driver chooses the path between the two: directly if they can access each other's
        memory, else through the host.

        Args:
            peer: the other, a `torch.device`.
            uuid: its own, for the breadcrumb.
            count: how many, of 32 bits each.
        """
        import torch

        numbers = torch.arange(count, dtype=torch.int32) ^ 0x3C3C3C3C
        here = numbers.to(self._device)
        self._settle()
        self._enter(TO_PEER, peer=uuid, bytes=4 * count)
        there = here.to(peer)
        if peer.type == "cuda":
            torch.cuda.synchronize(peer)
        return differences("copy to another GPU", there.cpu(), numbers)

    def measure(self, budget_s: float, look: Callable[[], None] | None = None) -> dict[str, float]:
        """Keep the device busy for about `budget_s` seconds.

        Args:
            budget_s: seconds.
            look: called once, in the middle of the products, while the device works on some of
                them; the device times them itself, so it may take some milliseconds.

        Returns: operations per second of `half` (2 n^3 for a product), bytes per second of `copy`
        (read and written, both counted), and of `to_device` and `to_host` from and to pinned memory
        (counted once).

        Raises:
            Untested: too little of a GPU's memory is free.
        """
        import torch

        cuda = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if cuda else None
        size, nbytes, across = sizes(self._device.type, free)
        self._enter(STRESS, seconds=round(budget_s, 1))
        rates = {}
        # Random numbers, as in a job: with few different ones a GPU is cooler and faster.
        half = self._half()
        left, right = (torch.randn(size, size, device=self._device).to(half) for _ in range(2))
        out = torch.empty_like(left)
        rates["half"] = self._rate(
            lambda: torch.mm(left, right, out=out),
            2.0 * size**3,
            _SHARES["half"] * budget_s,
            look and partial(self._look, look, budget_s),
        )
        source = torch.ones(nbytes // 4, device=self._device)
        target = torch.empty_like(source)
        rates["copy"] = self._rate(
            lambda: target.copy_(source), 2.0 * nbytes, _SHARES["copy"] * budget_s
        )
        here = torch.empty(across // 4)
        if cuda:
            here = here.pin_memory()
        there = target[: across // 4]
        for name, to, of in (("to_device", there, here), ("to_host", here, there)):
            rates[name] = self._rate(
                partial(to.copy_, of, non_blocking=True),
                float(across),
                _SHARES[name] * budget_s,
            )
        return rates

    def _look(self, look: Callable[[], None], budget_s: float) -> None:
        look()
        self._enter(STRESS, seconds=round(budget_s, 1))  # `look` leaves breadcrumbs of its own

    def _rate(
        self,
        work: Callable[[], Any],
        amount: float,
        budget_s: float,
        look: Callable[[], None] | None = None,
    ) -> float:
        """Rate in units of `amount` per second, after warming up; batches run until the end."""
        end = time.monotonic() + budget_s
        middle = end - budget_s / 2
        warm = time.monotonic() + min(_WARM_S, budget_s / 4)
        once = self._time(work, 1)
        while time.monotonic() < warm:
            once = self._time(work, 1)
        batch = max(1, int(_BATCH_S / max(once, 1e-7)))
        times, seconds = 0, 0.0
        while not times or look is not None or time.monotonic() < end:
            if look is not None and time.monotonic() >= middle:
                seconds += self._time(work, _LOOK_BATCHES * batch, look)
                times += _LOOK_BATCHES * batch
                look = None
            else:
                seconds += self._time(work, batch)
                times += batch
        return amount * times / max(seconds, 1e-9)

    def _time(
        self, work: Callable[[], Any], times: int, meanwhile: Callable[[], None] | None = None
    ) -> float:
        """Seconds by the device's own clock, if it has one.

        `meanwhile` is called as soon as the device has all the work; on the CPU, after it.
        """
        import torch

        if self._device.type != "cuda":
            started = time.perf_counter()
            for _ in range(times):
                work()
            seconds = time.perf_counter() - started
            if meanwhile is not None:
                meanwhile()
            return seconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(times):
            work()
        last.record()
        if meanwhile is not None:
            meanwhile()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def _half(self) -> Any:
        """The half type: bfloat16, or float16 if a GPU has no hardware for it."""
        import torch

        nvidia = self._device.type == "cuda" and not torch.version.hip
        old = nvidia and torch.cuda.get_device_capability(self._device)[0] < 8
        return torch.float16 if old else torch.bfloat16

    def _enter(self, step: str, **details: Any) -> None:
        self.step = step
        self.breadcrumb(step, **details)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


def sizes(device: str, free: int | None) -> tuple[int, int, int]:
    """Sizes for measuring: rows of a matrix, bytes within the device, bytes from and to the host.

    Args:
        device: `cuda` or `cpu`.
        free: bytes of the device's memory that are free; None if that does not matter.

    Raises:
        Untested: too few for figures that can be compared.
    """
    size, nbytes, across = _SIZES[device]
    if free is None:
        return size, nbytes, across
    if free < _LEAST_FREE:
        raise Untested(
            f"{free / (1 << 30):.1f} GiB of the GPU's memory are free; measuring its speed needs "
            f"{_LEAST_FREE >> 30} GiB"
        )
    room = free // _LEFT_ALONE
    nbytes = min(nbytes, room // 2)
    return size, nbytes, min(across, nbytes)


def differences(what: str, got: Any, expected: Any) -> list[WrongElements]:
    """Differences of two tensors on the CPU: none, or one row.

    NaN differs from every number.
    """
    wrong = got != expected
    count = int(wrong.sum())
    if not count:
        return []
    place = tuple(wrong.nonzero()[0].tolist())
    at = ", ".join(str(index) for index in place)
    example = f"element ({at}) is {got[place].item()}, not {expected[place].item()}"
    return [{"what": what, "count": count, "of": expected.numel(), "example": example}]
