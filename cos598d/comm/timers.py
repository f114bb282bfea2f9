"""Timestamps of a device's work: of the host's clock, or of a CUDA stream."""

import time
from typing import Any

import torch

Timestamp = Any  # the result of a timer's `now`, for that timer only


class Timer:
    """The host's clock, for a device that has done its work when a call returns. Timestamps are seconds."""

    # Whether a timestamp is known as soon as it is taken.
    is_at_once = True

    def now(self) -> Timestamp:
        """A timestamp after everything that the device was given so far."""
        return time.perf_counter()

    def wait(self, timestamp: Timestamp) -> None:
        """Block the host until the device has reached `timestamp`."""

    def seconds(self, first: Timestamp, last: Timestamp) -> float:
        """Seconds between two timestamps, the earlier one first. The device must have reached both."""
        return last - first


class StreamTimer(Timer):
    """A CUDA device's current stream: a timestamp is when the device gets there, not when the host asks.

    `now` puts a timing event into the stream and returns. So a phase has the time of its own work and of what it waits
    for, not of other streams' work. Synchronizing the device instead would wait for all streams. It would add the time
    of a collective that overlaps backward to backward's time.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """

    is_at_once = False

    def __init__(self, device: torch.device):
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, timestamp: torch.cuda.Event) -> None:
        timestamp.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1e3


def timer_of(device: torch.device) -> Timer:
    """The timer for work on `device`."""
    return StreamTimer(device) if device.type == "cuda" else Timer()
