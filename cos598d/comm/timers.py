"""The time of a device's work: on the host's clock, or on a CUDA stream's."""

import time
from typing import Any

import torch

Timestamp = Any  # what a timer's `now` returns, for that timer only


class Timer:
    """The host's clock, for a device that has done its work when the call returns. Timestamps are seconds."""

    # Whether a timestamp is known as soon as it is taken.
    is_at_once = True

    def now(self) -> Timestamp:
        """The time at which the device has done all that it was given so far."""
        return time.perf_counter()

    def wait(self, timestamp: Timestamp) -> None:
        """Block the host until the device has got to `timestamp`."""

    def seconds(self, first: Timestamp, last: Timestamp) -> float:
        """From one timestamp to a later one; the device must have got to both."""
        return last - first


class StreamTimer(Timer):
    """The order of a CUDA device's current stream: a timestamp is when the device gets there, not when the host asks.

    `now` puts a timing event into the stream and goes on. So a phase has the time of its own work and of what that
    waits for; work on other streams is not waited for. Synchronizing the device in its place would wait for all
    streams, and take the time of a collective that runs during backward for backward's.
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
    """The timer of work on `device`."""
    return StreamTimer(device) if device.type == "cuda" else Timer()
