"""The grammar that the bundled samples are told by; `tools/make_samples.py` writes what it tells."""
