"""This host's network interfaces: the one that gloo is to use, and the one that owns an address."""

import os
import socket

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(master_ip: str) -> None:
    """Let gloo use the network interface that faces `master_ip`, where rank 0 is.

    Left alone gloo takes the host name's address, which on many Debian hosts is a loopback one: then the ranks
    of two hosts look for each other at 127.0.0.1. A GLOO_SOCKET_IFNAME set by the user stands.
    """
    if VARIABLE in os.environ or ":" in master_ip:  # an IPv6 meeting point: gloo's own choice stands
        return
    interface = interface_facing(master_ip)
    if interface:
        os.environ[VARIABLE] = interface


def interface_facing(address: str) -> str | None:
    """The interface by which this host reaches `address`: None where it has no way, or owns no such address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: only chooses the route
            return owner_of(probe.getsockname()[0])
    except OSError:
        return None


def owner_of(address: str) -> str | None:
    """The interface that has the numeric `address`, in this process's network namespace."""
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return interface
    return None


def interface_with_link(address: str) -> str | None:
    """The interface that has this numeric `address`, if it can be told that it has a link now; else None."""
    try:
        interface = owner_of(address)
    except OSError:
        return None
    return interface if interface and has_link(interface) else None


def has_link(interface: str) -> bool:
    """Whether the kernel calls the interface running: up, and its cable (where the driver tells) leads to another end.

    True where it cannot be told.
    """
    try:
        found = psutil.net_if_stats().get(interface)
    except OSError:
        return True
    return found is None or found.isup
