"""This host's network: its addresses, their interfaces, and whether two processes share a network."""

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import psutil

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
# Where ranks meet by default.
DEFAULT_IP = "127.0.0.1"
DEFAULT_PORT = 6585


def choose_interface(address: str) -> None:
    """Make gloo use the network interface that has `address`, by which the other ranks reach this one.

    By default gloo takes the address of the host's name, which on many Debian hosts is a loopback one. Then the ranks
    of two hosts would look for each other at 127.0.0.1. A GLOO_SOCKET_IFNAME that the user has set stays.
    """
    if INTERFACE_VARIABLE in os.environ or ":" in address:  # with an IPv6 address gloo's own choice stays
        return
    interface = interface_of(address)
    if interface:
        os.environ[INTERFACE_VARIABLE] = interface


def is_loopback(address: str) -> bool:
    """Whether `address` means this host on every host: 127.0.0.1 and its range, or the name localhost.

    Other names do not, even if this host resolves them to 127.0.0.1: other hosts may resolve them to a real address.
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def listening_place(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Where rank 0 listens if the others look for it at its own `address`: there and nowhere else.

    The exception is a name that means loopback here and may mean another address elsewhere. Then it listens at all
    addresses. Return the family and the argument of `bind`. Raises socket.gaierror for a name that this host cannot
    resolve.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not is_loopback(address) and is_loopback(str(place[0])):
        return family, ("", port)
    return family, place


def address_facing(address: str) -> str | None:
    """This host's address from which it reaches `address` (or a name); None if there is no route."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing, but chooses the route
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_facing(address: str) -> str | None:
    """The interface through which this host reaches `address`; None if there is no route or no such interface."""
    own = address_facing(address)
    return interface_of(own) if own else None


def interface_of(address: str) -> str | None:
    """The interface that has the numeric `address`, in this process's network namespace."""
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return interface
    return None


def interface_with_link(address: str) -> str | None:
    """The interface that has the numeric `address`, if it visibly has a link now; else None."""
    try:
        interface = interface_of(address)
    except OSError:
        return None
    return interface if interface and has_link(interface) else None


def has_link(interface: str) -> bool:
    """Whether the kernel reports the interface as running: it is up, and its cable (if the driver knows) is connected.

    True if the kernel does not report it.
    """
    try:
        found = psutil.net_if_stats().get(interface)
    except OSError:
        return True
    return found is None or found.isup


def host_identity() -> str:
    """A string that is equal for all of one host, but differs between hosts, even of the same name."""
    try:
        return f"{socket.gethostname()} {_boot_id()}"
    except OSError:  # not Linux
        return socket.gethostname()


def network_identity(*spaces: str) -> str:
    """A string that is equal for two processes exactly if they see the same network interfaces (and other `spaces`).

    It consists of the kernel's boot id and the namespaces; on systems other than Linux, of the host's name.
    """
    try:
        return " ".join((_boot_id(), *(str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("net", *spaces))))
    except OSError:  # not Linux
        return socket.gethostname()


def _boot_id() -> str:
    """The kernel's id for this boot of the host. Raises OSError on systems other than Linux."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
