"""Sampling while a run trains: an interface's counters, and the gauges of a rank's process, host and GPU."""

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from cos598d.measure.thinning import Thinning
from cos598d.measure.wire import Counters, Interface, WireCounter

JOIN_SECONDS = 2.0  # a sample takes less than a millisecond; a gauge that hangs must not hold up the end

Sample = TypeVar("Sample")
Write = Callable[[str], Any]  # of a row's line

# In a long run rows are rarer than one each `interval` seconds: the next comes no sooner than after this part of the
# time since training started.
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
        """What the interface has carried since the last iteration's end; None if it is not known."""
        return self._sample(lambda: self._count("iteration", iteration))

    def read(self) -> Counters | None:
        """What the interface has carried since the last iteration's end, for what is sent between two of them."""
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
        self._warn(f"sampling of CPU, memory and network stopped, and training continues: {reason}.")
        return None

    def _watch(self) -> None:
        while not self._stopping.wait(max(self._interval, SPACING * self._seconds())):
            self._sample(self._on_interval)


class HostGauges:
    """Readings of what this process and its host are doing. `start` begins the sum of the process's CPU seconds.

    A GPU's memory is what all processes hold of it. Its utilization comes from NVML, by the package nvidia-ml-py:
    where that is missing it is left out; where NVML refuses for another reason, `warn` is called.
    """

    def __init__(self, device: torch.device, warn: Callable[[str], None]):
        self._device = device
        self._process = psutil.Process()
        self._began: float | None = None
        self.before = 0.0  # the process's CPU seconds before the run was resumed
        self._busy, self._all = _host_seconds()
        self._tells_utilization = device.type == "cuda" and _tells_utilization(device, warn)

    def start(self) -> None:
        """Training begins."""
        self._began = time.process_time()

    @property
    def process_cpu_seconds(self) -> float:
        """Of this process since training began, and of the one before it where the run was resumed."""
        return self.before if self._began is None else self.before + time.process_time() - self._began

    def read(self) -> dict[str, Any]:
        """A row's gauges; `host_cpu_percent` is the mean over all cores since the reading before."""
        busy, total = _host_seconds()
        passed = total - self._all
        row = {
            "process_cpu_seconds": self.process_cpu_seconds,
            "host_cpu_percent": round(100 * max(0.0, busy - self._busy) / passed, 1) if passed > 0 else 0.0,
            "rss_bytes": self._process.memory_info().rss,
        }
        self._busy, self._all = busy, total
        if self._device.type == "cuda":
            free, size = torch.cuda.mem_get_info(self._device)
            row["gpu_memory_bytes"] = size - free
        if self._tells_utilization:
            row["gpu_utilization_percent"] = torch.cuda.utilization(self._device)
        return row


def peak_memory_bytes() -> int:
    """The most of the host's memory that this process has held at a time."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux. There it would be wrong: a program inherits the peak of the process that started it.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_gpu_bytes() -> int | None:
    """The most of a GPU's memory that this process's tensors have held at a time, without what CUDA and the backend
    take for themselves; None where it has used none."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _host_seconds() -> tuple[float, float]:
    """Seconds that the host's cores have been busy, and in all, since it was started."""
    times = psutil.cpu_times()
    # A guest's time is in "user" and "nice" already.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _tells_utilization(device: torch.device, warn: Callable[[str], None]) -> bool:
    try:
        torch.cuda.utilization(device)
    except ModuleNotFoundError:
        return False
    except Exception as error:  # NVML's own errors, which torch does not name: MIG, no permission
        warn(f"the GPU's utilization is not recorded: {' '.join(str(error).split()).rstrip('.')}.")
        return False
    return True
