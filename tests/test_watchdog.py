"""The watchdog, as a tree: every rank names the one that was lost, whoever sits above or below."""

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
from cos598d.world import connection, exit, neighbours, watchdog
from cos598d.world.exit import lost_rank
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting
from cos598d.world.watchdog import Watchdog

SIZE = 7  # with two below each: 0 has 1 and 2, 1 has 3 and 4, 2 has 5 and 6


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Processes that have a watchdog and do nothing but wait: world() -> their ids; what they said is in tmp_path."""
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
    """Let all go on: to the end, or the rank in `word` fail."""
    (tmp_path / "fail").write_text(word)
    (tmp_path / "go").touch()


def said(tmp_path, rank):
    return (tmp_path / f"rank{rank}").read_text()


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 6])
def test_a_rank_that_dies_anywhere_in_the_tree_is_named_by_all_and_nobody_else_is(world, tmp_path, lost):
    started = world()
    os.kill(started[lost], signal.SIGKILL)
    codes = ends(started)
    for rank in set(range(SIZE)) - {lost}:
        assert said(tmp_path, rank) == f"error: rank {rank}: {lost_rank(lost)}\n"
        assert os.waitstatus_to_exitcode(codes[rank]) == 1


@pytest.mark.parametrize("failing", [0, 2, 5])
def test_what_a_failing_rank_says_is_repeated_by_all_without_escapes(world, tmp_path, failing):
    started = world()
    go(tmp_path, str(failing))
    ends(started)
    for rank in set(range(SIZE)) - {failing}:
        assert (
            said(tmp_path, rank)
            == f"error: rank {rank}: stopped because rank {failing} did: its data are gone\\x1b[31m\n"
        )


def test_all_leave_in_order_when_all_are_done(world, tmp_path):
    started = world()
    go(tmp_path, "")
    assert set(ends(started).values()) == {0}
    assert not any(said(tmp_path, rank) for rank in range(SIZE))


def test_strangers_at_a_rank_s_port_are_not_lost_ranks(world, tmp_path):
    """They come before its children do, say nothing, rubbish or too much, and stay."""

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


def test_a_defect_in_the_watching_thread_ends_the_run_in_a_sentence(world, tmp_path, monkeypatch):
    def spoilt(meeting):
        if meeting.identity.rank == 3:
            Watchdog._on_message = lambda self, sender, message: message["nothing"]

    started = world(spoilt)
    go(tmp_path, "5")
    ends(started)
    assert said(tmp_path, 3) == "error: rank 3: the watchdog failed: KeyError: 'nothing'.\n"
    assert "rank 0: stopped because rank 5 did" in said(tmp_path, 0)


def test_a_rank_whose_terminal_is_gone_ends_all_the_same(world, tmp_path):
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
def test_a_rank_that_is_stopped_is_named_by_a_neighbour_whose_collective_timed_out(stopped, late, world, tmp_path):
    started = world()
    os.kill(started[stopped], signal.SIGSTOP)
    go(tmp_path, f"late {late}")
    child = 2 * late + 2
    ends({child: started[child]})
    sentence = f"a collective failed: rank {stopped} was silent for 0.5 s (stopped, or stuck?)."
    assert said(tmp_path, child) == f"error: rank {child}: stopped because rank {late} did: {sentence}\n"


@pytest.mark.parametrize("seconds", [4, 8, 30, 61])
def test_how_long_a_host_may_be_silent_is_the_flag_s(seconds, monkeypatch):
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
def test_every_rank_but_0_has_one_parent_that_knows_it(size):
    for rank in range(size):
        children = neighbours.children_of(rank, size)
        assert len(children) <= neighbours.FAN_OUT
        assert all(neighbours.parent_of(child) == rank for child in children)
    assert sum(len(neighbours.children_of(rank, size)) for rank in range(size)) == size - 1
    if size <= 33:
        assert not any(neighbours.children_of(rank, size) for rank in range(1, size))  # a star
