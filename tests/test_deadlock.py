"""Ranks that wait for each other for ever are told from those that are slow, whatever comes in between."""

import pytest

from cos598d.rank import _explain
from cos598d.world import deadlock
from cos598d.world.deadlock import DeadlockDetector

A, B = 2, 4  # tags


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(deadlock, "PATIENCE_SECONDS", 0.0)


def rank(begun, waits):
    """A rank that has begun exchanges of these tags, and waits for its latest of one; None: it computes."""
    mine = DeadlockDetector()
    numbers = {tag: mine.begin(tag) for tag in begun}
    if waits is not None:
        mine.wait(waits, numbers[waits], f"weights {waits}")
    return mine


def verdict(first, second, ranks=(0, 1)):
    """What the first says when it has asked the second."""
    asked = first.overdue()
    instead = None if asked is None else second.instead_of(asked)
    return "" if instead is None else first.sentence(*ranks, asked, instead)


def test_ranks_that_wait_for_what_the_other_has_not_begun_say_so_the_same_whoever_asks():
    said = "rank 0 waits for weights 2 and rank 1 for weights 4, forever. All ranks must call the same layers, "
    assert verdict(rank([A], A), rank([B], B)).startswith(said)
    assert verdict(rank([B], B), rank([A], A), (1, 0)) == verdict(rank([A], A), rank([B], B))
    assert verdict(rank([A, A], A), rank([A, B], B)), "the second time of A here, the first one there"


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (([A], A), ([A], A)),  # it waits for the same
        (([A], A), ([A, B], B)),  # it has sent what is waited for: the message is on its way
        (([A], A), ([], None)),  # it has not come so far yet
        (([A], A), ([B], None)),
        (([B, A], A), ([B], B)),  # what it waits for has been begun here, so it will go on
    ],
)
def test_a_rank_that_is_slow_or_will_go_on_is_no_deadlock(mine, other):
    assert verdict(rank(*mine), rank(*other)) == ""


def test_a_rank_that_went_on_while_it_asked_says_nothing_and_asks_once_for_each_wait(monkeypatch):
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


class Watchdog:
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
            Watchdog(),
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
def test_a_broken_collective_is_told_without_the_backend_s_source_and_with_what_was_waited_for(
    watchdog, said, expected
):
    assert _explain(RuntimeError(said), watchdog) == (f"a collective failed: {expected}", 1)
