"""Our programs in forks of a process that has loaded torch, as `run_ranks` has it: 2 s of processor less for each.

All that a program does is its own: process, variables, folder, streams, signals, exit. What a fork cannot show, how a
fresh interpreter loads the program and how it ends at the very last, is shown by programs that are started fresh: those
of `subprocess`, workers that are started again, torchrun's ranks, and `start(..., is_fresh=True)`. A program that forks
ranks from a server of its own, such as a check or a grader, has that server as a fork, too: 5 s less.
"""

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import util

from cos598d.tools.check.spawn import ENDS_WITH_STARTER, start_server
from cos598d.tools.check.supervisor import prctl

SET_DUMPABLE = 4  # prctl(2)
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
    util.spawnv_passfds = _start
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        # What the script has is kept until the process is gone: a DDP that is dropped here ends its gloo group while it
        # holds the GIL, and a thread of gloo's that still lets go of its last call may wait for that (torch 2.13).
        _kept.update(runpy.run_path(words[0], run_name="__main__"))


def _start(path, words, descriptors, start_fresh=util.spawnv_passfds):
    """In a program: start multiprocessing's server as a fork, and what else it starts as it does; the process's id."""
    code = words[-1]
    if not code.startswith("from multiprocessing.forkserver import main"):
        return start_fresh(path, words, descriptors)
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _begin_as_by_exec(descriptors)
        exec(code, {})
        status = 0
    except SystemExit:
        status = 0
    finally:
        os._exit(status)


def _begin_as_by_exec(descriptors):
    """Leave behind what a process loses by exec: signal handlers, what hides it from others, other descriptors."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    prctl(SET_DUMPABLE, 1)
    sys.modules.pop(ENDS_WITH_STARTER, None)  # to be loaded anew, since it is about the process that loads it
    gc.freeze()  # or garbage would close descriptors that are others' by then
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in descriptors:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
