"""Programs started one after the other, or some at once, and told of signals; they end when this program does.

What each prints goes to a file of its own, or is shown here.
"""

import contextlib
import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from cos598d.errors import ERROR, UserError
from cos598d.terminal.children import exit_code_of
from cos598d.terminal.files import open_own, own_folder
from cos598d.terminal.printable import printable
from cos598d.terminal.program import start
from cos598d.tools.runs.folder import writing

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Of a link, a hard link, a pipe and a folder.
NOT_OURS = (errno.ELOOP, errno.EMLINK, errno.EINVAL, errno.ENXIO, errno.EISDIR, errno.EEXIST, errno.ENOTDIR)
LOOK_SECONDS = 0.05
# What is printed before the words of a rank on an emulated host.
_HOST = re.compile(r"^host\d+(?: rank\d+)?\| ")
_RANK = re.compile(r"^rank \d+")


class RunsStopped(UserError):
    """A signal has asked this program to end."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}.")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Job:
    """A program, and the file to which what it prints is added; None: it is shown."""

    place: str
    command: Sequence[str]
    log: Path | None


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, what it said last, and whether a signal had asked for its end."""

    code: int
    last: str
    seconds: float
    is_asked: bool


class LastWords:
    """Of the lines that a program prints, the one that says best why it ended: the last, and of a rank if one spoke."""

    def __init__(self) -> None:
        self.words = ""

    def hear(self, line: str) -> None:
        """A further line."""
        line = _HOST.sub("", printable(line.rstrip())).strip().removeprefix(ERROR)
        # What a rank says of its end is better than what a library says after it.
        if line and (_RANK.match(line) or not _RANK.match(self.words)):
            self.words = line


class _Running:
    """A job's program while it runs."""

    def __init__(self, job: Job):
        self.job, self._last, self._began = job, LastWords(), time.monotonic()
        if job.log is None:
            self.child = start(job.command, stderr=subprocess.PIPE)
            self._relay = threading.Thread(target=self._show, daemon=True)
            self._relay.start()
            return
        with _open_log(job.log) as log:
            with writing(job.log):
                log.write(f"$ {shlex.join(job.command)}\n")
                log.flush()
            self._heard = os.fstat(log.fileno()).st_size
            self.child = start(job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def ended(self, is_asked: bool) -> Ended:
        """How the program, which is over, has ended."""
        if self.job.log is None:
            self._relay.join()
        else:
            with self.job.log.open(encoding="utf-8", errors="replace", newline="\n") as log:
                log.seek(self._heard)
                for line in log:
                    self._last.hear(line)
        seconds = time.monotonic() - self._began
        return Ended(exit_code_of(self.child.returncode), self._last.words, seconds, is_asked)

    def _show(self) -> None:
        """Print the program's errors as they come."""
        assert self.child.stderr is not None  # a pipe, as asked for above
        with self.child.stderr as lines:
            for line in lines:
                self._last.hear(line)
                try:
                    print(printable(line.rstrip()), file=sys.stderr, flush=True)
                except OSError:  # nobody reads what we print
                    self.child.terminate()


def _open_log(path: Path) -> IO[str]:
    """Open a log to add to it. Raises UserError where it cannot be written, and for what is no file of its folder's
    own: a link leads elsewhere, and a pipe waits for a reader."""
    with writing(path):
        if path.parent.is_file() and not path.parent.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent))
        try:
            own_folder(path.parent)
            return os.fdopen(open_own(path, os.O_APPEND), "a", encoding="utf-8")
        except OSError as error:
            if error.errno in NOT_OURS:
                raise UserError(
                    f"{error.filename} is a link, or not a file that can be written. Remove it, and repeat the command."
                ) from None
            raise


def run_jobs(
    jobs: Sequence[Job], parallel: int, begin: Callable[[Job], None], end: Callable[[Job, Ended], None]
) -> None:
    """Run the jobs in their order, `parallel` at a time: `begin` is told of each before it starts, `end` after it.

    SIGINT, SIGTERM and SIGHUP are passed on to those that run, and no more are started; when they have ended
    KeyboardInterrupt or RunsStopped is raised. Whatever else is raised here ends them too.
    """
    waiting, running = list(jobs), list[_Running]()
    with _signals_passed_on(running) as asked:
        try:
            while running or (waiting and not asked):
                while waiting and len(running) < parallel and not asked:
                    begin(waiting[0])
                    running.append(_Running(waiting.pop(0)))
                    for number in asked:  # those that came meanwhile
                        running[-1].child.send_signal(number)
                for one in [one for one in running if one.child.poll() is not None]:
                    running.remove(one)
                    end(one.job, one.ended(bool(asked)))
                time.sleep(LOOK_SECONDS)
        finally:
            for one in running:  # something was raised
                one.child.terminate()
            for one in running:
                one.child.wait()


@contextlib.contextmanager
def _signals_passed_on(running: Sequence[_Running]) -> Iterator[list[int]]:
    """Within it signals are noted, in what it gives, and passed on to what runs; after it they are raised, and this
    program's own again."""
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for one in running:
            one.child.send_signal(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # else our starter wants us to go on: nohup, or `&`
            signal.signal(number, pass_on)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in asked:
        raise KeyboardInterrupt
    if asked:
        raise RunsStopped(asked[0])
