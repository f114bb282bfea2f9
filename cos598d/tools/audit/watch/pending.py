"""Calls that have begun and may not have ended: what a rank waits for when it is asked to stop."""

import time
from collections import deque
from typing import Any

from cos598d.comm.dispatcher import DispatchedCall
from cos598d.tools.audit.contents import RECEIVE, SEND

_MOST = 64  # calls that are remembered, for ranks that are some calls ahead


class RecentCalls:
    """This rank's last calls, and how many it has made in each group of ranks. Calls between two ranks are not counted:
    their order is of two ranks only."""

    def __init__(self) -> None:
        self.count = 0  # of all calls
        self._made: dict[tuple[int, ...], int] = {}
        self._recent: deque[tuple[Any, float, dict[str, Any]]] = deque(maxlen=_MOST)

    def began(self, call: DispatchedCall, row: dict[str, Any]) -> None:
        """A call has begun; `row` is the log's of it."""
        self.count += 1
        ranks = call.ranks
        is_between_two = call.op in (SEND, RECEIVE)
        number = 0 if is_between_two else self._made.get(ranks, 0) + 1
        if number:
            self._made[ranks] = number
        # What has ended is let go: its work keeps tensors alive.
        while self._recent and self._recent[0][0] is not None and self._recent[0][0].is_completed():
            _, began, fact = self._recent.popleft()
            self._recent.append((None, began, fact))
        fact = {"op": call.op, "ranks": [*ranks], "number": number, "elements": row["elements"], "where": row["where"]}
        self._recent.append((call.work, time.perf_counter(), fact | {"root": call.root}))

    def rows(self) -> list[dict[str, Any]]:
        """The last calls in their order, with the seconds since they began, and whether they still wait."""
        now = time.perf_counter()
        found = []
        for work, began, fact in sorted(self._recent, key=lambda each: each[1]):
            waits = work is not None and not work.is_completed()
            found.append(fact | {"seconds": now - began, "waits": waits})
        return found

    def made(self) -> list[dict[str, Any]]:
        """How many calls were made in each group."""
        return [{"ranks": [*ranks], "calls": calls} for ranks, calls in self._made.items()]
