"""GPUs of one host, and those of the same model: what rules compare a GPU with. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .traits import TRAITS_OF
from .trouble import Gpu, is_readable


class Peers:
    """GPUs of one model on one host that answer. What they have in common is found once for all of
    them: looked for again for each GPU, it would be most of the work.

    Attributes:
        gpus: their facts.
        nvlinks: most NVLinks that are up on one of them.
        c2c: most links to the CPU that are up on one of them.
        traits: how much a difference matters → the traits of each GPU, in their order.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus
        self.nvlinks = max(sum(gpu["nvlinks"]) for gpu in gpus)
        self.c2c = max(sum(gpu.get("c2c") or ()) for gpu in gpus)
        self.traits = {severity: [of(gpu) for gpu in gpus] for severity, of in TRAITS_OF.items()}


class HostGpus:
    """GPUs of one host.

    Attributes:
        facts: of `gather_gpus`.
        every: facts of each GPU.
        readable: those of the GPUs that answer.
        by_model: name of a model, None where the driver does not tell it → those that answer.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.every: Sequence[Gpu] = facts["gpus"]
        self.readable = [gpu for gpu in self.every if is_readable(gpu)]
        models: dict[str | None, list[Gpu]] = defaultdict(list)
        for gpu in self.readable:
            models[gpu["name"]].append(gpu)
        self.by_model = {name: Peers(gpus) for name, gpus in models.items()}
