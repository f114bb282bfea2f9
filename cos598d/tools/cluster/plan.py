"""The description of an emulated cluster: its name, hosts, addresses and links, and the limits for users."""

import re
from dataclasses import dataclass, field

from cos598d.errors import UsageError

DEFAULT_NAME = "cos598d"
INTERFACE = "eth0"  # each host has one, in its own namespace
SWITCH = "switch"  # the switch's namespace
MOST_HOSTS = 64


@dataclass(frozen=True)
class Cluster:
    """Hosts 1 to `hosts`, each joined to one switch by a link of `rate` bits per second in each direction (None: no
    limit). A packet from host to host takes `delay` seconds in addition to the time that the links' rate causes."""

    hosts: int = 4
    rate: float | None = field(default=None)
    delay: float = 0.0
    name: str = DEFAULT_NAME

    def __post_init__(self):
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise UsageError(f"--hosts {self.hosts} is not valid. Give a number of hosts from 1 to {MOST_HOSTS}.")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.]{0,23}", self.name):
            raise UsageError(
                f"--name {self.name!r} is not valid. Give a letter, then at most 23 letters, digits, '_' or '.'."
            )

    @property
    def numbers(self) -> range:
        """The hosts' numbers, from 1."""
        return range(1, self.hosts + 1)

    def check_host(self, host: int) -> None:
        """Raise UsageError if there is no such host."""
        if host not in self.numbers:
            raise UsageError(f"host {host} is not in this cluster. Give a host from 1 to {self.hosts}.")


def namespace(host: int) -> str:
    """The namespace of host 1, 2, ..."""
    return f"host{host}"


def port(host: int) -> str:
    """The switch's end of the link to this host."""
    return f"port{host}"


def address(host: int) -> str:
    """The IPv4 address of host 1, 2, ..."""
    return f"10.10.1.{host}"


def hardware_address(host: int) -> str:
    """The Ethernet address of host 1, 2, ...: locally administered, with the host's number in its last byte."""
    return f"02:00:0a:0a:01:{host:02x}"
