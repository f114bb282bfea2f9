"""Whose a record's numbers of bytes are: the ledger's, or the kernel's counters' alone."""

from collections.abc import Mapping
from typing import Any

from cos598d.records.conventions import BY_LEDGER

BYTES_FROM = "bytes from"  # the column of every table of bytes
BYTES_NOTE = (
    "Bytes from: the ledger, which has an entry for every call, by its formula; or the kernel's counters alone, where "
    "a library tells nobody what it sends."
)


def bytes_from(record: Mapping[str, Any]) -> str:
    """Who knows what travelled, of a run's summary or a bench's candidate; the ledger, where older ones do not say."""
    return record.get("bytes_from", BY_LEDGER)


def is_in_ledger(record: Mapping[str, Any]) -> bool:
    """Whether the ledger has all that travelled: else its bytes are not what the record's run sent."""
    return bytes_from(record) == BY_LEDGER
