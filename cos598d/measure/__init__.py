"""Measuring a run: clocks, the communication ledger, samples of network and host, and the record on disk."""
