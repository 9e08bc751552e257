"""Lines of inference servers that start one process on each host: vLLM and SGLang.

Names, defaults and the ranks of a host are those of vLLM in 2026 (vllm/engine/arg_utils.py and
vllm/config/parallel.py, at 6cf7b26b) and of SGLang 0.5 (sglang/srt/server_args.py). Other options
are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from nccl_doctor.launch.command_line.job_line import (
    DEFAULT,
    MAX_PORT,
    Draft,
    JobLine,
    JobLineError,
    LineValue,
    number,
)
from nccl_doctor.launch.command_line.several_hosts import options_in
from nccl_doctor.launch.command_line.torchrun import parse_endpoint


@dataclass(frozen=True)
class _Server:
    """Option names without hyphens, by field; the product of the `sizes` is the world size.
    `port` is the default of `master_port`.
    """

    names: Mapping[str, str]
    sizes: tuple[str, ...]
    port: int | None = None

    def flags(self, words: Sequence[str]) -> dict[str, LineValue]:
        """Field or size → the last value that the words give it."""
        fields = {name: field for field, names in self.names.items() for name in names.split()}
        fields |= {name: names for names in self.sizes for name in names.split()}
        return {
            fields[name]: LineValue(value, shown)
            for name, value, shown in options_in(words)
            if name in fields and shown.startswith("-")
        }


SERVERS: Mapping[str, _Server] = {
    "vllm": _Server(
        {
            "nnodes": "nnodes n",
            "node_rank": "node-rank r",
            "master_addr": "master-addr",
            "master_port": "master-port",
        },
        (
            "tensor-parallel-size tp",
            "pipeline-parallel-size pp",
            "prefill-context-parallel-size pcp",
            "data-parallel-size dp",
        ),
        29501,
    ),
    "sglang": _Server(
        {
            "nnodes": "nnodes",
            "node_rank": "node-rank",
            "endpoint": "dist-init-addr nccl-init-addr",
        },
        ("tensor-parallel-size tp-size tp", "pipeline-parallel-size pp-size pp"),
    ),
}


def read(launcher: str, words: Sequence[str]) -> JobLine | None:
    """Read the words behind `vllm serve` or `sglang.launch_server`.

    Returns: None for a server of one host: it meets itself, and may find more hosts by Ray.

    Raises:
        JobLineError: a number is none, or out of range; an address has no port.
    """
    server = SERVERS[launcher]
    flags = server.flags(words)
    if "nnodes" not in flags or (nnodes := number(flags["nnodes"], 1)) == 1:
        return None
    draft = Draft(launcher)
    for name in ("nnodes", "max_nnodes"):
        draft.put(name, nnodes, flags["nnodes"].source)
    said = flags.get("node_rank", LineValue("0", DEFAULT))
    if said.source == DEFAULT:
        draft.note(f"--node-rank is not given: {launcher} then uses node rank 0 on every host")
    draft.put("node_rank", number(said, 0, nnodes - 1), said.source)
    world = prod(number(flags[size], 1) for size in server.sizes if size in flags)
    if world >= nnodes and world % nnodes == 0:
        sources = [flags[size].source for size in server.sizes if size in flags]
        draft.put("nproc_per_node", str(world // nnodes), " × ".join(sources))
    if "endpoint" in flags:
        host, port = parse_endpoint(flags["endpoint"])
        if port is None:
            raise JobLineError(f"{flags['endpoint'].source} {host} has no port: write {host}:PORT")
        draft.put("master_addr", host, flags["endpoint"].source)
        draft.put("master_port", port, flags["endpoint"].source)
        return draft.done()
    said = flags.get("master_addr", LineValue("127.0.0.1", DEFAULT))
    draft.put("master_addr", said.text, said.source)
    said = flags.get("master_port", LineValue(str(server.port or ""), DEFAULT))
    if said.text:
        draft.put("master_port", number(said, 1, MAX_PORT), said.source)
    return draft.done()
