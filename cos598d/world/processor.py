"""What this process's processor can do: its cores, and how fast it does something."""

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

MACHINE = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and network namespaces of a machine
ROUNDS, LONGEST = 5, 0.015  # seconds after which no other round begins


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
