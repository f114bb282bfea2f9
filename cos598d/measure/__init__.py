"""Measuring a run: clocks, the ledger of collective calls, and the record on disk."""
