"""Clock, counters, samples and TensorBoard. Imports them: a kernel's counts have to be known to the byte."""

import socket
import time

import pytest
import torch
from recording import alone, record_run, rows_of

from cos598d.measure.clock import IterationClock
from cos598d.measure.monitor import Monitor
from cos598d.measure.peak import gpu_peak, share_of_peak
from cos598d.measure.wire import WireCounter
from cos598d.records.conventions import HOST, ITERATIONS, PHASES

CPU = torch.device("cpu")


def send(sender, receiver, size):
    sender.sendall(b"x" * size)
    while size:
        size -= len(receiver.recv(size))
    time.sleep(0.05)  # the acknowledgement


@pytest.fixture
def connection():
    """Both ends of a TCP connection of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def test_what_is_sent_between_resume_and_pause_is_counted_to_the_byte(connection):
    counter = WireCounter()  # both ends are here
    assert counter.read() is None
    send(*connection, 1000)
    counter.resume()
    send(*connection, 2000)
    counter.resume()  # it counts already
    assert counter.read() == (2000, 2000)
    assert counter.read() == (0, 0)
    counter.pause()
    send(*connection, 4000)
    assert counter.read() is None
    counter.resume()
    assert counter.read() == (0, 0)
    send(*connection, 100_000)
    send(connection[1], connection[0], 3_000)
    assert counter.read() == (103_000, 103_000)


def test_a_gauge_that_fails_ends_the_sampling_and_not_the_run(monkeypatch, tmp_path):
    said, rows = [], []
    monitor = Monitor(60.0, True, CPU, said.append)
    monitor.open(rows.append, lambda: 3)
    monitor.begin()
    assert monitor.read() == (0, 0)
    monkeypatch.setattr("cos598d.measure.wire._sockets", lambda: 1 / 0)
    assert monitor.read() is None
    monitor.pause()
    monitor.stop()
    assert said == ["sampling of CPU, memory and network stopped, and training continues: division by zero."]
    assert [row["iteration"] for row in rows] == [3, 3], "the first and the last"


def test_a_clock_sums_phases_over_their_parts():
    clock = IterationClock(CPU)
    with clock.phase("checkpoint"):  # between two iterations: it counts for the next one
        time.sleep(0.02)
    clock.start()
    for _ in range(2):
        with clock.phase("forward"):
            time.sleep(0.01)
    seconds = clock.stop()
    assert clock.phases["checkpoint"] >= 0.02
    assert clock.phases["forward"] >= 0.02
    assert seconds == pytest.approx(clock.stopped - clock.started + clock.phases["checkpoint"])
    assert [name for name, _, _ in clock.spans] == ["forward", "forward"]
    assert set(clock.phases) == set(PHASES)
    assert clock.spans[0][1] + clock.spans[0][2] <= clock.spans[1][1]


def test_tensorboard_shows_the_rows(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from cos598d.measure.tensorboard import Board

    alone(record_run, tmp_path, 7, stops_after=7, board=Board())
    alone(record_run, tmp_path, 8, at=6, board=Board())
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    def shown(tag):
        return {event.step: event.value for event in events.Scalars(tag)}

    rows = rows_of(tmp_path, ITERATIONS)
    assert shown("loss") == {row["iteration"]: pytest.approx(row["loss"]) for row in rows}
    assert all(0 <= row["host_cpu_percent"] <= 100 and row["rss_bytes"] > 1e7 for row in rows_of(tmp_path, HOST))
    assert shown("seconds/forward")[8] == pytest.approx(rows[7]["seconds_forward"])
    assert shown("bytes/predicted_sent")[1] == rows[0]["predicted_bytes_sent"]
    assert shown("evaluation/acc") == {5: 0.75}
    assert shown("examples_per_second")[5] == pytest.approx(rows[4]["examples"] / rows[4]["seconds"])


PEAKS = {
    ("NVIDIA H100 80GB HBM3", "bf16", False): 989.4e12,
    ("NVIDIA H100 80GB HBM3", "fp32", True): 494.7e12,
    ("NVIDIA H100 PCIe", "bf16", False): 756e12,
    ("NVIDIA H100 PCIe", "fp32", True): 378e12,
    ("NVIDIA A100-SXM4-40GB", "fp32", False): 19.5e12,
    ("NVIDIA L4", "bf16", False): 121e12,
    ("Tesla V100-SXM2-16GB", "fp16", False): 125e12,
    ("Tesla V100-SXM2-16GB", "bf16", False): None,
    ("Tesla T4", "fp32", True): 8.1e12,
    ("Tesla T4", "fp16", False): 65e12,
    ("Tesla T4", "bf16", False): None,  # it has no such units
    ("NVIDIA A1000", "bf16", False): None,
    ("A GPU of 2030", "fp32", False): None,
}


def test_a_gpus_peak_is_its_data_sheets_and_the_share_is_what_was_needed_per_second():
    assert {gpu: gpu_peak(*gpu) for gpu in PEAKS} == PEAKS
    for peak, share in ((1e12, pytest.approx(0.2)), (None, None)):
        assert share_of_peak({"per_example": 2e9, "peak_per_second": peak}, 100.0)["share_of_peak"] == share
