"""What asks a program to end is noted while it trains, and obeyed by who means it."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from cos598d.checkpoint_flags import CheckpointFlags
from cos598d.checkpoints.control import Stopping
from cos598d.terminal.signals import ENDING, Requests, is_noted

QUIET = [0.0] * len(Stopping.VOTES)


@pytest.fixture(autouse=True)
def _handlers():
    """Every test has Python's own handler of Ctrl-C, and leaves the handlers as they were."""
    before = {number: signal.getsignal(number) for number in ENDING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python calls the handler before the next line


@pytest.mark.parametrize("number", ENDING)
def test_the_first_request_is_noted_and_repeated_ones_change_nothing(number):
    with Requests() as requests:
        assert requests.first is None
        send(number)
        assert requests.first is number
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert requests.first is number


@pytest.mark.parametrize("number", ENDING)
def test_a_ctrl_c_that_is_not_the_first_request_is_obeyed_at_once(number):
    with Requests():
        send(number)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_after_the_context_signals_do_what_they_did():
    with Requests():
        pass
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_what_was_ignored_is_ignored_still():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Requests() as requests:
        send(signal.SIGINT)
        assert requests.first is None


def test_the_watchdog_obeys_the_second_ctrl_c_alone():
    """It hears each of them, though Python's handler may be called once for two."""
    assert not is_noted(signal.SIGINT)
    with Requests():
        assert is_noted(signal.SIGUSR1)
        assert is_noted(signal.SIGTERM)
        assert not is_noted(signal.SIGINT)
    with Requests():
        assert is_noted(signal.SIGINT)
        assert not is_noted(signal.SIGINT)
    assert not is_noted(signal.SIGINT)


def test_when_the_first_is_met_a_scheduler_may_repeat_it_to_the_very_end():
    with Requests() as requests:
        send(signal.SIGTERM)
        requests.is_met = True
    send(signal.SIGTERM)
    send(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def two_ranks():
    """What Stopping asks of communicators, for two ranks in this process."""
    store = HashStore()
    return [SimpleNamespace(rank=rank, store=store, exchange=lambda _: ["word"]) for rank in range(2)]


def votes_by_name(stopping):
    return {name for name, vote in zip(Stopping.VOTES, stopping.votes()) if vote}


def test_a_rank_votes_for_what_it_was_asked_and_the_first_rank_for_what_its_clock_says():
    flags, now = CheckpointFlags(max_seconds=60.0, save_seconds=20.0), [100.0]
    with Requests() as requests:
        first, second = (Stopping(flags, comm, requests, 100.0, lambda: now[0]) for comm in two_ranks())
        assert votes_by_name(first) == votes_by_name(second) == set()
        now[0] = 120.0
        assert (votes_by_name(first), votes_by_name(second)) == ({"save"}, set())
        first.saved()
        assert votes_by_name(first) == set()
        now[0] = 160.0
        assert votes_by_name(first) == {"save", "max_seconds"}
        send(signal.SIGUSR1)
        assert votes_by_name(second) == {"SIGUSR1"}


def test_a_rank_that_is_asked_tells_the_others_also_while_no_loss_travels():
    now = [100.0]
    first, second = (
        Stopping(CheckpointFlags(max_seconds=60.0), comm, Requests(), 100.0, lambda: now[0]) for comm in two_ranks()
    )
    now[0] = 159.0
    assert (first.is_asked(), second.is_asked()) == (False, False)
    now[0] = 160.0
    assert first.is_asked()
    assert second.is_asked(), "it looks again after a while"
    third = Stopping(CheckpointFlags(), two_ranks()[1], Requests(), 100.0, lambda: now[0])
    assert not third.is_asked()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SIGTERM", "stopped by SIGTERM"),
        ("SIGINT", "stopped by SIGINT"),
        ("max_seconds", "--max_seconds 9 have passed"),
        ("save", None),
    ],
)
def test_one_vote_of_any_rank_is_enough_and_all_know_why(name, reason):
    stopping = Stopping(CheckpointFlags(max_seconds=9.0), two_ranks()[1], Requests(), 0.0)
    stopping.count(QUIET)
    assert (stopping.reason, stopping.wants_save) == (None, False)
    stopping.count([float(name == one) for one in Stopping.VOTES])
    assert (stopping.reason, stopping.wants_save) == (reason, name == "save")


def test_a_clock_that_is_set_back_or_forth_changes_no_deadline(monkeypatch):
    with Requests() as requests:
        flags = CheckpointFlags(max_seconds=1000.0, save_seconds=1000.0)
        stopping = Stopping(flags, two_ranks()[0], requests, time.monotonic())
        for hours in (-1e6, 1e6):
            monkeypatch.setattr(time, "time", lambda hours=hours: hours * 3600)
            assert stopping.votes() == QUIET
