"""Samples during a run: an interface's counters, and the gauges of a rank's process, host and GPU."""

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

JOIN_SECONDS = 2.0  # a sample takes less than a millisecond; a gauge that hangs must not delay the end

Sample = TypeVar("Sample")
Write = Callable[[str], Any]  # of one line with a row

# In a long run rows are rarer than one per `interval` seconds: the time to the next row is at least this part of the
# time since training started.
SPACING = 1 / 2000


class Monitor:
    """One rank's samples, as rows in one file for the network ("wire") and one for the host.

    `begin` and `pause` enclose training: evaluation, the rendezvous and the exchange of facts are not counted.
    1. `begin` reads both and starts a thread, which reads both every `interval` seconds, and less often in a run of
       many hours.
    2. `end_iteration` reads the network's counters, outside the iteration's clock and without communication. What other
       ranks are still sending counts for the next iteration. `read` does the same between two iterations.
    3. `pause` reads both. After that the thread reads only the host, until the next `begin` with its row "resume".
    4. `stop` ends the thread.

    Without an `interface` there are no rows for the network. An error calls `warn` and ends the sampling, not the run.
    """

    def __init__(self, interval: float, interface: Interface | None, device: torch.device, warn: Callable[[str], None]):
        self.interface = interface
        self._interval = min(interval, threading.TIMEOUT_MAX)
        self._warn = warn
        self._counter = WireCounter(interface) if interface else None
        self._gauges = HostGauges(device, warn)
        self._counted = Counters()
        self._began = 0.0  # time of the first row, by time.perf_counter
        self._before = 0.0  # seconds from the first row to the last before the run was resumed
        self._thinning: Thinning | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def open(self, wire: Write, host: Write, iteration: Callable[[], int], thinning: Thinning | None = None) -> None:
        """Set how rows are written, which iteration is running (or just ended), and which network rows are kept."""
        self._wire, self._host, self._iteration, self._thinning = wire, host, iteration, thinning

    def position(self) -> dict[str, Any]:
        """The state of the rows (JSON), for `resume`."""
        with self._lock:
            return {
                "seconds": self._seconds() if self._began else self._before,
                "process_cpu_seconds": self._gauges.process_cpu_seconds,
                "total": self._counter.total if self._counter else Counters(),
                "counted": self._counted,
            }

    def resume(self, position: dict[str, Any]) -> None:
        """Continue from there: the rows' seconds and sums do not start again. Call it before `begin`."""
        self._before = position["seconds"]
        self._gauges.before = position["process_cpu_seconds"]
        self._counted = Counters(*position["counted"])
        if self._counter:
            self._counter.total = Counters(*position["total"])

    def begin(self) -> None:
        """Start counting: training begins, or continues after a pause."""
        self._sample(self._on_begin)
        if not self._thread.ident and not self._stopping.is_set():
            self._thread.start()

    def end_iteration(self, iteration: int) -> Counters | None:
        """The interface's bytes and packets since the last iteration's end; None if they are not known."""
        return self._sample(lambda: self._count("iteration", iteration))

    def read(self) -> Counters | None:
        """The same since the last iteration's end, for what is sent between two iterations."""
        return self._sample(lambda: self._count("interval", self._iteration()))

    def pause(self) -> Counters | None:
        """Stop counting: training ends, or stops to evaluate. Return the counts since the last iteration's end."""
        return self._sample(self._on_pause)

    def stop(self) -> None:
        """End the thread. There are no more rows after this."""
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
            # The counts at `resume`: what arrives meanwhile belongs to the iteration, not to the time before it.
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
        """Since the first row, on one clock over all attempts, without the time between them."""
        return self._before + time.perf_counter() - self._began

    def _sample(self, take: Callable[[], Sample]) -> Sample | None:
        """Call `take` for a sample, one thread at a time. After an error, or after `stop`, return None."""
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
    """Readings of this process and its host. `start` begins the sum of the process's CPU seconds.

    A GPU's memory is that of all processes on it. Its utilization comes from NVML, by the package nvidia-ml-py. Without
    that package it is left out. If NVML refuses for another reason, `warn` is called.
    """

    def __init__(self, device: torch.device, warn: Callable[[str], None]):
        self._device = device
        self._process = psutil.Process()
        self._began: float | None = None
        self.before = 0.0  # the process's CPU seconds before the run was resumed
        self._busy, self._all = _host_seconds()
        self._tells_utilization = device.type == "cuda" and _tells_utilization(device, warn)

    def start(self) -> None:
        """Start to count CPU seconds."""
        self._began = time.process_time()

    @property
    def process_cpu_seconds(self) -> float:
        """CPU seconds of this process since training began, and of the one before it in a resumed run."""
        return self.before if self._began is None else self.before + time.process_time() - self._began

    def read(self) -> dict[str, Any]:
        """A row's gauges; `host_cpu_percent` is the mean over all cores since the previous reading."""
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
    """The peak of this process's memory on the host, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux. There it would be wrong: a program inherits the peak of the process that started it.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_gpu_bytes() -> int | None:
    """The peak of this process's tensors on a GPU, in bytes, without the memory of CUDA and the backend itself; None if
    it has not used one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _host_seconds() -> tuple[float, float]:
    """Seconds that the host's cores have been busy, and in total, since the host started."""
    times = psutil.cpu_times()
    # A guest's time is included in "user" and "nice".
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
