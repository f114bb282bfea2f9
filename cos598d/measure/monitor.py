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

from cos598d.measure.wire import Counters, Interface, WireCounter
from cos598d.records.schema import Sample

JOIN_SECONDS = 2.0  # a sample takes less than a millisecond; a gauge that hangs must not delay the end

Row = dict[str, Any]
T = TypeVar("T")


class Monitor:
    """One rank's samples: the host's every `interval` seconds as rows, and the network's bytes at each iteration's end.

    `begin` and `pause` enclose training: evaluation, the rendezvous and the exchange of facts are not counted. What
    other ranks are still sending when an iteration ends counts for the next one. An error calls `warn` and ends the
    sampling, not the run.
    """

    def __init__(self, interval: float, interface: Interface | None, device: torch.device, warn: Callable[[str], None]):
        self.interface, self._warn = interface, warn
        self._interval = min(interval, threading.TIMEOUT_MAX)
        self._counter = WireCounter(interface) if interface else None
        self._gauges = HostGauges(device, warn)
        self._before = 0.0  # seconds of the attempts before
        self._began = 0.0
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def open(
        self, write: Callable[[dict[str, Any]], None], iteration: Callable[[], int], last: Sample | None = None
    ) -> None:
        """Set how the host's rows are written, and which iteration is running (or just ended).

        `last` is the last row of an earlier attempt: seconds continue there.
        """
        self._write, self._iteration = write, iteration
        if last:
            self._before, self._gauges.before = last.seconds, last.process_cpu_seconds

    def begin(self) -> None:
        """Start counting: training begins, or continues after a pause."""
        if self._counter:
            self._sampled(self._counter.resume)
        if not self._thread.ident and not self._stopping.is_set():
            self._began = time.perf_counter()
            self._gauges.start()
            self._sampled(self._add_row)
            self._thread.start()

    def read(self) -> Counters | None:
        """The interface's bytes since the last reading; None if they are not known. It takes no communication."""
        return self._sampled(self._counter.read) if self._counter else None

    def pause(self) -> None:
        """Stop counting: training ends, or stops to evaluate."""
        if self._counter:
            self._counter.pause()
        self._sampled(self._add_row)

    def stop(self) -> None:
        """End the thread. There are no more rows after this."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join(JOIN_SECONDS)

    def _add_row(self) -> None:
        seconds = round(self._before + time.perf_counter() - self._began, 6)
        self._write({"seconds": seconds, "iteration": self._iteration()} | self._gauges.read())

    def _sampled(self, take: Callable[[], T]) -> T | None:
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
        while not self._stopping.wait(self._interval):
            self._sampled(self._add_row)


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
