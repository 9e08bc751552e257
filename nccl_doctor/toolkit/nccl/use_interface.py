"""Steps that make NCCL and gloo use one network interface. Pure."""

from __future__ import annotations

from nccl_doctor.model.commands import shell
from nccl_doctor.model.fixes import Fix, On, Step, export


def use_interface(name: str = "", *, nccl: bool = True, gloo: bool = True) -> Step:
    """The step that sets their variables on every host; without a name, a comment to be completed.

    `=` before the name: NCCL takes eth1 for eth10 too, as it compares the start.
    """
    values = {
        **({"NCCL_SOCKET_IFNAME": f"={name or 'NIC'}"} if nccl else {}),
        **({"GLOO_SOCKET_IFNAME": name or "NIC"} if gloo else {}),
    }
    step = export(**values)
    if name:
        return step
    note = "with the name of the interface that leads to the other hosts"
    return Step(shell("# {}", step.command), On.EVERY, note=note)


CHOOSE = Fix(use_interface())
"""The fix where the name of the right interface is not known."""
