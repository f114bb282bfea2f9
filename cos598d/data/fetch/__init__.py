"""Data sets over HTTP: the catalogue, fetching, unpacking and checking."""
