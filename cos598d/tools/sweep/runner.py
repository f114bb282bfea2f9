"""Runs started one after the other, or some at once: what they print goes to files, and one line is shown of each."""

import errno
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cos598d.errors import UserError
from cos598d.terminal.files import open_own, own_folder
from cos598d.terminal.program import start
from cos598d.tools.sweep.child import LastWords, exit_code, signals_passed_on
from cos598d.tools.sweep.folder import writing

# Of a link, a hard link, a pipe and a folder.
NOT_OURS = (errno.ELOOP, errno.EMLINK, errno.EINVAL, errno.ENXIO, errno.EISDIR, errno.EEXIST, errno.ENOTDIR)
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class LoggedProgram:
    """A program, and the file to which what it prints is added."""

    label: str
    command: Sequence[str]
    log: Path


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, what it said last, and whether a signal had asked for its end."""

    code: int
    last: str
    seconds: float
    is_asked: bool


class _Running:
    """A job's program while it runs."""

    def __init__(self, job: LoggedProgram):
        self.job = job
        with _open_log(job.log) as log:
            with writing(job.log):
                log.write(f"$ {shlex.join(job.command)}\n")
                log.flush()
            self._heard = os.fstat(log.fileno()).st_size
            self._began = time.monotonic()
            self.child = start(job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def ended(self, is_asked: bool) -> Ended:
        """How the program, which is over, has ended."""
        last = LastWords()
        with self.job.log.open(encoding="utf-8", errors="replace", newline="\n") as log:
            log.seek(self._heard)
            for line in log:
                last.hear(line)
        return Ended(exit_code(self.child), last.words, time.monotonic() - self._began, is_asked)


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
    jobs: Sequence[LoggedProgram],
    parallel: int,
    begin: Callable[[LoggedProgram], None],
    end: Callable[[LoggedProgram, Ended], None],
) -> None:
    """Run the jobs in their order, `parallel` at a time: `begin` is told of each before it starts, `end` after it.

    SIGINT, SIGTERM and SIGHUP are passed on to those that run, and no more are started; when they have ended
    KeyboardInterrupt or Stopped is raised. Whatever else is raised here ends them too.
    """
    waiting, running = list(jobs), list[_Running]()
    with signals_passed_on() as asked:
        try:
            while running or (waiting and not asked.numbers):
                while waiting and len(running) < parallel and not asked.numbers:
                    begin(waiting[0])
                    running.append(_Running(waiting.pop(0)))
                    asked.pass_to(running[-1].child)
                for one in [one for one in running if one.child.poll() is not None]:
                    running.remove(one)
                    end(one.job, one.ended(bool(asked.numbers)))
                time.sleep(LOOK_SECONDS)
        finally:
            for one in running:  # something was raised
                one.child.terminate()
            for one in running:
                one.child.wait()
