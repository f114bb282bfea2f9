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


def verdict(first, second):
    """What rank 0 says when it has asked rank 1."""
    asked = first.overdue()
    instead = None if asked is None else second.instead_of(asked)
    return "" if instead is None else first.sentence(0, 1, asked, instead)


def test_ranks_that_wait_for_what_the_other_has_not_begun_say_so_the_same_whoever_asks():
    first, second = rank([A], A), rank([B], B)
    said = "rank 0 waits for weights 2 and rank 1 for weights 4, and so for ever: all ranks must call the same layers, "
    assert verdict(first, second).startswith(said)
    asked = second.overdue()
    assert second.sentence(1, 0, asked, first.instead_of(asked)) == verdict(rank([A], A), second)


@pytest.mark.parametrize(
    "other",
    [
        rank([A], A),  # it waits for the same
        rank([A, B], B),  # it has sent what is waited for: the message is on its way
        rank([], None),  # it has not come so far yet
        rank([B], None),
    ],
)
def test_a_rank_that_is_slow_or_has_sent_is_no_deadlock(other):
    assert verdict(rank([A], A), other) == ""


def test_what_the_other_waits_for_has_been_begun_here_so_it_will_go_on():
    assert verdict(rank([B, A], A), rank([B], B)) == ""


def test_another_time_of_the_same_tag_counts():
    """The second one of A here, the first one there."""
    assert verdict(rank([A, A], A), rank([A, B], B)) != ""


def test_a_rank_that_went_on_while_it_asked_says_nothing_and_asks_once_for_each_wait():
    first, second = rank([A], A), rank([B], B)
    asked = first.overdue()
    assert first.overdue() is None
    instead = second.instead_of(asked)
    first.go_on()
    assert first.sentence(0, 1, asked, instead) == ""
    first.wait(A, first.begin(A), "weights 2")
    assert first.sentence(0, 1, asked, instead) == "", "what it asked for was another time"
    assert first.overdue() == (A, 2, "weights 2")


def test_nobody_is_asked_before_the_wait_is_long(monkeypatch):
    monkeypatch.setattr(deadlock, "PATIENCE_SECONDS", 60.0)
    assert rank([A], A).overdue() is None


class Watchdog:
    """A watchdog that has heard nothing."""

    rank, waited_for = 1, "the parameters of layers.1"

    def silent_neighbours(self, seconds):
        return [0]


def test_a_timeout_names_what_this_rank_waited_for():
    late = RuntimeError("[/a/gloo/b.cc:78] Timed out waiting 500ms for recv operation to complete")
    sentence, exit_code = _explain(late, Watchdog())
    assert exit_code == 1
    assert sentence == (
        "a collective failed: rank 0 was silent for 0.5 s (stopped, or stuck?) while rank 1 waited for the parameters "
        "of layers.1."
    )
