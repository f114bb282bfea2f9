"""What only a GPU can prove of time, in this process; tests/test_gpu_runs.py starts whole programs.

`make gpu` runs both. Whatever is added for CUDA or nccl is proved in one of them.
"""

import contextlib
import json

import pytest
import torch
from gpu import CUDA, NEEDS_GPU, keep
from torch.profiler import ProfilerActivity, profile, record_function

from cos598d.comm.group import close_group, open_group
from cos598d.measure.clock import IterationClock
from cos598d.models.build import find_model
from cos598d.records.conventions import PHASES
from cos598d.tools.bench.candidates import parse_candidate
from cos598d.tools.bench.turns import Turn
from cos598d.tools.bench.workload import Workload

pytestmark = NEEDS_GPU


@pytest.fixture
def alone():
    """The ranks of a run of one."""
    yield open_group(None, "gloo", CUDA)
    close_group()


@pytest.fixture
def no_waiting(monkeypatch):
    """The host may not wait for the whole device."""

    def synchronize(device=None):
        raise AssertionError("the device was synchronized")

    return lambda: monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_work_on_another_stream_counts_as_sync_where_the_stream_waits(no_waiting):
    cycles, other = 5_000_000, torch.cuda.Stream()
    for _ in range(100):  # an idle device's cycles are longer
        torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    no_waiting()
    clock = IterationClock(CUDA)
    clock.start()
    with clock.phase("forward"):
        torch.cuda._sleep(cycles)
    with clock.phase("backward"):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(16 * cycles)
        torch.cuda._sleep(4 * cycles)
    with clock.phase("sync"):
        torch.cuda.current_stream().wait_stream(other)
    seconds = clock.stop()
    keep("clock.json", {"seconds": seconds, "phases": clock.phases, "spans": clock.spans})
    # One, four, and what is left of sixteen: only the order of lengths on the device's own clock is asked.
    assert clock.phases["forward"] < clock.phases["backward"] < clock.phases["sync"]
    assert sum(clock.phases.values()) == pytest.approx(seconds, rel=0.05)


def kernels_by_phase(trace):
    """Seconds of kernels and copies of a Chrome trace, by the phase within which the host launched them."""
    events = [event for event in trace["traceEvents"] if "dur" in event]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched.get(event["args"].get("correlation"))
        for mark in marks:
            if at is not None and mark["ts"] <= at <= mark["ts"] + mark["dur"]:
                found[mark["name"]] = found.get(mark["name"], 0.0) + event["dur"] / 1e6
    return found


class MarkedClock(IterationClock):
    """A clock whose phases appear by name in the profiler's trace."""

    @contextlib.contextmanager
    def phase(self, name):
        with record_function(name), super().phase(name):
            yield


def test_phases_are_as_long_as_their_kernels_in_the_profile(alone, tmp_path, monkeypatch):
    # Enough that the device is the slower of the two, never without work in forward and backward.
    batch = 32 if torch.cuda.get_device_properties(CUDA).total_memory > 60e9 else 8
    workload = Workload(find_model("bert-base"), CUDA, batch, tokens=384, seed=1)
    monkeypatch.setattr("cos598d.tools.bench.turns.IterationClock", MarkedClock)
    turn = Turn(parse_candidate("flat"), workload, alone, steps=True)
    inputs = workload.inputs(0, 0, 1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):  # its own first time
        turn.iterate(inputs)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        turn.iterate(inputs)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    kernels = kernels_by_phase(json.loads((tmp_path / "trace.json").read_text()))
    phases = dict(turn._clock.phases)
    turn.detach()
    keep("phases.json", {"clock_seconds": phases, "kernel_seconds": kernels})
    for phase in ("forward", "backward"):
        assert kernels[phase] == pytest.approx(phases[phase], rel=0.2), (kernels, phases)
    for phase, seconds in kernels.items():
        assert seconds <= 1.05 * phases[phase] + 1e-4, (phase, kernels, phases)
