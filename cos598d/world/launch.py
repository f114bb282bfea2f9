"""Local workers: this same program once per rank, with an endpoint and a secret of their own.

We do not use torch's elastic agent, which also restarts workers. Its store listens at all of the host's addresses and
admits anybody. Its rendezvous unpickles what it finds there. It passes no socket to rank 0. It restarts ranks that have
ended with exit code 75, which are to resume later.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from cos598d.errors import UsageError, UserError
from cos598d.terminal.children import end_all, exit_code_of, wait_together
from cos598d.terminal.program import program
from cos598d.terminal.signals import ENDING, GOES_ON, signal_name
from cos598d.world.endpoint import listen
from cos598d.world.identity import LAUNCHER_PID, LISTENER
from cos598d.world.limits import allow_workers
from cos598d.world.network import DEFAULT_IP
from cos598d.world.secret import SECRET_VARIABLE, new_secret
from cos598d.world.workers import Fork, held, may_fork

SAY_SECONDS = 0.5  # how long the others may take to report a failure before they are stopped
STOP_SECONDS = 30.0  # how long a worker may take to stop
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)

Worker = subprocess.Popen[bytes] | Fork  # its process leads a session of its own
FINAL = (0, UsageError.exit_code, GOES_ON)  # exit codes after which a restart would not help


class _Stopped(BaseException):
    """A signal came that ends this process."""

    def __init__(self, number: int):
        self.number = number


def start_local_workers(
    world_size: int,
    master_port: int | None,
    arguments: Sequence[str],
    max_restarts: int = 0,
    again: Callable[[], Sequence[str]] = tuple,
    be_rank: Callable[[], int] | None = None,
) -> int:
    """Start `world_size` workers on this host and wait for them; return the exit code.

    Every worker runs this same program with `arguments`, in an interpreter of its own. The first time it may instead
    be a fork of this process, which calls `be_rank` and ends with its result. That needs `be_rank` and `may_fork`. Rank
    0 inherits a socket on loopback that is opened here, and all get a secret that only they know.
    When one fails, the others are stopped, and the result is its exit code (128 + N if signal N ended it, or ended
    all). Up to `max_restarts` times all are then restarted, with the further arguments that `again` returns, another
    secret and, unless `master_port` is set, another port. They are not restarted if they rejected an argument, or ended
    to resume later.
    The first signal that arrives here is passed on, so that training workers can save their state. A further Ctrl-C
    ends them. They are not restarted after either.
    Raises UserError if the port is taken, or if this host does not allow so many processes or open files.
    """
    workers: list[Worker] = []
    asked = signal.SIGTERM
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # else the command that started it wants it to continue: nohup, or `&`
                signal.signal(number, _stop)
        for attempt in itertools.count():
            words = [*arguments, *(again() if attempt else ())]
            _start(workers, world_size, master_port, words, attempt, None if attempt else be_rank)
            try:
                exit_code = _wait(workers)
            except _Stopped as stopped:
                for number in SIGNALS:  # schedulers repeat theirs; a user who presses Ctrl-C again means it
                    if number != signal.SIGINT:
                        signal.signal(number, signal.SIG_IGN)
                for worker in workers:  # SIGHUP and SIGQUIT mean nothing to them
                    worker.send_signal(stopped.number if stopped.number in ENDING else signal.SIGTERM)
                exit_code = _wait(workers)
                return exit_code if exit_code in (0, GOES_ON) else 128 + stopped.number
            if exit_code in FINAL or attempt == max_restarts:
                return exit_code
            end_all(workers, STOP_SECONDS, asked)
            workers.clear()
            print(
                f"the ranks ended with exit code {exit_code}: restart {attempt + 1} of {max_restarts}.",
                file=sys.stderr,
                flush=True,
            )
        raise AssertionError("every rank has counted its attempts")
    except _Stopped as stopped:
        if stopped.number == signal.SIGINT:  # the workers report the interruption themselves
            asked = signal.SIGINT
        else:
            print(f"stopped by {signal.Signals(stopped.number).name}.", file=sys.stderr)
        return 128 + stopped.number
    finally:
        for number in SIGNALS:  # from here on this process only waits for the workers to end
            signal.signal(number, signal.SIG_IGN)
        end_all(workers, STOP_SECONDS, asked)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    workers: list[Worker],
    world_size: int,
    master_port: int | None,
    arguments: Sequence[str],
    attempt: int,
    be_rank: Callable[[], int] | None,
) -> None:
    """Start the workers. Each is added to `workers` once it exists."""
    allow_workers(world_size)
    with listen(DEFAULT_IP, master_port or 0, at_once=False) as listener:
        environ = _environment(world_size, listener.getsockname()[1], attempt)
        forks = be_rank is not None and may_fork()
        for rank in range(world_size):
            own = environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                own[LISTENER] = str(listener.fileno())
            try:
                if be_rank is not None and forks:
                    with held(SIGNALS) as mask:  # until it is in `workers` and has its own session
                        workers.append(Fork(be_rank, f"rank {rank}", own, listener, mask))
                else:
                    workers.append(
                        subprocess.Popen(
                            [sys.executable, "-u", *program(), *arguments],
                            env=own,
                            pass_fds=[listener.fileno()] if rank == 0 else [],
                            start_new_session=True,  # a Ctrl-C reaches only this process, which passes it on
                        )
                    )
            except OSError as error:
                raise UserError(
                    f"rank {rank} of {world_size} cannot be started on this host ({error.strerror}). "
                    f"Start fewer ranks, or raise its limits of processes and memory (ulimit -u, -v)."
                ) from None
            listener.close()  # rank 0 has it now, and is about to listen


def _environment(world_size: int, port: int, attempt: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    # One thread until the ranks have met; then each takes its share of the cores.
    return (
        {"OMP_NUM_THREADS": "1"}
        | inherited
        | {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": DEFAULT_IP,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            LAUNCHER_PID: str(os.getpid()),
            SECRET_VARIABLE: new_secret(),
        }
    )


def _wait(workers: Sequence[Worker]) -> int:
    """Wait until all have ended well, or one has failed. Return its exit code."""
    # Ranks that end normally, with 0 or to resume later, do so together.
    failed = wait_together(workers, lambda code: STOP_SECONDS if code == GOES_ON else SAY_SECONDS)
    if failed is None:
        return 0
    rank, code = failed
    if code < 0:
        print(f"rank {rank} was ended by {signal_name(-code)}.", file=sys.stderr)
    return exit_code_of(code)


def _stop(number: int, _: FrameType | None) -> None:
    raise _Stopped(number)
