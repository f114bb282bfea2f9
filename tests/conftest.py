"""What all tests share."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small processes on few cores


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Every test run keeps its caches to itself, so that two runs side by side do not meet."""
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
