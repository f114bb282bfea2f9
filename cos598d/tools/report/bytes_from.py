"""The source of a record's byte counts: the ledger, or only the kernel's counters."""

import re
from collections.abc import Mapping
from typing import Any

from cos598d.records.conventions import BY_LEDGER, OWN_SOCKETS
from cos598d.records.run import Summary

BYTES_FROM = "bytes from"  # the column of every table of bytes
BYTES_NOTE = (
    "Bytes from: the communication log (log), which has every call with its formula, or only the kernel's "
    "counters if a library does not report its calls. The counters are those of the interface to the other hosts, "
    "with packet headers, or on one host those of each rank's sockets, without headers."
)


def bytes_from(record: Mapping[str, Any]) -> str:
    """The source of the bytes, in a word, for a run's summary or a bench's candidate."""
    if is_in_ledger(record):
        return "log"
    return OWN_SOCKETS if is_by_sockets(counted_wire(record)) else record["bytes_from"]


def is_in_ledger(record: Mapping[str, Any]) -> bool:
    """Whether the ledger has all bytes that were sent. If not, its bytes are not what the run sent."""
    return record.get("bytes_from", BY_LEDGER) == BY_LEDGER  # older records do not have it


def counted_wire(record: Mapping[str, Any]) -> Summary | None:
    """What the kernel has counted for a run; None if it has not, or has only counted a whole host's loopback."""
    wire = record.get("wire")
    return None if wire is None or is_loopback(wire.get("interface", "")) else wire


def is_loopback(interface: str) -> bool:
    """Whether an interface with that name is loopback, on which all programs of a host send."""
    return re.fullmatch(r"lo\d*", interface) is not None


def is_by_sockets(wire: Mapping[str, Any] | None) -> bool:
    """Whether each rank has counted its own sockets, without headers."""
    return wire is not None and wire.get("interface") == OWN_SOCKETS
