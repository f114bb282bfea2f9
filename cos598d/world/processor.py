"""What this process's processor can do: its instructions for 16 bits, its cores, and how fast it does something."""

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

PROCESSOR = Path("/proc/cpuinfo")
MACHINE = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and network namespaces of a machine
# The kernel's words for the instructions by which a processor multiplies in bf16; the faster ones first.
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
ROUNDS, LONGEST = 5, 0.015  # seconds after which no other round begins


def bf16_instructions() -> str | None:
    """The instructions of this processor that multiply in bf16, by the kernel's word; None where it has none, or where
    there is no telling."""
    try:
        lines = PROCESSOR.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return next((name for name in BF16_INSTRUCTIONS if name in flags), None)


def own_cores() -> list[tuple[str, int]]:
    """The cores that this process may use: each the machine's identity and the core's number there."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    try:
        machine = MACHINE.read_text(encoding="ascii").strip()
    except OSError:
        machine = os.uname().nodename
    return [(machine, core) for core in sorted(cores)]


def seconds_in_turn(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least seconds that one thread takes for each call, of a few rounds in which each is called in turn.

    The first call of each is not counted: it prepares. Only this thread's processor time counts, so that other
    processes hardly matter. For calls of a few milliseconds this takes at most 50 ms.
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
