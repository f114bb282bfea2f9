"""Ranks of a lesson that wait for each other forever are ended at once, and slow ranks are not."""

import json
import threading
import time

import pytest
import torch

from cos598d.tools.check.notes import (
    BEGIN,
    DROPPED,
    END,
    MEET,
    MET,
    MOST_NOTES,
    RAISED,
    THREADS,
    WAITS,
    read_trace,
    standstill,
)
from cos598d.tools.check.spawn import CALLS, LATE, RETURNED, run_world
from cos598d.tools.learn.comm import LessonCommunicator
from cos598d.tools.learn.stuck import StuckRanks, all_wait, never_go_on

LONG = 60.0  # seconds, of which no test takes a part unless it fails


def begin(number, op, peer=None, shape=(2,), blocks=True):
    return [BEGIN, number, op, "a tensor", list(shape), "float32", peer, 7, blocks]


def over(number):
    return [END, number]


def traces_of(ranks):
    return [read_trace(b"".join(json.dumps(note).encode() + b"\n" for note in notes)) for notes in ranks]


def is_proved(*ranks, ended=()):
    """Whether ranks with these notes wait forever by proof; those of `ended` have ended."""
    traces = traces_of(ranks)
    has_ended = [rank in ended for rank in range(len(ranks))]
    return all_wait(traces, has_ended) and never_go_on(traces, has_ended)


def send(number, to):
    return [begin(number, "send", to, blocks=False), [WAITS, number, 8]]


def receive(number, source):
    return [begin(number, "receive", source, blocks=False), [WAITS, number, 9]]


IN_VAIN = {
    "all send": (send(1, 1), send(1, 2), send(1, 0)),
    "all receive": (receive(1, 1), receive(1, 0)),
    "the second message has no other end": (
        [*send(1, 1), over(1), *send(2, 1)],
        [*receive(1, 0), over(1), *send(2, 0)],
    ),
    "other kinds of calls": ([begin(1, "all_reduce")], [begin(1, "all_gather")]),
    "one is further": ([begin(1, "all_reduce")], [[MEET]]),
    "not the same exchange": ([[MEET], [MET], [MEET]], [[MEET], [MET], begin(1, "all_reduce")]),
    "the root is elsewhere": (receive(1, 1), [begin(1, "broadcast", 0)]),
    "the root waits for its child": ([begin(1, "broadcast", 0)], receive(1, 0)),
}
GO_ON = {
    "the same call": ([begin(1, "all_reduce")], [begin(1, "all_reduce")]),
    "a rank computes": ([begin(1, "all_reduce")], []),
    "a rank has only begun": ([begin(1, "all_reduce")], [begin(1, "all_gather", blocks=False)]),
    "the other end is begun": (send(1, 1), [begin(1, "receive", 0, blocks=False), *send(2, 0)]),
    "a call of before is begun": ([begin(1, "all_reduce")], [begin(1, "all_reduce", blocks=False), *receive(2, 0)]),
    "the root has what it needs": ([begin(1, "gather", 0)], [begin(1, "gather", 0)]),
    "what is sent to a root may be gone": (receive(1, 1), [begin(1, "reduce", 0)], [begin(1, "reduce", 0)]),
    "an empty message": ([begin(1, "send", 1, (0,), False), [WAITS, 1, 8]], send(1, 0)),
    "an error was caught": ([*send(1, 1), [RAISED, 1]], send(1, 0)),
    "another thread": ([[THREADS], *send(1, 1)], send(1, 0)),
    "notes that cannot be read": ([*send(1, 1), [BEGIN, 2]], send(1, 0)),
    "too many notes": ([[MET]] * MOST_NOTES + send(1, 1), send(1, 0)),
}


@pytest.mark.parametrize("name", IN_VAIN | GO_ON)
def test_only_ranks_that_wait_for_what_none_has_begun_are_deadlocked(name):
    assert is_proved(*(IN_VAIN | GO_ON)[name]) == (name in IN_VAIN)


def test_a_dropped_send_is_named_before_the_deadlock_it_causes():
    """gloo may cancel it, and then the others wait forever. A rank may still wait for a handle that it keeps."""
    ranks = [[begin(1, "send", 1 - rank, blocks=False), *receive(2, 1 - rank)] for rank in range(2)]
    assert "none sends" in standstill(traces_of(ranks), "file").words
    ranks[1].insert(1, [DROPPED, 1])
    found = standstill(traces_of(ranks), "file")
    assert (found.rank, found.line) == (1, 7)
    assert "did not wait for it" in found.words


def test_a_rank_that_has_ended_makes_no_more_calls():
    assert is_proved([begin(1, "all_reduce")], [], ended=[1])
    assert is_proved(send(1, 1), [], ended=[1])
    assert not is_proved([begin(1, "all_reduce")], [begin(1, "all_reduce"), over(1)], ended=[1])
    assert not is_proved([], [], ended=[0, 1])


def communicate(comm):
    return LessonCommunicator(comm, __file__)


def send_first(comm):
    own = communicate(comm)
    own.send(torch.ones(3), (comm.rank + 1) % comm.world_size)
    own.recv(torch.ones(3), (comm.rank - 1) % comm.world_size)


def call_alone(comm):
    own = communicate(comm)
    if comm.rank == 0:
        own.all_reduce(torch.ones(3))


def meet_elsewhere(comm):
    own = communicate(comm)
    if comm.rank == 0:
        own.all_reduce(torch.ones(3))
    own.exchange(comm.rank)


def reduce_while_others_gather(comm):
    own = communicate(comm)
    if comm.rank == 0:
        own.reduce(torch.ones(3))
    else:
        own.gather(torch.ones(3))


@pytest.mark.parametrize("function", [send_first, call_alone, meet_elsewhere, reduce_while_others_gather])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_deadlocked_world_is_ended_before_its_time_limit(function, world_size):
    ends = run_world(world_size, function, seconds=LONG, is_stuck=StuckRanks(LONG))
    late = [end for end in ends if end.how == LATE]
    assert late
    assert all(end.how == RETURNED for end in ends if end not in late)
    assert not any(end.frames for end in late)  # a rank whose time is up has frames


def send_and_wait_for_one(comm):
    own = communicate(comm)
    landing, other = torch.ones(3), 1 - comm.rank
    own.isend(torch.ones(3), other)
    kept = own.irecv(landing, other)
    sending = own.isend(torch.ones(3), other)
    kept.wait()
    sending.wait()
    return own.rank


def test_a_rank_notes_a_dropped_message_that_nobody_waited_for():
    for end in run_world(2, send_and_wait_for_one, seconds=LONG, is_stuck=StuckRanks(1.0)):
        assert [call.is_dropped for call in read_trace(end.calls).calls] == [True, False, False], end


def come_late(comm):
    """Ranks that compute for long between calls of all kinds, one after the other."""
    own = communicate(comm)
    tensor = torch.ones(3)
    for late in range(comm.world_size):
        time.sleep(0.4 * (comm.rank == late))
        own.all_reduce(tensor)
        time.sleep(0.4 * (comm.rank == late))
        own.exchange(late)
        time.sleep(0.4 * (comm.rank == late))
        sending = own.isend(tensor, (comm.rank + 1) % comm.world_size)
        own.recv(torch.ones(3), (comm.rank - 1) % comm.world_size)
        sending.wait()
        time.sleep(0.4 * (comm.rank == late))
        own.broadcast(tensor, root=late)
        own.gather(tensor, root=late)
    return own.rank


def receive_in_a_thread(comm):
    """Both ranks wait in their main threads; other threads bring what they wait for, later."""
    own = communicate(comm)
    landing = torch.zeros(3)

    def receive():
        time.sleep(0.5)
        own.recv(landing, 1 - comm.rank)

    thread = threading.Thread(target=receive)
    thread.start()
    own.send(torch.ones(3), 1 - comm.rank)
    thread.join()
    return landing.sum().item()


@pytest.mark.parametrize("function", [come_late, receive_in_a_thread])
def test_slow_ranks_finish(function):
    ends = run_world(2, function, seconds=LONG, is_stuck=StuckRanks(LONG))
    assert [end.how for end in ends] == [RETURNED, RETURNED], ends


def test_long_silence_ends_a_world_without_proof_of_a_deadlock(tmp_path):
    """A message that was begun and never waited for may come or not: after a while without a word it will not."""
    notes = [send(1, 1), [begin(1, "receive", 0, blocks=False), *send(2, 0)]]
    for rank, each in enumerate(notes):
        (tmp_path / f"{CALLS}{rank}").write_text("".join(json.dumps(note) + "\n" for note in each))
    patient, hasty = StuckRanks(LONG), StuckRanks(0.0)
    assert [patient(tmp_path, 2) for _ in range(3)] == [False] * 3
    assert [hasty(tmp_path, 2) for _ in range(2)] == [False, True]
    (tmp_path / f"{CALLS}1").write_text("")
    assert [hasty(tmp_path, 2) for _ in range(3)] == [False] * 3  # this one computes
