"""What a process does with memory that it has freed: it keeps it, since the next step takes as much again."""

import ctypes
import os
from collections.abc import Mapping

# malloc.h's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, by which each may also be set for a process from outside.
OPTIONS = {"trim_threshold": (-1, 2**31 - 1), "top_pad": (-2, 64 << 20), "mmap_threshold": (-3, 32 << 20)}


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have glibc's malloc keep what is freed in blocks of up to 32 MiB; whether it does from now on.

    A step frees its activations and gradients, and the next one takes them anew. Without this malloc gives the end of
    its heap back each time, and the kernel hands out the same pages again, each of them cleared, by a fault of its own:
    for MiniLM thousands a step. A process holds no more at its peak than it did; it holds it between two steps too.

    Nothing is changed where the user has set one of these himself (MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES), nor where
    the C library has no such options.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}" in tunables for name in OPTIONS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    taken = [mallopt(option, value) for option, value in OPTIONS.values()]
    return all(taken)
