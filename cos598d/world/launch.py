"""Local ranks: processes of this host, one for each rank, forked if that is as good as a fresh interpreter."""

import contextlib
import gc
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait as wait_for_one
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from cos598d.errors import UserError
from cos598d.terminal.signals import ENDING, GOES_ON, signal_name
from cos598d.world.identity import LAUNCHER_PID, LISTENER, SECRET_VARIABLE
from cos598d.world.meet import bind
from cos598d.world.network import DEFAULT_IP

SAY_SECONDS = 1.0  # how long the others may take to report a failure before they are stopped
STOP_SECONDS = 30.0  # how long a rank may take to save its state after a signal
END_SECONDS = 5.0  # how long one may take to end


def may_fork() -> bool:
    """Whether a fork is as good as a fresh interpreter: on Linux, without a GPU, and with no other threads."""
    return sys.platform == "linux" and not torch.cuda.is_available() and len(os.listdir("/proc/self/task")) == 1


def start_local_workers(world_size: int, master_port: int | None, be_rank: Callable[[], int]) -> int:
    """Start `world_size` ranks here, each of which calls `be_rank`; return the exit code when all have ended.

    `be_rank` can be pickled: where a fork is not as good, a fresh interpreter calls it. Rank 0 gets a socket on
    loopback that is bound here, and all get a secret that only they know. When one rank fails, the others are stopped,
    and the result is its exit code (128 + N if signal N ended it). Signals are passed on: a training saves its state
    and ends. A second Ctrl-C ends all at once.
    """
    context = multiprocessing.get_context("fork" if may_fork() else "spawn")
    listener = bind(DEFAULT_IP, master_port or 0)
    environ = _environment(world_size, listener.getsockname()[1])
    ranks: list[BaseProcess] = []
    for rank in range(world_size):
        arguments = (be_rank, rank, environ, listener)
        ranks.append(context.Process(target=_be, args=arguments))  # type: ignore[attr-defined]  # every context has it
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        force = number == signal.SIGINT and signal.SIGINT in asked
        asked.append(number)
        _send(ranks, signal.SIGKILL if force else number)

    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # else the command that started it wants it to continue: nohup, or `&`
                signal.signal(number, pass_on)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until each has a session of its own
        try:
            with listener:
                for each in ranks:
                    each.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        failed = _failure(ranks)
    except OSError as error:
        raise UserError(f"{world_size} ranks cannot be started here ({error.strerror}). Start fewer.") from None
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked and failed not in (0, GOES_ON):
        return 128 + asked[0]
    if failed < 0:
        print(
            f"rank {[rank.exitcode for rank in ranks].index(failed)} was ended by {signal_name(-failed)}.",
            file=sys.stderr,
        )
    return failed if failed >= 0 else 128 - failed


def _environment(world_size: int, port: int) -> dict[str, str]:
    """What every rank finds in its environment, under torchrun's names and ours."""
    ours = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ours |= {"MASTER_ADDR": DEFAULT_IP, "MASTER_PORT": str(port)}
    return ours | {LAUNCHER_PID: str(os.getpid()), SECRET_VARIABLE: secrets.token_hex(32)}


def _be(be_rank: Callable[[], int], rank: int, environ: dict[str, str], listener: socket.socket) -> None:
    """In the new process: become a rank."""
    os.setsid()  # a Ctrl-C reaches only the launcher, which passes it on
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {rank}")  # what `ps -e` and `top` show
    gc.freeze()  # garbage collection would copy the pages that all share
    torch.set_num_threads(1)  # until the ranks have met
    os.environ.update(environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    if rank == 0:
        os.environ[LISTENER] = str(listener.detach())
    else:
        listener.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that nothing is lost at its end
    try:
        sys.exit(be_rank())
    except KeyboardInterrupt:  # before the rank could report it
        sys.exit(128 + signal.SIGINT)


def _failure(ranks: Sequence[BaseProcess]) -> int:
    """Wait until all have ended well, or one has failed and the others had time to report it; return its exit code."""
    running = list(ranks)
    while running:
        wait_for_one([rank.sentinel for rank in running])
        failed = {rank.exitcode for rank in ranks if rank.exitcode}
        if failed:
            _join(ranks, STOP_SECONDS if failed == {GOES_ON} else SAY_SECONDS)
            break
        running = [rank for rank in running if rank.exitcode is None]
    # Of several the cause is the one that a signal ended: its code is negative.
    return min((rank.exitcode for rank in ranks if rank.exitcode), default=0)


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End those that still run: by SIGTERM, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _send(ranks, number)
        _join(ranks, END_SECONDS)


def _send(ranks: Sequence[BaseProcess], number: int) -> None:
    for rank in ranks:
        if rank.pid and rank.is_alive():
            os.kill(rank.pid, number)


def _join(ranks: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for rank in ranks:
        if rank.pid:
            rank.join(max(0.0, deadline - time.monotonic()))
