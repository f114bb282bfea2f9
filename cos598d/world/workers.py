"""A local worker: a process for one rank. It is a fork of this one if that is as good as a fresh interpreter."""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from cos598d.terminal.streams import unbuffer_streams
from cos598d.world.devices import may_have_gpu
from cos598d.world.identity import LISTENER


def may_fork() -> bool:
    """Whether a fork of this process, in its current state, is as good as a fresh interpreter.

    Only on Linux: other systems' libraries may not survive a fork. Not with other threads, whose locks would stay
    locked in the fork. Not if there may be a GPU: after any call of its driver, a fork cannot use it.
    """
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1 and not may_have_gpu()


@contextlib.contextmanager
def held(numbers: Collection[int]) -> Iterator[Collection[int]]:
    """A context in which signals of these numbers wait. Yields the mask of signals that waited before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Fork:
    """A fork of this process, which has already loaded what takes a fresh interpreter seconds.

    It calls `be_rank` and ends with its result as exit code. In all else it is like a program started with the
    environment `environ` and `python -u`: session, signals, unbuffered streams. If `environ` has LISTENER, it also has
    the descriptor of `listener`. Create it while signals that are handled here are `held`. The fork takes their `mask`
    when it has its own session. Its methods are those of a Popen.
    """

    def __init__(
        self,
        be_rank: Callable[[], int],
        name: str,
        environ: Mapping[str, str],
        listener: socket.socket,
        mask: Collection[int],
    ):
        self._process = multiprocessing.get_context("fork").Process(
            target=_be, args=(be_rank, name, environ, listener, mask)
        )
        self._process.start()
        assert self._process.pid is not None  # it has been started
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or -N if signal N has ended it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _be(
    be_rank: Callable[[], int], name: str, environ: Mapping[str, str], listener: socket.socket, mask: Collection[int]
) -> NoReturn:
    """In the fork: become what `exec` would make of it, then a rank."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    gc.freeze()  # garbage collection would only copy the pages that all share
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)  # what `ps -e` and `top` show
    if LISTENER in environ:
        listener.detach()
    else:
        listener.close()
    torch.set_num_threads(1)  # until the ranks have met
    os.environ.clear()
    os.environ.update(environ)
    unbuffer_streams()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        exit_code = be_rank()
    except KeyboardInterrupt:  # before it could report it
        exit_code = 128 + signal.SIGINT
    sys.exit(exit_code)
