"""A local worker: a process for one rank, which is a fork of this one where that is as good as a fresh interpreter."""

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
    """Whether a fork of this process, as it is now, can be all that a fresh interpreter would be.

    Only on Linux: other systems' libraries need not survive it. Not next to other threads, whose locks would stay
    locked in the fork, and not where there may be a GPU, whose driver is of no use to a fork once it was asked for
    anything.
    """
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1 and not may_have_gpu()


@contextlib.contextmanager
def held(numbers: Collection[int]) -> Iterator[Collection[int]]:
    """Within it signals of these numbers wait. Gives the mask of those that were held before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Fork:
    """A fork of this process, which has loaded already what takes a fresh interpreter seconds.

    It calls `be_rank` and ends with the code that this returns. All else is as in a program that is started with the
    environment `environ` and `python -u`: its session, its signals, streams that keep nothing back, and of `listener`
    the descriptor, where `environ` has LISTENER. To be made while signals that are handled here are `held`, whose
    `mask` the fork takes when it has its own session. Its methods are those of a Popen.
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
        assert self._process.pid is not None  # it was started
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, or -N where signal N has ended it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, where it still runs."""
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
    gc.freeze()  # what is there stays: looking for garbage in it would only copy the pages that all share
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
    except KeyboardInterrupt:  # before it could say so
        exit_code = 128 + signal.SIGINT
    sys.exit(exit_code)
