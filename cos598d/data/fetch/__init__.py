"""Data sets over HTTP: what there is to fetch, the fetching, unpacking and checking."""
