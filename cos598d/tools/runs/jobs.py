"""Programs that run one after another, or some at once. Signals are passed on to them, and they end with this program.

Each one's output goes to a file of its own, or is shown here.
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
from cos598d.terminal.signals import AskedToEnd
from cos598d.tools.runs.folder import writing

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# For a link, a hard link, a pipe and a folder.
NOT_OURS = (errno.ELOOP, errno.EMLINK, errno.EINVAL, errno.ENXIO, errno.EISDIR, errno.EEXIST, errno.ENOTDIR)
LOOK_SECONDS = 0.05
# The prefix of a rank's lines on an emulated host.
_HOST = re.compile(r"^host\d+(?: rank\d+)?\| ")
_RANK = re.compile(r"^rank \d+")


@dataclass(frozen=True)
class Job:
    """A program, and the file to which its output is appended; None: it is shown."""

    place: str
    command: Sequence[str]
    log: Path | None


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, its last message, and whether a signal had asked for its end."""

    code: int
    last: str
    seconds: float
    is_asked: bool


class LastWords:
    """The line of a program's output that best explains its end: the last one, or a rank's if there is one."""

    def __init__(self) -> None:
        self.words = ""

    def hear(self, line: str) -> None:
        """Take a further line."""
        line = _HOST.sub("", printable(line.rstrip())).strip().removeprefix(ERROR)
        # A rank's own error is better than a library's after it.
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
        """Print the program's errors as they arrive."""
        assert self.child.stderr is not None  # a pipe, as asked for above
        with self.child.stderr as lines:
            for line in lines:
                self._last.hear(line)
                try:
                    print(printable(line.rstrip()), file=sys.stderr, flush=True)
                except OSError:  # nobody reads our output
                    self.child.terminate()


def _open_log(path: Path) -> IO[str]:
    """Open a log to append to it. Raises UserError if it cannot be written, or is not a plain file of its folder. A
    link leads elsewhere, and a pipe waits for a reader."""
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
    """Run the jobs in their order, `parallel` at a time. `begin` is called before each one, `end` after it.

    SIGINT, SIGTERM and SIGHUP are passed on to the running ones, and no more are started. When they have ended,
    KeyboardInterrupt or AskedToEnd is raised. Any other exception here ends them too.
    """
    waiting, running = list(jobs), list[_Running]()
    with _signals_passed_on(running) as asked:
        try:
            while running or (waiting and not asked):
                while waiting and len(running) < parallel and not asked:
                    begin(waiting[0])
                    running.append(_Running(waiting.pop(0)))
                    for number in asked:  # those that arrived meanwhile
                        running[-1].child.send_signal(number)
                for one in [one for one in running if one.child.poll() is not None]:
                    running.remove(one)
                    end(one.job, one.ended(bool(asked)))
                time.sleep(LOOK_SECONDS)
        finally:
            for one in running:  # an exception was raised
                one.child.terminate()
            for one in running:
                one.child.wait()


@contextlib.contextmanager
def _signals_passed_on(running: Sequence[_Running]) -> Iterator[list[int]]:
    """A context in which signals are recorded, in the list that it yields, and passed on to running programs. After it
    they are raised, and this program's handlers are restored."""
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for one in running:
            one.child.send_signal(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # otherwise the command that started us wants us to continue: nohup, or `&`
            signal.signal(number, pass_on)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in asked:
        raise KeyboardInterrupt
    if asked:
        raise AskedToEnd(asked[0])
