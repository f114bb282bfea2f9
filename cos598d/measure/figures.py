"""What a run comes to, for its summary: from every rank's share, and from rank 0's own rows, which are read back."""

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cos598d.measure.totals import wire_summary
from cos598d.records.conventions import PHASES
from cos598d.records.kinds import NUMBER, Fields
from cos598d.records.run import read_table
from cos598d.records.seconds import mean_of_known, summarize_seconds


def read_back(rows: Path, *names: str) -> dict[str, array]:
    """These numbers of all rows of a file of iterations, 8 bytes each: what a run need not keep while it goes on.

    Raises UserError for a row that is damaged: the run goes on from rows that it has not written itself.
    """
    found = {name: array("d") for name in names}
    for row in read_table(rows, Fields(dict.fromkeys(names, NUMBER))):
        for name, values in found.items():
            values.append(row[name])
    return found


def run_figures(shares: Sequence[Mapping[str, Any]], iterations: Path, kept: str) -> dict[str, Any]:
    """The figures of all iterations; `shares` are all ranks', in order of rank, and `iterations` rank 0's rows."""
    found = read_back(iterations, "loss", "seconds")
    first, ledgers = shares[0], [share["ledger"] for share in shares]
    purposes = dict.fromkeys(purpose for ledger in ledgers for purpose in ledger["by_purpose"])
    nothing = [0, 0, 0, 0]
    return {
        "iterations": len(found["loss"]),
        "losses": list(found["loss"]),
        "seconds_per_iteration": summarize_seconds(found["seconds"]),
        "phases": {f"seconds_{phase}": mean_of_known([share["phases"][phase] for share in shares]) for phase in PHASES},
        "calls_per_iteration": first["calls"],
        "tensors_per_iteration": first["tensors"],
        "payload_bytes_per_iteration": first["payload_bytes"],
        "bytes_sent_per_iteration": [share["bytes_sent"] for share in shares],
        "bytes_received_per_iteration": [share["bytes_received"] for share in shares],
        "ledger": {
            "kept": kept,
            "rows": [ledger["entered"] for ledger in ledgers],
            "rows_kept": [ledger["written"] for ledger in ledgers],
            # Of rank 0's calls in the whole run, those that were not kept too: calls, bytes of payload; sent and
            # received by rank.
            "by_purpose": {
                purpose: {
                    "calls": ledgers[0]["by_purpose"].get(purpose, nothing)[0],
                    "payload_bytes": ledgers[0]["by_purpose"].get(purpose, nothing)[1],
                    "bytes_sent": [ledger["by_purpose"].get(purpose, nothing)[2] for ledger in ledgers],
                    "bytes_received": [ledger["by_purpose"].get(purpose, nothing)[3] for ledger in ledgers],
                }
                for purpose in purposes
            },
        },
        "wire": wire_summary([share["traffic"] for share in shares]),
        "memory": {name: [share["memory"][name] for share in shares] for name in first["memory"]},
    }
