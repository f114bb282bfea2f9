"""Samples during a run: the kernel's counters of the network, and the gauges of a rank's process, host and GPU."""

import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from cos598d.measure.wire import Counters, WireCounter
from cos598d.records.schema import Sample

JOIN_SECONDS = 2.0  # a sample takes less than a millisecond; a gauge that hangs must not delay the end

Row = dict[str, Any]
T = TypeVar("T")


class Monitor:
    """One rank's samples: the host's every `interval` seconds as rows; if it `counts`, the bytes of its connections.

    `begin` and `pause` enclose training: the bytes of evaluation, the rendezvous and the exchange of facts are not
    counted. What other ranks are still sending when an iteration ends counts for the next one. An error calls `warn`
    and ends the sampling, not the run.
    """

    def __init__(self, interval: float, counts: bool, device: torch.device, warn: Callable[[str], None]):
        self._interval, self._warn = min(interval, threading.TIMEOUT_MAX), warn
        self._counter = WireCounter() if counts and WireCounter.is_told() else None
        self._gauges = HostGauges(device, warn)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: self._tried(self._add_rows), name="monitor", daemon=True)

    def open(
        self, write: Callable[[dict[str, Any]], None], iteration: Callable[[], int], last: Sample | None = None
    ) -> None:
        """Set how the host's rows are written, and which iteration is running (or just ended).

        `last` is the last row of an earlier attempt: seconds continue there.
        """
        self._write, self._iteration = write, iteration
        self._before = (last.seconds, last.process_cpu_seconds) if last else (0.0, 0.0)

    def begin(self) -> None:
        """Start counting: training begins, or continues after a pause."""
        if self._counter:
            self._tried(self._counter.resume)
        if not self._thread.ident:
            seconds, of_process = self._before
            self._began = time.perf_counter() - seconds
            self._gauges.start(of_process)
            self._thread.start()

    def read(self) -> Counters | None:
        """The connections' bytes since the last reading; None if they are not known. It takes no communication."""
        return self._tried(self._counter.read) if self._counter else None

    def pause(self) -> None:
        """Stop counting: training ends, or stops to evaluate."""
        if self._counter:
            self._counter.pause()

    def stop(self) -> None:
        """End the thread. There are no more rows after this."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join(JOIN_SECONDS)

    def _tried(self, take: Callable[[], T]) -> T | None:
        """What `take` returns; None after an error, and then there are no more samples."""
        try:
            return take()
        except Exception as error:  # whatever a counter or gauge may raise: no sample is worth a run
            self._counter = None
            self._stopping.set()
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            self._warn(f"sampling of CPU, memory and network stopped, and training continues: {reason}.")
            return None

    def _add_rows(self) -> None:
        """A row now, one after each interval, and one at the end."""
        self._add_row()
        while not self._stopping.wait(self._interval):
            self._add_row()
        self._add_row()

    def _add_row(self) -> None:
        seconds = round(time.perf_counter() - self._began, 6)
        self._write({"seconds": seconds, "iteration": self._iteration()} | self._gauges.read())


class HostGauges:
    """Readings of this process and its host, from `start` on.

    A GPU's memory is that of all processes on it. Its utilization comes from NVML, by the package nvidia-ml-py. Without
    that package it is left out. If NVML refuses for another reason, `warn` is called.
    """

    def __init__(self, device: torch.device, warn: Callable[[str], None]):
        self._device, self._process = device, psutil.Process()
        self._tells_utilization = device.type == "cuda" and _tells_utilization(device, warn)
        self.start()

    def start(self, before: float = 0.0) -> None:
        """Start to count CPU seconds, of which the process had `before` in an earlier attempt."""
        self._began = time.process_time() - before
        self._busy, self._all = _host_seconds()

    def read(self) -> dict[str, Any]:
        """A row's gauges; `host_cpu_percent` is the mean over all cores since the previous reading."""
        busy, total = _host_seconds()
        passed = total - self._all
        row = {
            "process_cpu_seconds": time.process_time() - self._began,
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
