"""Calls that are under way together: how they share the link and the processor."""

from collections.abc import Sequence

import numpy as np

AT_ONCE = 2  # collectives that gloo works on at a time: a process group has so many threads; further ones wait in line


def run_together(
    begins: Sequence[float], work: np.ndarray, travel: np.ndarray, sending: np.ndarray, at_once: int = AT_ONCE
) -> float:
    """When the last of the calls ends.

    begins: the moment from which each may begin; they begin in their order, each when fewer than `at_once` are under
    way. Alone a call takes work + travel seconds; for `work` of them it needs the processor, for `sending` of them the
    link. Those under way go on at full speed as long as they need no more than the whole of either; else all of them as
    much slower.
    """
    alone = work + travel
    of_processor, of_link = work / np.maximum(alone, 1e-12), sending / np.maximum(alone, 1e-12)
    now, first = 0.0, 0
    under_way: list[list[float]] = []  # seconds left, alone, and the shares of processor and link that it needs
    while first < len(begins) or under_way:
        while first < len(begins) and len(under_way) < at_once and begins[first] <= now:
            under_way.append([float(alone[first]), float(of_processor[first]), float(of_link[first])])
            first += 1
        if not under_way:
            now = begins[first]
            continue
        slower = max(1.0, sum(call[1] for call in under_way), sum(call[2] for call in under_way))
        passed = min(call[0] for call in under_way) * slower
        if first < len(begins) and len(under_way) < at_once:
            passed = min(passed, begins[first] - now)
        now += passed
        for call in under_way:
            call[0] -= passed / slower
        under_way = [call for call in under_way if call[0] > 1e-12]
    return now
