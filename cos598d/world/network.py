"""This host's network addresses: where to listen, by which one others reach it, and the interface that owns one."""

import ipaddress
import os
import socket
from pathlib import Path

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"
# Where ranks meet unless they are told another place.
DEFAULT_IP = "127.0.0.1"
DEFAULT_PORT = 6585


def choose_interface(address: str) -> None:
    """Let gloo use the network interface that owns `address`, by which the other ranks reach this one.

    Left alone gloo takes the host name's address, which on many Debian hosts is a loopback one: then the ranks
    of two hosts look for each other at 127.0.0.1. A GLOO_SOCKET_IFNAME set by the user stands.
    """
    if VARIABLE in os.environ or ":" in address:  # an IPv6 meeting point: gloo's own choice stands
        return
    interface = owner_of(address)
    if interface:
        os.environ[VARIABLE] = interface


def is_loopback(address: str) -> bool:
    """Whether `address` is this host itself on every host: 127.0.0.1 and its kind, or the name localhost.

    Another name is not, even where this host's own table says 127.0.0.1 of it: others may know it by a real address.
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def listening_place(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Where rank 0 listens if the others look for it at `address`, its own: there and nowhere else.

    The exception is a name that means loopback here and may mean another address elsewhere: then everywhere.
    Raises socket.gaierror for a name that this host does not know.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not is_loopback(address) and is_loopback(place[0]):
        return family, ("", port)
    return family, place


def address_facing(address: str) -> str | None:
    """This host's address by which it reaches `address` (a name too): None where it has no way."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: only chooses the route
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_facing(address: str) -> str | None:
    """The interface by which this host reaches `address`: None where it has no way, or owns no such address."""
    own = address_facing(address)
    return owner_of(own) if own else None


def network_identity(*spaces: str) -> str:
    """What is the same for two processes exactly if they have the same network interfaces (and other `spaces`).

    The boot of the kernel and the namespaces; the host's name where the system has no /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join((boot, *(str(os.stat(f"/proc/self/ns/{space}").st_ino) for space in ("net", *spaces))))
    except OSError:  # not Linux
        return socket.gethostname()


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
