"""The gauges of a rank's process, host and GPU."""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch


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
        warn(f"the record goes without the GPU's utilization: {' '.join(str(error).split()).rstrip('.')}.")
        return False
    return True
