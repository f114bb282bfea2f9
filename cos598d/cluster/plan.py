"""What an emulated cluster is: its name, hosts, addresses and links, and what a user may ask for."""

import re
from dataclasses import dataclass, field

from cos598d.errors import UsageError

DEFAULT_NAME = "cos598d"
INTERFACE = "eth0"  # every host's own, in its own namespace
MOST_HOSTS = 64
BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Cluster:
    """Hosts 1 to `hosts`, each joined to one switch by a link of `rate` bits a second in each direction (None: no
    limit). A packet from host to host takes `delay` seconds more than the links' rate makes it take.
    """

    hosts: int = 4
    rate: float | None = field(default=None)
    delay: float = 0.0
    offload: bool = True
    name: str = DEFAULT_NAME

    def __post_init__(self):
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise UsageError(f"--hosts {self.hosts}: a cluster here has 1 to {MOST_HOSTS} hosts.")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.]{0,23}", self.name):
            raise UsageError(f"--name {self.name!r}: give a letter, then at most 23 letters, digits, '_' or '.'.")

    @property
    def switch(self) -> str:
        """The namespace of the switch, which is made first and removed last."""
        return f"{self.name}-switch"

    def namespace(self, host: int) -> str:
        """The namespace of host 1, 2, ..."""
        return f"{self.name}-host{host}"

    def port(self, host: int) -> str:
        """The switch's end of the link to this host."""
        return f"port{host}"

    @property
    def numbers(self) -> range:
        """The hosts' numbers, from 1."""
        return range(1, self.hosts + 1)

    def check_host(self, host: int) -> None:
        """Raise UsageError if there is no such host."""
        if host not in self.numbers:
            raise UsageError(f"host {host} is none of this cluster's: they are 1 to {self.hosts}.")


def address(host: int) -> str:
    """The IPv4 address of host 1, 2, ..."""
    return f"10.10.1.{host}"


def hardware_address(host: int) -> str:
    """The Ethernet address of host 1, 2, ...: of the locally administered kind, and told apart by its last byte."""
    return f"02:00:0a:0a:01:{host:02x}"


def parse_rate(words: str) -> float | None:
    """Bits a second of "1gbit", "100mbit", "512kbit"; None of "none". Raises UsageError for anything else."""
    if words == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", words.lower())
    rate = float(match[1]) * BITS[match[2]] if match else 0.0
    if not 1e4 <= rate <= 1e12:
        raise UsageError(f"--rate {words}: give a rate from 10kbit to 1000gbit like 1gbit or 100mbit, or none.")
    return rate


def parse_delay(words: str) -> float:
    """Seconds of "10ms", "500us", "1s" or "0". Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", words.lower()) if words != "0" else None
    seconds = float(match[1]) * SECONDS[match[2]] if match else 0.0
    if (words != "0" and not match) or seconds > 10:
        raise UsageError(f"--delay {words}: give a time from 0 to 10s like 10ms or 500us.")
    return seconds


def rate_words(rate: float | None) -> str:
    """A rate as `parse_rate` reads it: "1gbit"."""
    if rate is None:
        return "none"
    prefix = next((prefix for prefix in "gmk" if rate >= BITS[prefix]), "")
    return f"{rate / BITS[prefix]:g}{prefix}bit"


def delay_words(seconds: float) -> str:
    """A delay as `parse_delay` reads it: "10ms"."""
    if seconds == 0:
        return "0"
    unit = next((unit for unit in ("s", "ms") if seconds >= SECONDS[unit]), "us")
    return f"{seconds / SECONDS[unit]:g}{unit}"
