"""ZeRO by hand."""
