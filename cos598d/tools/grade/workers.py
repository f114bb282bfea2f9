"""Forks of this process that share a list of work: who is free takes the next item."""

import contextlib
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import NoReturn

from cos598d.errors import UserError, one_line
from cos598d.tools.check.supervisor import SET_PARENT_DEATH_SIGNAL, prctl

ITEM = struct.Struct("i")  # small enough that a pipe never splits one

Work = Callable[[int, Iterator[int]], Iterator[int]]


def in_processes(count: int, items: int, work: Work) -> Generator[int, None, None]:
    """Numbers below `items`, each once a fork of this process has done it. All forks have ended afterwards.

    Fork `slot` of `count` calls `work(slot, numbers)`, which takes numbers and yields each that is done. Raises
    UserError, once the others have done the rest, where a fork ended before its time.
    """
    todo, gives = os.pipe()
    done, says = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    parent = os.getpid()
    try:
        for slot in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(gives)
                os.close(done)
                _work(work, slot, todo, says, parent)
            pids.append(pid)
        os.close(todo)
        os.close(says)
        with contextlib.suppress(BrokenPipeError):  # all have ended
            os.write(gives, b"".join(map(ITEM.pack, range(items))))
        os.close(gives)
        yield from _numbers(done)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pids.pop(), 0)[1]) for _ in range(count)]
        if any(ended):
            raise UserError(
                "a process that graded has ended early. Start the command again: it grades what is missing."
            )
    finally:
        os.close(done)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _work(work: Work, slot: int, todo: int, says: int, parent: int) -> NoReturn:
    """In a fork: work until nothing is left, and leave."""
    status = 1
    try:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() == parent:
            for number in work(slot, _numbers(todo)):
                os.write(says, ITEM.pack(number))
            status = 0
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _numbers(line: int) -> Iterator[int]:
    while data := os.read(line, ITEM.size):
        yield ITEM.unpack(data)[0]
