"""Times on a CUDA device, here one whose streams are simulated. tests/test_gpu.py has a real one."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from simulated_device import SimulatedDevice
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.measure.clock import IterationClock
from cos598d.tools.bench.sweep import measure_arrivals, sweep_message_size

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    return SimulatedDevice(monkeypatch)


def two_ranks(ledger=None):
    """A communicator of one of two ranks, whose collectives are simulated."""
    comm = Communicator(None, "nccl", CUDA, ledger)
    comm.world_size = 2
    return comm


def test_calls_during_backward_count_as_sync_only_while_they_are_waited_for(device, monkeypatch):
    comm, clock = two_ranks(), IterationClock(CUDA)
    device.all_reduces_take(monkeypatch, 2.0)
    clock.start()
    with clock.phase("forward"):
        device.launch(1.0)
    loss = comm.all_reduce(torch.zeros(1), "loss", async_op=True)
    calls = []
    with clock.phase("backward"):
        for place in range(4):
            device.launch(1.0)
            calls.append(comm.all_reduce(torch.zeros(1), f"bucket {place}", async_op=True))
    with clock.phase("sync"):
        for call in (*calls, loss):
            call.wait()
    with clock.phase("step"):
        device.launch(0.5)
    seconds = clock.stop()
    # On the wire: the loss from 1 to 3, the buckets until 5, 7, 9 and 11. Backward computes from 1 to 5.
    expected = {"data": 0, "forward": 1, "backward": 4, "sync": 6, "clip": 0, "step": 0.5, "checkpoint": 0}
    assert clock.phases == expected
    assert clock.spans == [("forward", 0, 1), ("backward", 1, 4), ("sync", 5, 6), ("step", 11, 0.5)]
    assert (seconds, clock.started, clock.stopped) == (11.5, 0, 11.5)
    assert device.waits == 1


def test_blocking_calls_are_timed_with_one_wait_of_the_host(device, monkeypatch):
    output = io.StringIO()
    ledger = Ledger(output)
    comm, clock = two_ranks(ledger), IterationClock(CUDA)
    device.all_reduces_take(monkeypatch, 0.25)
    clock.start()
    ledger.begin(1, clock.began)
    with clock.phase("backward"):
        device.launch(1.0)
    with clock.phase("sync"):
        for place in range(105):
            comm.all_reduce(torch.zeros(1), f"gradient {place}")
    clock.stop()
    assert device.waits == 1
    assert clock.phases["sync"] == 105 * 0.25
    ledger.flush()
    rows = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [row["seconds"] for row in rows] == [0.25] * 105
    assert [row["started"] for row in rows] == [1 + 0.25 * place for place in range(105)]


def test_a_phase_between_iterations_counts_in_the_next_one_s_seconds_not_spans(device):
    clock = IterationClock(CUDA)
    for _ in range(2):
        clock.start()
        with clock.phase("forward"):
            device.launch(1.0)
        seconds = clock.stop()
    assert (seconds, clock.phases["checkpoint"]) == (1.0, 0)
    with clock.phase("checkpoint"):
        device.launch(0.25)
    device.launch(4.0)  # evaluation, say
    clock.start()
    with clock.phase("forward"):
        device.launch(1.0)
    with clock.phase("checkpoint"):
        device.launch(0.5)
    assert clock.stop() == 1.75
    assert (clock.phases["checkpoint"], clock.phases["forward"]) == (0.75, 1.0)
    assert clock.spans == [("forward", 0.0, 1.0), ("checkpoint", 1.0, 0.5)]


def test_an_asynchronous_call_has_the_device_s_seconds(device, monkeypatch):
    comm = two_ranks()
    device.all_reduces_take(monkeypatch, 2.0)
    device.launch(1.0)  # what the call sends
    call = comm.all_reduce(torch.zeros(1), "bucket", async_op=True)
    device.launch(0.5)  # beside it
    call.wait()
    assert device.host == 0
    assert comm.ledger.rows[0].seconds is None
    comm.ledger.settle()
    assert [(row.seconds, row.started) for row in comm.ledger.rows] == [(2, None)]


class Layer(torch.autograd.Function):
    """A layer whose backward takes a second of the device's time, and none of the host's."""

    @staticmethod
    def forward(context, inputs, weight, device):
        context.device = device
        return inputs + weight

    @staticmethod
    def backward(context, gradient):
        context.device.launch(1.0)
        return gradient, gradient, None


class Layers(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(3)])
        self._device = device

    def forward(self, inputs):
        for weight in self.weights:
            inputs = Layer.apply(inputs, weight, self._device)
        return inputs


def test_a_gradient_arrives_when_the_device_has_computed_it(device):
    model = Layers(device)
    workload = SimpleNamespace(
        replica=lambda: model,
        computing=lambda replica: replica,
        inputs=lambda *_: {"inputs": torch.zeros(1)},
        trainable=list(model.named_parameters()),
    )
    arrivals = measure_arrivals(workload, Communicator(None, "nccl", CUDA))
    assert arrivals["backward_seconds"] == 3
    assert [tensor["seconds"] for tensor in arrivals["tensors"]] == [3, 2, 1]


def test_messages_of_a_sweep_have_the_device_s_seconds(device, monkeypatch):
    device.all_reduces_take(monkeypatch, 0.5)
    found = sweep_message_size(two_ranks(), 2**-8, rounds=2, seed=0, progress=lambda: None)
    assert [size["seconds"] for size in found["sizes"]] == [[0.5, 0.5], [0.5, 0.5]]


def test_on_the_cpu_the_clock_needs_no_wait():
    clock = IterationClock(torch.device("cpu"))
    clock.start()
    with clock.phase("forward"):
        pass
    seconds = clock.stop()
    assert clock.began == clock.started <= clock.stopped
    assert seconds == clock.stopped - clock.started
    assert clock.spans == [("forward", clock.spans[0][1], clock.phases["forward"])]
