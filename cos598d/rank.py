"""The frame of one rank's process: it meets the other ranks, works, and ends with one sentence for any failure."""

import signal
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cos598d.comm.group import Ranks, close_group, open_group
from cos598d.errors import UserError, one_line
from cos598d.terminal.signals import ENDING, GOES_ON
from cos598d.world.devices import choose_backend, choose_device, choose_threads, gpu_of
from cos598d.world.end import exit_now, print_last_words
from cos598d.world.identity import Identity
from cos598d.world.lifeline import Lifeline
from cos598d.world.malloc import keep_freed_memory
from cos598d.world.meet import meet, tell_failure
from cos598d.world.meeting import Meeting

# Substrings in errors of gloo, nccl and Horovod which mean that a peer is gone or silent.
BROKEN_COLLECTIVE = ("gloo", "Connection closed", "Connection reset", "Timed out", "timeout caused", "NCCL", "Horovod")


class StoppedBySignal(BaseException):
    """A scheduler's signal arrived. It is not an Exception, so that no code handles it as an error."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = signal.Signals(number)


class RankContext(NamedTuple):
    """A rank's environment: the ranks as it sees them, its threads, and the number of ranks on its host."""

    ranks: Ranks
    threads: int
    ranks_on_host: int


def init_rank(meeting: Meeting | None, backend: str, no_cuda: bool, threads: int | None) -> RankContext:
    """Choose this rank's device, backend and threads, and open the process group; no meeting for a single rank."""
    use_cuda = torch.cuda.is_available() and not no_cuda
    device = choose_device(use_cuda, meeting.index_on_host if meeting else 0)
    gpus = meeting.exchange(gpu_of(device)) if meeting else [gpu_of(device)]
    backend = choose_backend(backend, gpus, meeting.hosts if meeting else [None])
    ranks_on_host = meeting.ranks_on_host if meeting else 1
    threads = choose_threads(threads, ranks_on_host)
    keep_freed_memory()
    return RankContext(open_group(meeting, backend, device), threads, ranks_on_host)


class RankProcess:
    """The context in which this process is a rank. `exit_code` is that of its work, or of the error that ended it.

    1. First the rank checks what it can check by itself, before other ranks wait for it.
    2. `meet` waits for the others. From then on, a rank that fails sends its error to them, and they end with it.
    3. At its end the context waits until all ranks have done their work.

    No exception leaves the context: a failure is printed as one sentence. After `meet`, a failure ends the process,
    because the threads of a broken process group would keep it alive.
    """

    exit_code = 0

    def __init__(self, identity: Identity):
        self._identity = identity
        self._lifeline: Lifeline | None = None
        self._tries_to_meet = False

    def __enter__(self) -> "RankProcess":
        self._before = {number: signal.getsignal(number) for number in ENDING}
        for number in self._before:
            if number != signal.SIGINT:
                signal.signal(number, _stop)
        return self

    def meet(self, seconds: float, facts: Mapping[str, Any]) -> Meeting | None:
        """Meet the other ranks within `seconds`, and compare `facts`; None for a single rank. Raises as `meet`."""
        self._tries_to_meet = True
        if self._identity.world_size == 1:
            return None
        meeting = meet(self._identity, seconds, facts)
        self._lifeline = Lifeline(meeting)
        return meeting

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        try:
            if error is None and self._lifeline:
                self._lifeline.close()
        except BaseException as failure:
            error = failure
        if error is not None:
            self._fail(error)
        close_group()
        for number, handler in self._before.items():
            # schedulers repeat their signals until the process ends
            if self.exit_code != GOES_ON or number == signal.SIGINT:
                signal.signal(number, handler)
        return True

    def _fail(self, error: BaseException) -> None:
        """Report the error that ended this rank to the other ranks and to the user."""
        # From here on this process only ends: a launcher's SIGTERM must not interrupt its last messages.
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        identity = self._identity
        sentence, self.exit_code = _explain(error, self._lifeline)
        if self._lifeline:
            self._lifeline.fail(sentence, self.exit_code)
            exit_now(identity.rank, sentence, self.exit_code)
        # In one terminal, all ranks find the same fault in the flags, and rank 0 says it for all.
        is_for_all = not self._tries_to_meet and isinstance(error, UserError) and identity.shares_terminal
        if identity.rank == 0 or not is_for_all:
            print_last_words(identity.rank if identity.world_size > 1 else None, sentence)
        if not self._tries_to_meet and identity.world_size > 1 and not identity.shares_terminal:
            tell_failure(identity, sentence)


def _explain(error: BaseException, lifeline: Lifeline | None) -> tuple[str, int]:
    """The error sentence and the exit code of what ended this rank."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C).", 128 + signal.SIGINT
    if isinstance(error, StoppedBySignal):
        return f"stopped by {error.number.name}.", 128 + error.number
    if isinstance(error, dist.DistError) or any(word in str(error) for word in BROKEN_COLLECTIVE):
        return f"a collective failed: {lifeline.explain() if lifeline else one_line(error)}.", 1
    if isinstance(error, BrokenPipeError) and not error.filename:
        return "the program that read this output has ended. Write the output to a file, or let its reader run on.", 1
    if isinstance(error, OSError) and error.strerror:  # such as a full disk, or a folder without write permission
        what = f"{error.filename or 'a file of the run'} cannot be used ({error.strerror})"
        return f"{what}. Make room there, or choose another folder.", 1
    # A bug, ours or in a student's sync, so its line matters.
    traceback.print_exception(error)
    return f"{type(error).__name__}: {one_line(error)}.", 1


def _stop(number: int, _: Any) -> None:
    raise StoppedBySignal(number)
