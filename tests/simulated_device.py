"""A simulated CUDA device: a host and two streams whose clocks move only when they get work."""

import time

import torch
import torch.distributed as dist


class SimulatedDevice:
    """One stream that computes and one that communicates, and a host that runs ahead of both. Times in seconds.

    `waits` counts how often the host has waited for the device. Replaces torch.cuda's events and synchronize,
    time.perf_counter, and dist.all_reduce with nccl's behaviour. Its tensors are in the host's memory.
    """

    def __init__(self, monkeypatch):
        self.host = self.computes_until = self.travels_until = 0.0
        self.waits = 0
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self, stream):
                self.at = max(device.computes_until, device.host)

            def synchronize(self):
                device.waits += 1
                device.host = max(device.host, self.at)

            def elapsed_time(self, later):
                assert max(self.at, later.at) <= device.host, "CUDA raises for an event that the device has not reached"
                return 1e3 * (later.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)
        monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, zeros=torch.zeros: zeros(*shape))

    def launch(self, seconds: float) -> None:
        """Give the computing stream a kernel. The host continues."""
        self.computes_until = max(self.computes_until, self.host) + seconds

    def all_reduces_take(self, monkeypatch, seconds: float) -> None:
        """From now on each all-reduce takes so many seconds, one after another, while the other stream computes."""

        def all_reduce(tensor, op=None, group=None, async_op=False):
            ready = max(self.computes_until, self.host)  # what it sends is computed then
            self.travels_until = max(self.travels_until, ready) + seconds
            return _Work(self, self.travels_until)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def _synchronize(self, device=None) -> None:
        self.waits += 1
        self.host = max(self.host, self.computes_until, self.travels_until)


class _Work:
    def __init__(self, device: SimulatedDevice, ends: float):
        self._device, self._ends = device, ends

    def wait(self) -> None:
        """As nccl's: the computing stream waits, the host does not."""
        self._device.computes_until = max(self._device.computes_until, self._device.host, self._ends)
