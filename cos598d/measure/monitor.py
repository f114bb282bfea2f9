"""Sampling while a run trains: an interface's counters and the host's gauges, in time and at every iteration's end."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from cos598d.measure.host import HostGauges
from cos598d.measure.thinning import Thinning
from cos598d.measure.wire import Counters, Interface, WireCounter

JOIN_SECONDS = 2.0  # a sample takes less than a millisecond; a gauge that hangs must not hold up the end

Sample = TypeVar("Sample")
Write = Callable[[str], Any]  # of a row's line

# Of a long run rows in time stand further apart: one each `interval` seconds, but no sooner after another than this
# part of the time since training started.
SPACING = 1 / 2000


class Monitor:
    """One rank's samples, as rows in a file for the wire and one for the host.

    `begin` and `pause` enclose what is training: evaluation, the meeting and the exchange of facts are not counted.
    1. `begin` reads both and starts a thread, which reads both every `interval` seconds, and ever less often in a
       run of many hours.
    2. `end_iteration` reads the wire, off the iteration's clock and without a word to other ranks: what they have
       still on their way counts with the next iteration. `read` does so between two iterations.
    3. `pause` reads both. From then on the thread reads the host alone, until the next `begin` with its row "resume".
    4. `stop` ends the thread.

    Without an `interface` there are no rows of the wire. An error ends the sampling and not the run: `warn` is
    called, once.
    """

    def __init__(self, interval: float, interface: Interface | None, device: torch.device, warn: Callable[[str], None]):
        self.interface = interface
        self._interval = min(interval, threading.TIMEOUT_MAX)
        self._warn = warn
        self._counter = WireCounter(interface) if interface else None
        self._gauges = HostGauges(device, warn)
        self._counted = Counters()
        self._began = 0.0  # when the first row was made, on time.perf_counter's clock
        self._before = 0.0  # seconds from the first row to the last before the run was resumed
        self._thinning: Thinning | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def open(self, wire: Write, host: Write, iteration: Callable[[], int], thinning: Thinning | None = None) -> None:
        """How rows are written, which iteration is under way (or has just ended), and of which the wire's are kept."""
        self._wire, self._host, self._iteration, self._thinning = wire, host, iteration, thinning

    def position(self) -> dict[str, Any]:
        """What the rows have come to (JSON), for `resume`."""
        with self._lock:
            return {
                "seconds": self._seconds() if self._began else self._before,
                "process_cpu_seconds": self._gauges.process_cpu_seconds,
                "total": self._counter.total if self._counter else Counters(),
                "counted": self._counted,
            }

    def resume(self, position: dict[str, Any]) -> None:
        """Go on from there: the rows' seconds and sums do not begin again. Before `begin`."""
        self._before = position["seconds"]
        self._gauges.before = position["process_cpu_seconds"]
        self._counted = Counters(*position["counted"])
        if self._counter:
            self._counter.total = Counters(*position["total"])

    def begin(self) -> None:
        """Training begins, or goes on after a pause."""
        self._sample(self._on_begin)
        if not self._thread.ident and not self._stopping.is_set():
            self._thread.start()

    def end_iteration(self, iteration: int) -> Counters | None:
        """What the interface has carried since the last iteration's end; None where it is not known."""
        return self._sample(lambda: self._on_iteration(iteration))

    def read(self) -> Counters | None:
        """What the interface has carried since the last iteration's end, for what travels between two of them."""
        return self._sample(lambda: self._count("interval", self._iteration()))

    def pause(self) -> Counters | None:
        """Training ends, or stops to evaluate: what the interface has carried since the last iteration's end."""
        return self._sample(self._on_pause)

    def stop(self) -> None:
        """End the thread. There are no rows after this."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join(JOIN_SECONDS)

    def _on_begin(self) -> None:
        is_first = not self._began
        if is_first:
            self._began = time.perf_counter()
            self._gauges.start()
        if self._counter:
            self._counter.resume()
            kind = "iteration" if is_first and not self._before else "resume"
            # As it was at `resume`: what arrives meanwhile belongs to the iteration, and not to what was before it.
            self._add_wire_row(self._counter, kind, self._iteration(), self._counter.total)
        self._add_host_row()

    def _on_iteration(self, iteration: int) -> Counters | None:
        return self._count("iteration", iteration)

    def _on_pause(self) -> Counters | None:
        counted = self._count("interval", self._iteration())
        if self._counter:
            self._counter.pause()
        self._add_host_row()
        return counted

    def _on_interval(self) -> None:
        if self._counter and self._counter.counts:
            self._add_wire_row(self._counter, "interval", self._iteration())
        self._add_host_row()

    def _count(self, kind: str, iteration: int) -> Counters | None:
        if not self._counter or not self._counter.counts:
            return None
        total = self._counter.read()
        if kind != "iteration" or self._thinning is None or self._thinning.keeps(iteration):
            self._add_wire_row(self._counter, kind, iteration, total)
        counted, self._counted = total.less(self._counted), total
        return counted

    def _add_wire_row(self, counter: WireCounter, kind: str, iteration: int, total: Counters | None = None) -> None:
        total = total or counter.read()
        row = self._place(iteration) | {
            "kind": kind,
            "interface": counter.interface.name,
            "shared_by_ranks": len(counter.interface.ranks),
        }
        self._wire(json.dumps(row | total._asdict()) + "\n")
        if self._thinning and kind == "iteration":
            self._thinning.wrote(1)

    def _add_host_row(self) -> None:
        self._host(json.dumps(self._place(self._iteration()) | self._gauges.read()) + "\n")

    def _place(self, iteration: int) -> dict[str, Any]:
        return {"seconds": round(self._seconds(), 6), "iteration": iteration}

    def _seconds(self) -> float:
        """Since the first row, on one clock however often the run was resumed; what lay between is left out."""
        return self._before + time.perf_counter() - self._began

    def _sample(self, take: Callable[[], Sample]) -> Sample | None:
        """`take` a sample, alone; after an error, or after `stop`, nothing."""
        with self._lock:
            if self._stopping.is_set():
                return None
            try:
                return take()
            except Exception as error:  # whatever a counter or gauge may raise: no sample is worth a run
                self._stopping.set()
                reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        self._warn(f"sampling stopped, and the run goes on: {reason}.")
        return None

    def _watch(self) -> None:
        while not self._stopping.wait(max(self._interval, SPACING * self._seconds())):
            self._sample(self._on_interval)
