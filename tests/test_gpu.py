"""What only a GPU can prove of time and of nccl's calls, in this process; tests/test_gpu_runs.py starts whole programs.

`make gpu` runs both. Whatever is added for CUDA or nccl is proved in one of them.
"""

import copy
import json
import os

import pytest
import torch
import torch.distributed as dist
from cos598d.comm.communicator import Communicator
from cos598d.comm.process_group import close_group, open_group
from cos598d.doors.parallel import data_parallel
from gpu import CUDA, NEEDS_GPU, keep
from torch.profiler import ProfilerActivity, profile

from cos598d.comm.ledger import Ledger
from cos598d.measure.clock import IterationClock
from cos598d.models.build import find_model
from cos598d.records.conventions import PHASES
from cos598d.tools.bench.candidates import parse_candidate
from cos598d.tools.bench.trace import MarkedClock
from cos598d.tools.bench.turns import Turn
from cos598d.tools.bench.workload import Stepper, Workload
from cos598d.world.network import INTERFACE_VARIABLE

pytestmark = NEEDS_GPU


@pytest.fixture
def nccl(monkeypatch):
    """A communicator over nccl's group of this one process, which makes its calls as if there were another rank."""
    monkeypatch.setenv(INTERFACE_VARIABLE, os.environ.get(INTERFACE_VARIABLE, "lo"))
    torch.cuda.set_device(CUDA)
    open_group(None, "nccl")
    comm = Communicator(None, "nccl", CUDA, Ledger())
    comm.world_size = 2
    yield comm
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


def test_nccl_calls_record_their_seconds_and_the_host_never_waits(nccl, no_waiting):
    large = torch.randn(4096, 4096, device=CUDA)
    ones = torch.ones(1 << 20, device=CUDA)

    def blocking_calls():
        nccl.all_reduce(ones, "blocking")
        nccl.broadcast(ones, "from the root")
        nccl.reduce(ones, "to the root")
        nccl.all_reduce(ones, "largest", op=dist.ReduceOp.MAX)
        return large @ large

    blocking_calls()  # loads what they need
    torch.cuda.synchronize()
    nccl.ledger.forget()
    no_waiting()
    nccl.ledger.begin(1, nccl.time.now())
    product = blocking_calls()
    call = nccl.all_reduce(ones, "other", async_op=True)
    for _ in range(20):
        product = large @ product
        product /= product.norm()
    call.wait()
    assert all(row.seconds is None for row in nccl.ledger.rows)
    nccl.ledger.settle()
    rows = {row.tensor: (row.started, row.seconds) for row in nccl.ledger.rows}
    keep("nccl_calls.json", rows)
    assert len(rows) == 5
    assert all(started >= 0 and seconds > 0 for started, seconds in rows.values())
    starts = [started for started, _ in rows.values()]
    assert starts == sorted(starts)
    # The last one was waited for after the products, which the others had not to wait for.
    assert rows["other"][1] == max(seconds for _, seconds in rows.values())
    assert torch.equal(ones, torch.ones_like(ones))


def test_data_parallel_averages_over_nccl(nccl):
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(CUDA)
    replica = copy.deepcopy(plain)
    model = data_parallel(replica, "bucketed")
    model._comm.world_size = nccl.world_size  # the other one adds nothing
    inputs = torch.randn(8, 64, device=CUDA)
    for one in (plain, model):
        one(inputs).sum().backward()
    for own, other in zip(replica.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad / 2)
    assert model.ledger.totals()["bucket 0"].calls == 1


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


def test_phases_are_as_long_as_their_kernels_in_the_profile(tmp_path):
    comm = Communicator(None, "gloo", CUDA)
    # Enough that the device is the slower of the two, never without work in forward and backward.
    batch = 32 if torch.cuda.get_device_properties(CUDA).total_memory > 60e9 else 8
    workload = Workload(find_model("bert-base"), CUDA, batch, tokens=384, seed=1)
    turn = Turn(parse_candidate("flat"), workload, comm, Stepper(workload.model))
    turn.clock = MarkedClock(CUDA)
    inputs = workload.inputs(0, 0, 1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):  # its own first time
        turn.iterate(inputs)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        turn.iterate(inputs)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    kernels = kernels_by_phase(json.loads((tmp_path / "trace.json").read_text()))
    phases = dict(turn.clock.phases)
    turn.detach()
    keep("phases.json", {"clock_seconds": phases, "kernel_seconds": kernels})
    for phase in ("forward", "backward"):
        assert kernels[phase] == pytest.approx(phases[phase], rel=0.2), (kernels, phases)
    for phase, seconds in kernels.items():
        assert seconds <= 1.05 * phases[phase] + 1e-4, (phase, kernels, phases)
