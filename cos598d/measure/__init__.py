"""Measuring a run: clocks, the ledger of collective calls, what the wire and the host say, and the record on disk."""
