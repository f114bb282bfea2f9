"""What a run counts in addition to its ledger: the bytes on the wire, and the host's processor and memory."""

import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from programs import PATIENCE, TINY, TINY_TRAINING, script, wait_until
from recorded import add_iteration, rows_of

from cos598d.commands.script import run_script
from cos598d.config import RunConfig
from cos598d.measure import wire
from cos598d.measure.monitor import Monitor
from cos598d.measure.record import RunRecord
from cos598d.measure.wire import Counters, Interface, find_interface
from cos598d.records.conventions import OWN_SOCKETS
from cos598d.records.figures import RankSums, epoch_traffic, wire_figures
from cos598d.tools.report.load import load_run
from cos598d.world.network import interface_of, network_identity

ITERATIONS = 4  # two in each epoch
CPU = torch.device("cpu")
STOPPED = "sampling of CPU, memory and network stopped, and training continues:"


@contextlib.contextmanager
def busy_loopback():
    """Another program, which sends by loopback all the time."""
    talk = "import socket; a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname())\n"
    talk += "c = a.accept()[0]; print('up', flush=True)\nwhile True: b.sendall(bytes(60_000)); c.recv(1 << 20)"
    program = subprocess.Popen(["nice", sys.executable, "-c", talk], stdout=subprocess.PIPE)
    try:
        program.stdout.readline()
        yield
    finally:
        program.kill()
        program.communicate()


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """The record of 2 ranks that trained for 2 epochs with an evaluation after each, next to a busy loopback."""
    folder = tmp_path_factory.mktemp("counted")
    words = [script("task2b/run_glue.py"), *TINY, "--max_train_examples", "32", "--num_train_epochs", "2"]
    words += ["--world_size", "2", "--no_save_model", "--monitor_interval", "0.05", "--output_dir", folder / "run"]
    with busy_loopback():
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_iteration_has_its_counted_and_predicted_bytes(counted, rank):
    rows = rows_of(counted / f"iterations.rank{rank}.jsonl")
    assert len(rows) == ITERATIONS
    for way in ("sent", "received"):
        predicted = sum(row[f"predicted_bytes_{way}"] for row in rows)
        assert predicted > 0
        # A single iteration's bytes may be counted with its neighbour's, and rank 0's store has some of its own.
        assert 0.99 * predicted < sum(row[f"counted_bytes_{way}"] for row in rows) < 1.05 * predicted + 100_000
        assert all(row[f"counted_bytes_{way}"] > 0 for row in rows)


def test_rows_of_the_wire_are_sums_since_training_started(counted):
    rows = rows_of(counted / "wire.rank1.jsonl")
    ends = [row for row in rows if row["kind"] == "iteration"]
    assert [row["iteration"] for row in ends] == list(range(ITERATIONS + 1))
    assert [ends[0][name] for name in Counters._fields] == [0, 0, 0, 0]
    for name in ("seconds", "iteration", *Counters._fields):
        values = [row[name] for row in rows]
        assert values == sorted(values)
    assert {(row["interface"], row["shared_by_ranks"]) for row in rows} == {(OWN_SOCKETS, 1)}
    assert {row["kind"] for row in rows} == {"iteration", "interval", "resume"}


def test_rows_of_the_host_have_the_process_and_its_host(counted):
    rows = rows_of(counted / "host.rank0.jsonl")
    assert rows[0]["iteration"] == 0
    assert all(0 <= row["host_cpu_percent"] <= 100 and row["rss_bytes"] > 1e7 for row in rows)
    seconds = [row["process_cpu_seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] < seconds[-1]


def test_the_summary_s_wire_can_be_recomputed_from_the_rows(counted):
    found = load_run(counted)["wire"]
    assert (found["interface"], found["shared_by_ranks"]) == (OWN_SOCKETS, 1)
    assert found["ranks_by_interface"] == [[0], [1]]
    for rank in range(2):
        rows = rows_of(counted / f"wire.rank{rank}.jsonl")
        for name in Counters._fields:
            mean = (rows[-1][name] - rows[0][name]) / ITERATIONS
            assert found[f"{name}_per_iteration"][rank] == pytest.approx(mean)


def test_without_an_interface_or_an_interval_no_file_is_left(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"

    def files(*words):
        ended = run_script("task1", "none", [*TINY_TRAINING, "--max_steps", "2", "--output_dir", "out", *words])
        assert ended == 0, capfd.readouterr().err
        return {path.name for path in out.iterdir()}

    names = files()
    assert "host.rank0.jsonl" in names
    assert "wire.rank0.jsonl" not in names, "a single rank has no wire"
    assert load_run(out)["wire"] is None
    assert rows_of(out / "epochs.jsonl")[0]["counted_bytes_sent"] == [None]
    for old in ("wire.rank0.jsonl", "wire.rank3.jsonl", "host.rank3.jsonl"):
        (out / old).write_text("an earlier run's\n")
    (out / "tensorboard").mkdir()
    names = files("--overwrite_output_dir", "--monitor_interval", "0")
    assert not [name for name in names if name.startswith(("wire.", "host.", "tensorboard"))]


def test_ranks_may_sample_differently():
    assert not {"monitor_interval", "tensorboard"} & RunConfig().facts().keys()


# --- the monitor alone, on counters that the test sets


@pytest.fixture
def kernel(monkeypatch):
    """A kernel whose counters the test sets; `lines` is what was said."""
    kernel = SimpleNamespace(counters=Counters(1000, 1000, 10, 10), error=None, lines=[])

    def read(interface):
        if kernel.error:
            raise kernel.error
        return kernel.counters

    monkeypatch.setattr(wire, "read_counters", read)
    return kernel


def record_with_monitor(folder, kernel, interval=60.0):
    return RunRecord(folder, 0, Monitor(interval, Interface("eth7", (0, 2)), CPU, kernel.lines.append))


def end_iteration(record, iteration, epoch=1):
    record.ledger.iteration = iteration
    add_iteration(record, iteration, epoch)


def travel(kernel, size):
    kernel.counters = kernel.counters.plus(Counters(size, size, 1, 1))


def test_what_travels_between_the_epochs_is_not_counted(tmp_path, kernel):
    with record_with_monitor(tmp_path, kernel) as record:
        travel(kernel, 10**6)  # the first weights
        for epoch in (1, 2):
            record.begin_training()
            for iteration in (2 * epoch - 1, 2 * epoch):
                travel(kernel, 100 * iteration)
                end_iteration(record, iteration, epoch)
            travel(kernel, 7)  # an average of weights that settles the epoch
            record.pause_training()
            travel(kernel, 10**6)  # an evaluation
        share = record.share()
        record.publish()
    rows = [row for row in rows_of(tmp_path / "wire.rank0.jsonl") if row["kind"] == "iteration"]
    assert [row["bytes_sent"] for row in rows] == [0, 100, 300, 607, 1007]
    assert {row["shared_by_ranks"] for row in rows} == {2}
    assert [row["counted_bytes_sent"] for row in rows_of(tmp_path / "iterations.rank0.jsonl")] == [100, 207, 300, 407]
    sums = RankSums(share["sums"])
    assert [epoch_traffic([sums], epoch)["counted_bytes_sent"] for epoch in (1, 2)] == [[307], [707]]
    assert wire_figures([sums], [share["interface"]])["bytes_sent_per_iteration"] == [(100 + 207 + 300 + 407) / 4]


def test_an_interface_that_vanishes_ends_the_sampling_and_not_the_run(tmp_path, kernel):
    with record_with_monitor(tmp_path, kernel, interval=0.01) as record:
        record.begin_training()
        travel(kernel, 100)
        end_iteration(record, 1)
        kernel.error = OSError("the interface eth7 is gone")
        end_iteration(record, 2)
        end_iteration(record, 3)
        record.pause_training()
        sums = RankSums(record.share()["sums"])
        record.publish()
    assert kernel.lines == [f"{STOPPED} the interface eth7 is gone."]
    assert [row["counted_bytes_sent"] for row in rows_of(tmp_path / "iterations.rank0.jsonl")] == [100, None, None]
    assert rows_of(tmp_path / "wire.rank0.jsonl")[-1]["bytes_sent"] == 100
    assert epoch_traffic([sums], 1)["counted_bytes_sent"] == [None]
    figures = wire_figures([sums], [["eth7", [0, 2]]])
    assert figures["bytes_sent_per_iteration"] == [100], "the mean of those that were counted"


def test_counters_that_go_back_are_no_count(tmp_path, kernel):
    with record_with_monitor(tmp_path, kernel) as record:
        record.begin_training()
        kernel.counters = Counters()
        end_iteration(record, 1)
    assert kernel.lines == [f"{STOPPED} the counters of eth7 went back."]


@pytest.mark.parametrize("ends", ["well", "with an error", "with a failed sample"])
def test_the_thread_ends_with_the_record(tmp_path, kernel, ends):
    def use(record):
        with record:
            record.begin_training()
            assert any(thread.name == "monitor" for thread in threading.enumerate())
            if ends == "well":
                record.pause_training()
                record.share()
            if ends == "with a failed sample":
                kernel.error = RuntimeError()
                end_iteration(record, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use(record_with_monitor(tmp_path, kernel, interval=0.01))
    assert kernel.lines == ([f"{STOPPED} RuntimeError."] if ends == "with a failed sample" else [])
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"live"} if ends == "with a failed sample" else set()), "an iteration is something to look at"


def opened(kernel, interval, interface=None, wire_rows=None, host_rows=None):
    """A monitor without a record."""
    monitor = Monitor(interval, interface, CPU, kernel.lines.append)
    monitor.open((wire_rows or io.StringIO()).write, (host_rows or io.StringIO()).write, lambda: 1)
    return monitor


def test_the_thread_samples_only_the_host_while_training_pauses(kernel):
    files = [io.StringIO(), io.StringIO()]
    monitor = opened(kernel, 0.01, Interface("eth7", (0,)), *files)
    monitor.begin()
    monitor.pause()
    lengths = [len(file.getvalue()) for file in files]
    wait_until(lambda: len(files[1].getvalue()) > lengths[1])
    monitor.stop()
    assert len(files[0].getvalue()) == lengths[0]
    assert kernel.lines == []


def test_bytes_that_arrive_while_training_begins_are_in_rows_and_sums(kernel):
    rows = io.StringIO()
    monitor = opened(kernel, 1000.0, Interface("eth7", (0,)), rows)
    read, counter = monitor._counter._now, monitor._counter

    def moves():
        travel(kernel, 36)
        return read()

    counter._now = moves
    monitor.begin()
    counted = monitor.end_iteration(1)
    monitor.stop()
    first, *_, last = [json.loads(line) for line in rows.getvalue().splitlines()]
    assert counted.bytes_sent == last["bytes_sent"] - first["bytes_sent"]


@pytest.mark.parametrize(("passed", "expected"), [(100, 1.0), (20_000, 10.0)])
def test_a_long_run_samples_less_often(passed, expected, kernel, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monitor = Monitor(1.0, None, CPU, kernel.lines.append)
    monitor.resume(monitor.position() | {"seconds": 40.0})
    monitor.open(io.StringIO().write, io.StringIO().write, lambda: 1)
    asked = []
    monitor._stopping.wait = lambda seconds: asked.append(seconds) or True
    monitor.begin()
    monitor._thread.join(PATIENCE)
    now[0] += passed - 40
    monitor._watch()
    assert asked == [1.0, expected]


def test_a_gauge_that_hangs_does_not_hold_up_the_end(kernel, monkeypatch):
    monkeypatch.setattr("cos598d.measure.monitor.JOIN_SECONDS", 0.1)
    hangs, free = threading.Event(), threading.Event()
    monitor = opened(kernel, 0.01)
    monitor.begin()
    monkeypatch.setattr(monitor._gauges, "read", lambda: hangs.set() or free.wait(PATIENCE) or {})
    assert hangs.wait(PATIENCE)
    thread = monitor._thread
    monitor.stop()
    assert thread.is_alive(), "the end has waited for it"
    free.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_ranks_without_a_count_are_none_in_the_summary():
    ranks = [RankSums() for _ in range(3)]
    for rank, sums in enumerate(ranks):
        for iteration, epoch in enumerate((1, 1, 2), start=1):
            row = {"iteration": iteration, "epoch": epoch, "predicted_bytes_sent": 10, "predicted_bytes_received": 20}
            counted = Counters(100 + rank, 200, 1, 2) if rank else Counters(None, None, None, None)
            sums.add(row | {f"counted_{name}": value for name, value in counted._asdict().items()})
    found = wire_figures(ranks, [["eth0", [0]], ["ens3", [1, 2]], ["ens3", [1, 2]]])
    assert (found["interface"], found["shared_by_ranks"], found["ranks_by_interface"]) == ("ens3", 2, [(1, 2)])
    assert found["bytes_sent_per_iteration"] == [None, 101, 102]
    assert found["predicted_bytes_sent_per_iteration"] == [None, 10, 10]
    epoch = epoch_traffic(ranks, 1)
    assert (epoch["predicted_bytes_sent"], epoch["counted_bytes_sent"]) == ([20, 20, 20], [None, 202, 204])
    assert epoch_traffic(ranks, 3) == {}
    assert epoch_traffic([*ranks[1:], RankSums()], 1)["counted_bytes_sent"] == [202, 204, 0], "it was not there"


# --- which interface


HERE, LOOPBACK = network_identity(), interface_of("127.0.0.1")
FOUND = {
    "the first that gloo is given": ([["another host", "eth1"], None], "eth1,eth0", Interface("eth1", (1,))),
    "ranks of one host share it": (
        [["another host", "eth0"], None, [HERE, "eth0"], [HERE, "eth1"]],
        "eth0",
        Interface("eth0", (1, 2)),
    ),
    "all on one host: own sockets": ([[HERE, "eth0"], None], "eth0", Interface(OWN_SOCKETS, (1,))),
    "unknown": ([["another host", "eth0"], None], "no-such", None),
    "the one of the local address": ([["another host", "eth1"], None], None, Interface(LOOPBACK, (1,))),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_interface_that_rank_1_counts_on(name, monkeypatch):
    """`said` are the answers of all ranks; None is what rank 1 finds itself."""
    said, variable, expected = FOUND[name]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if variable is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    monkeypatch.setattr(wire, "has_counters", lambda name: name in ("eth0", "eth1", LOOPBACK))
    comm = SimpleNamespace(rank=1, exchange=lambda mine: [mine if other is None else other for other in said])
    meeting = SimpleNamespace(identity=SimpleNamespace(master_ip="127.0.0.1"))
    assert find_interface(comm, meeting) == expected
    assert find_interface(comm, None) is None, "a single rank has no wire"


def test_an_interface_that_is_not_there_has_no_counters():
    assert wire.has_counters(LOOPBACK)
    assert not wire.has_counters("no-such")


def test_own_sockets_are_those_of_this_process_and_of_connections_that_have_ended(tmp_path):
    counter = wire.WireCounter(Interface(OWN_SOCKETS, (0,)))
    with busy_loopback(), socket.create_server(("127.0.0.1", 0)) as server:
        counter.resume()
        for ended in (False, True):
            with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
                one.sendall(bytes(50_000))
                taken = 0
                while taken < 50_000:
                    taken += len(other.recv(1 << 16))
                total = counter.read()
            assert total[:2] == (50_000 * (1 + ended), 50_000 * (1 + ended))
