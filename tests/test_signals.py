"""What asks a program to end is noted while it trains, and obeyed by who means it."""

import os
import signal

import pytest

from cos598d.terminal.signals import ENDING, Requests, is_noted


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
