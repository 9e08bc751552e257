"""The list of interfaces and addresses, beside what psutil reads of the same machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from nccl_doctor.toolkit.nccl.interface_choice import subnet_prefixes
from nccl_doctor.toolkit.net import ifaddrs
from nccl_doctor.toolkit.net.interfaces import interfaces

THEIRS = {
    name: [
        (entry.address.partition("%")[0], entry.netmask)
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    for name, entries in psutil.net_if_addrs().items()
}


def test_the_same_interfaces_and_addresses_in_the_same_order() -> None:
    ours = {nic.name: list(nic.addresses) for nic in interfaces()}
    assert list(ours) == list(THEIRS)
    assert ours == {name: [address for address, _ in pairs] for name, pairs in THEIRS.items()}


def test_the_same_state_and_mtu() -> None:
    theirs = psutil.net_if_stats()
    for nic in interfaces():
        if nic.name in theirs:  # the label of an address is no interface to psutil
            flags = set(theirs[nic.name].flags.split(","))
            assert (nic.up, nic.running) == ("up" in flags, "running" in flags)
            assert (nic.loopback, nic.mtu) == ("loopback" in flags, theirs[nic.name].mtu)


def test_the_same_subnets() -> None:
    masks = {address: mask for pairs in THEIRS.values() for address, mask in pairs if mask}
    theirs = {
        address: bin(int(ipaddress.ip_address(mask))).count("1") for address, mask in masks.items()
    }
    assert subnet_prefixes() == theirs


def test_an_interface_that_is_gone_has_no_mtu() -> None:
    assert ifaddrs.mtu("gone0") == 0
    assert ifaddrs.mtu("a-name-longer-than-any-interface") == 0
