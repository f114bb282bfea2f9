"""What a process does with memory that it has freed: it keeps it, since the next step takes as much again."""

import ctypes
import os
from collections.abc import Mapping

# malloc.h's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, and what they are given. Older libraries take 32 MiB at
# most for the last.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = (-1, 2**31 - 1), (-2, 64 << 20), (-3, 1 << 30)
LARGEST_OF_OLD = 32 << 20


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have glibc's malloc keep what is freed in blocks of up to a GiB; whether it does from now on.

    A step frees its activations and gradients, and the next one takes them anew. Without this malloc gives back the end
    of its heap each time, and any block of more than 32 MiB, such as a word embedding's gradient. The kernel hands out
    the same pages again, each of them cleared, by a fault of its own: for MiniLM thousands a step. What a process holds
    in a step it then holds between two steps, too.

    Nothing is changed where the environment says anything of malloc (MALLOC_ARENA_MAX, GLIBC_TUNABLES): then the user
    has seen to it himself. Nor where the C library has no such options.
    """
    if any(name.startswith("MALLOC_") for name in environment):
        return False
    if "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    keeps = mallopt(*TRIM_THRESHOLD) and mallopt(*TOP_PAD)
    return bool(keeps and (mallopt(*MMAP_THRESHOLD) or mallopt(MMAP_THRESHOLD[0], LARGEST_OF_OLD)))
