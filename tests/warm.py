"""Our programs in forks of a process that has loaded torch, as `run_ranks` has it: 2 s of processor less for each.

All that a program does is its own: process, variables, folder, streams, signals, exit. What a fork cannot show, how a
fresh interpreter loads the program and how it ends at the very last, is shown by programs that are started fresh: those
of `subprocess`, workers that are started again, torchrun's ranks, and `start(..., is_fresh=True)`.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile

from cos598d.check.spawn import start_server

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
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
