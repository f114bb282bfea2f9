"""Freed memory is kept, unless the user has said what malloc is to do with it."""

import os
import platform
import subprocess
import sys

import pytest
from programs import ROOT

from cos598d.world.limits import keep_freed_memory

FAULTS = """
import resource, sys, torch
from cos598d.world.limits import keep_freed_memory
torch.set_num_threads(1)
keeps = keep_freed_memory()
def step():
    blocks = [torch.zeros(1 << 18) for _ in range(24)]  # a MiB each
    blocks.append(torch.zeros(10 << 20))  # 40 MiB
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(keeps, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def faults(**environment):
    """Whether memory is kept, and the page faults of a step that takes 64 MiB and frees them."""
    words = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return words[0] == "True", float(words[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is needed")
def test_a_step_takes_the_memory_of_the_one_before_without_faults():
    keeps, count = faults()
    assert keeps
    assert count < 100
    keeps, count = faults(MALLOC_ARENA_MAX="16")
    assert not keeps
    assert count > 10_000, "64 MiB have 16,384 pages"


def test_what_the_user_has_set_stays():
    assert not keep_freed_memory({"MALLOC_MMAP_THRESHOLD_": "1000000"})
    assert not keep_freed_memory({"MALLOC_ARENA_MAX": "2"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.top_pad=100"})
