"""The watchdog, a tree: every rank names the rank that is lost, failed, stopped or deadlocked."""

import contextlib
import os
import signal
import socket
import sys
import time

import pytest
from programs import PATIENCE, wait_until
from torch.distributed import FileStore, HashStore

from cos598d.rank import _explain
from cos598d.world import connection, deadlock, exit, neighbours, watchdog
from cos598d.world.deadlock import DeadlockDetector
from cos598d.world.exit import lost_rank
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting
from cos598d.world.watchdog import Watchdog

SIZE = 7  # with two below each: 0 has 1 and 2, 1 has 3 and 4, 2 has 5 and 6


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Processes with a watchdog that only wait: world() -> their ids. Their output is in tmp_path."""
    monkeypatch.setattr(neighbours, "FAN_OUT", 2)
    started = {}

    def be(rank, before):
        signal.alarm(PATIENCE)
        out = os.open(tmp_path / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        meeting = Meeting(Identity(rank, SIZE), FileStore(str(tmp_path / "store"), SIZE), ["here"] * SIZE, seconds=60)
        before(meeting)
        mine = Watchdog(meeting)
        (tmp_path / f"ready{rank}").touch()
        wait_until((tmp_path / "go").exists)
        if (tmp_path / "fail").read_text() == str(rank):
            mine.fail("its data are gone\x1b[31m")
            exit.exit_now(rank, "its data are gone", 1)
        if (tmp_path / "fail").read_text() == f"late {rank}":
            mine.fail(_explain(RuntimeError("[/a/gloo/b.cc:78] Timed out waiting 500ms for recv"), mine)[0])
            os._exit(1)
        if (tmp_path / "fail").read_text() == "":
            mine.close()
            os._exit(0)
        time.sleep(PATIENCE)

    def start(before=lambda meeting: None):
        for rank in range(SIZE):
            sys.stdout.flush()
            sys.stderr.flush()
            started[rank] = os.fork()
            if not started[rank]:
                try:
                    be(rank, before)
                except BaseException as error:
                    print(error, file=sys.stderr, flush=True)
                os._exit(3)
        for rank in range(SIZE):
            wait_until((tmp_path / f"ready{rank}").exists)
        return started

    yield start
    for process in started.values():
        with contextlib.suppress(ChildProcessError):  # it was waited for, and its id may be another's by now
            if not os.waitpid(process, os.WNOHANG)[0]:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def ends(started, but=()):
    return {rank: os.waitpid(process, 0)[1] for rank, process in started.items() if rank not in but}


def go(tmp_path, word):
    """Let all end, or the rank in `word` fail."""
    (tmp_path / "fail").write_text(word)
    (tmp_path / "go").touch()


def said(tmp_path, rank):
    return (tmp_path / f"rank{rank}").read_text()


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 6])
def test_all_ranks_name_a_dead_rank_anywhere_in_the_tree(world, tmp_path, lost):
    started = world()
    os.kill(started[lost], signal.SIGKILL)
    codes = ends(started)
    for rank in set(range(SIZE)) - {lost}:
        assert said(tmp_path, rank) == f"error: rank {rank}: {lost_rank(lost)}\n"
        assert os.waitstatus_to_exitcode(codes[rank]) == 1


@pytest.mark.parametrize("failing", [0, 2, 5])
def test_all_ranks_repeat_the_error_of_a_failed_rank_without_escapes(world, tmp_path, failing):
    started = world()
    go(tmp_path, str(failing))
    ends(started)
    why = f"stopped because rank {failing} did: its data are gone\\x1b[31m"
    for rank in set(range(SIZE)) - {failing}:
        assert said(tmp_path, rank) == f"error: rank {rank}: {why}\n"


def test_finished_ranks_leave_without_errors(world, tmp_path):
    started = world()
    go(tmp_path, "")
    assert set(ends(started).values()) == {0}
    assert not any(said(tmp_path, rank) for rank in range(SIZE))


def test_strangers_at_a_rank_s_port_are_not_lost_ranks(world, tmp_path):
    """They connect before its children do, send nothing, rubbish or too much, and stay."""

    def attacked(meeting):
        listen = neighbours.listen

        def listen_to_strangers(*words):
            listener = listen(*words)
            for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", (1).to_bytes(4, "big"), b"A" * 100_000):
                stranger = socket.create_connection(listener.getsockname())
                stranger.setblocking(False)
                strangers.append(stranger)
                if rubbish:
                    stranger.send(rubbish)
            return listener

        neighbours.listen = listen_to_strangers

    strangers = []
    started = world(attacked)
    go(tmp_path, "")
    assert set(ends(started).values()) == {0}
    assert not any(said(tmp_path, rank) for rank in range(SIZE))


def test_a_defect_in_the_watchdog_ends_the_run_with_its_error(world, tmp_path):
    def spoilt(meeting):
        if meeting.identity.rank == 3:
            Watchdog._on_message = lambda self, sender, message: message["nothing"]

    started = world(spoilt)
    go(tmp_path, "5")
    ends(started)
    assert said(tmp_path, 3) == "error: rank 3: the watchdog failed: KeyError: 'nothing'.\n"
    assert "rank 0: stopped because rank 5 did" in said(tmp_path, 0)


def test_a_rank_without_a_terminal_ends_when_another_dies(world, tmp_path):
    def deaf(meeting):
        if meeting.identity.rank == 3:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stdout.write("not flushed yet")

    started = world(deaf)
    os.kill(started[5], signal.SIGKILL)
    codes = ends(started)
    assert os.waitstatus_to_exitcode(codes[3]) == 1
    assert "lost connection to rank 5" in said(tmp_path, 0)


@pytest.mark.parametrize(("stopped", "late"), [(5, 2), (0, 1)])
def test_a_neighbour_whose_collective_timed_out_names_a_stopped_rank(stopped, late, world, tmp_path):
    started = world()
    os.kill(started[stopped], signal.SIGSTOP)
    go(tmp_path, f"late {late}")
    child = 2 * late + 2
    ends({child: started[child]})
    sentence = f"a collective failed: rank {stopped} was silent for 0.5 s (stopped, or stuck?)."
    assert said(tmp_path, child) == f"error: rank {child}: stopped because rank {late} did: {sentence}\n"


@pytest.mark.parametrize("seconds", [4, 8, 30, 61])
def test_keepalive_takes_as_long_as_the_flag_allows(seconds, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = socket.create_connection(server.getsockname())
        neighbour = connection.Connection(line, 0, b"", accepted=False, largest=100)
        monkeypatch.setattr(watchdog, "connect_neighbours", lambda meeting: ([neighbour], []))
        monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
        mine = Watchdog(Meeting(Identity(1, 2, silence_seconds=seconds), HashStore(), ["here"] * 2, seconds=0.1))
        idle, interval, count = (
            line.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
        )
        assert idle + interval * count == seconds
        assert min(idle, interval) >= 1
        mine.close()


@pytest.mark.parametrize("size", [1, 2, 33, 34, 1024, 1100])
def test_every_rank_except_0_has_one_parent_that_knows_it(size):
    for rank in range(size):
        children = neighbours.children_of(rank, size)
        assert len(children) <= neighbours.FAN_OUT
        assert all(neighbours.parent_of(child) == rank for child in children)
    assert sum(len(neighbours.children_of(rank, size)) for rank in range(size)) == size - 1
    if size <= 33:
        assert not any(neighbours.children_of(rank, size) for rank in range(1, size))  # a star


A, B = 2, 4  # tags


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(deadlock, "PATIENCE_SECONDS", 0.0)


def rank(begun, waits):
    """A rank that has begun exchanges of these tags and waits for the latest of `waits`. None: it computes."""
    mine = DeadlockDetector()
    numbers = {tag: mine.begin(tag) for tag in begun}
    if waits is not None:
        mine.wait(waits, numbers[waits], f"weights {waits}")
    return mine


def verdict(first, second, ranks=(0, 1)):
    """The error of the first after it has asked the second, or nothing."""
    asked = first.overdue()
    instead = None if asked is None else second.instead_of(asked)
    return "" if instead is None else first.sentence(*ranks, asked, instead)


@pytest.mark.usefixtures("no_patience")
def test_both_ranks_of_a_deadlock_report_the_same():
    said = "rank 0 waits for weights 2 and rank 1 for weights 4, forever. All ranks must call the same layers, "
    assert verdict(rank([A], A), rank([B], B)).startswith(said)
    assert verdict(rank([B], B), rank([A], A), (1, 0)) == verdict(rank([A], A), rank([B], B))
    assert verdict(rank([A, A], A), rank([A, B], B)), "the second time of A here, the first one there"


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (([A], A), ([A], A)),  # it waits for the same
        (([A], A), ([A, B], B)),  # it has sent what the other waits for
        (([A], A), ([], None)),  # it has not started the exchange yet
        (([A], A), ([B], None)),
        (([B, A], A), ([B], B)),  # the other waits for what this rank has begun, so it will continue
    ],
)
def test_a_slow_rank_is_no_deadlock(mine, other):
    assert verdict(rank(*mine), rank(*other)) == ""


@pytest.mark.usefixtures("no_patience")
def test_a_rank_that_continued_reports_nothing_and_asks_once_per_wait(monkeypatch):
    first, second = rank([A], A), rank([B], B)
    asked = first.overdue()
    assert first.overdue() is None
    instead = second.instead_of(asked)
    first.go_on()
    assert first.sentence(0, 1, asked, instead) == ""
    first.wait(A, first.begin(A), "weights 2")
    assert first.sentence(0, 1, asked, instead) == "", "what it asked for was another time"
    assert first.overdue() == (A, 2, "weights 2")
    monkeypatch.setattr(deadlock, "PATIENCE_SECONDS", 60.0)
    assert rank([A], A).overdue() is None, "nobody is asked before the wait is long"


class Silent:
    """A watchdog that has heard nothing."""

    rank, waited_for = 1, "the parameters of layers.1"

    def silent_neighbours(self, seconds):
        return [0]


@pytest.mark.parametrize(
    ("watchdog", "said", "expected"),
    [
        (
            None,
            "[/somewhere/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation",
            "a rank was silent for 12 s (stopped, or stuck?).",
        ),
        (
            Silent(),
            "[/a/gloo/b.cc:78] Timed out waiting 500ms for recv operation to complete",
            "rank 0 was silent for 0.5 s (stopped, or stuck?) while rank 1 waited for the parameters of layers.1.",
        ),
        (
            None,
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:36811",
            "Connection closed by peer [127.0.0.1]:36811.",
        ),
    ],
)
def test_the_error_of_a_collective_names_the_wait_and_no_source_of_the_backend(watchdog, said, expected):
    assert _explain(RuntimeError(said), watchdog) == (f"a collective failed: {expected}", 1)
