"""Moments of a device's work and the seconds between two of them: on the host's clock, or on a CUDA stream's."""

import time
from typing import Any, Protocol

import torch


class HostTime:
    """The host's clock, for a device that has done its work when the call returns. A moment is a number of seconds."""

    # Whether a moment is known as soon as it is taken.
    is_at_once = True

    def now(self) -> float:
        """This moment."""
        return time.perf_counter()

    def wait(self, moment: float) -> None:
        """It is past already."""

    def seconds(self, first: float, last: float) -> float:
        """From one moment to a later one."""
        return last - first


class StreamTime:
    """The order of a CUDA device's current stream: a moment is when the device gets there, not when the host says so.

    `now` puts a timing event into the stream and goes on. So a phase has the time of its own work and of what that
    waits for; work on other streams is not waited for. Synchronizing the device in its place would wait for all
    streams, and take the time of a collective that runs beside backward for backward's.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """

    is_at_once = False

    def __init__(self, device: torch.device):
        self._device = device

    def now(self) -> torch.cuda.Event:
        """The moment at which the stream that is current in this thread has done all it was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, moment: torch.cuda.Event) -> None:
        """Block the host until the device has got to `moment`."""
        moment.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """From one moment to a later one; the device must have got to both."""
        return first.elapsed_time(last) / 1e3


Moment = Any  # what a Time's `now` returns, for that Time alone


class Time(Protocol):
    """What HostTime and StreamTime have in common."""

    is_at_once: bool

    def now(self) -> Moment:
        """This moment."""

    def wait(self, moment: Moment) -> None:
        """Until the device has got to `moment`."""

    def seconds(self, first: Moment, last: Moment) -> float:
        """From one moment to a later one."""


def time_of(device: torch.device) -> Time:
    """What tells the moments of work on `device`."""
    return StreamTime(device) if device.type == "cuda" else HostTime()
