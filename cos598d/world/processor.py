"""This process's processor: its 16-bit instructions, its cores, and how fast it runs a call."""

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

PROCESSOR = Path("/proc/cpuinfo")
MACHINE = Path("/proc/sys/kernel/random/boot_id")  # equal in all containers and network namespaces of a machine
# The kernel's names for instructions that multiply in bf16, the faster ones first.
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
ROUNDS, LONGEST = 5, 0.015  # seconds after which no further round begins


def bf16_instructions() -> str | None:
    """The kernel's name for this processor's instructions that multiply in bf16; None if none are known."""
    try:
        lines = PROCESSOR.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return next((name for name in BF16_INSTRUCTIONS if name in flags), None)


def own_cores() -> list[tuple[str, int]]:
    """The cores that this process may use: (the machine's identity, the core's number on it) for each."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    try:
        machine = MACHINE.read_text(encoding="ascii").strip()
    except OSError:
        machine = os.uname().nodename
    return [(machine, core) for core in sorted(cores)]


def seconds_in_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least CPU seconds of one thread for each call, over a few rounds that make every call once.

    Each call's first run is a warm-up and not counted. Only this thread's CPU time counts, so other processes hardly
    matter. For calls of a few milliseconds this takes at most 50 ms.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for call in calls.values():
            call()
        least, began = dict.fromkeys(calls, math.inf), time.thread_time()
        for _ in range(ROUNDS):
            for name, call in calls.items():
                before = time.thread_time()
                call()
                least[name] = min(least[name], time.thread_time() - before)
            if time.thread_time() - began > LONGEST:
                break
    finally:
        torch.set_num_threads(threads)
    return least
