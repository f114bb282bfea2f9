"""glibc's malloc: freed memory that a process keeps for its next step."""

import contextlib
import ctypes
import os

# malloc.h's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, and our values.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = (-1, 2**31 - 1), (-2, 64 << 20), (-3, 1 << 30)
LARGEST_OF_OLD = 32 << 20  # what older versions accept at most for the last


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed blocks of up to a GiB.

    A step frees its activations and gradients, and the next one allocates them again. By default malloc returns the end
    of its heap to the kernel each time, and any block of more than 32 MiB, such as a word embedding's gradient. The
    kernel then hands out the same pages again, each cleared by a page fault: thousands per step for MiniLM. With this
    setting, a process keeps the memory of a step between two steps, too.

    Nothing changes if the user has set malloc's variables (MALLOC_ARENA_MAX, GLIBC_TUNABLES).
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(AttributeError, OSError):  # another C library, without such options
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(*TRIM_THRESHOLD)
        mallopt(*TOP_PAD)
        if not mallopt(*MMAP_THRESHOLD):
            mallopt(MMAP_THRESHOLD[0], LARGEST_OF_OLD)
