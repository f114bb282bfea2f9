"""Our programs in forks of a process that has loaded torch, as `run_ranks` has it: 2 s of processor less for each.

All that a program does is its own: process, variables, folder, streams, signals, exit. What a fork cannot show, how a
fresh interpreter loads the program and how it ends at the very last, is shown by programs that are started fresh: those
of `subprocess` in a test, those that programs start themselves, and `start(..., is_fresh=True)`.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cos598d.tools.exam.server import start_server

# Tests end programs, never the machine: what the kernel has is kept, so nothing waits for the disk (minutes in all).
os.fsync = os.fstat  # which also refuses a descriptor that is closed
_kept: dict[str, object] = {}
_context = multiprocessing.get_context("forkserver")


class WarmProcess:
    """A program in a fork of this process's server: what tests ask of a Popen."""

    def __init__(self, words, folder, output, environ):
        self.words = [str(word) for word in words]
        self._process = _context.Process(target=_be, args=(self.words, str(folder), str(output), environ))
        start_server()
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.words, timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def _be(words, folder, output, environ):
    """In the fork: become the program that `python WORDS` starts in that folder."""
    gc.freeze()  # what is there stays: looking for garbage in it would only copy the pages that all share
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    # Else its supervisors would take this server's folder for its own, and remove it when the program is killed.
    multiprocessing.current_process()._config.pop("tempdir", None)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115 - to the end
    os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the server's fork has some blocked
    # Python has made the server's way of starting processes this one's, too. Its workers would run the script again.
    multiprocessing.set_start_method(None, force=True)
    sys.path.insert(0, folder if words[0] == "-m" else str(Path(words[0]).resolve().parent))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        # What the script has is kept until the process is gone: a DDP that is dropped here ends its gloo group while it
        # holds the GIL, and a thread of gloo's that still lets go of its last call may wait for that (torch 2.13).
        _kept.update(runpy.run_path(words[0], run_name="__main__"))
