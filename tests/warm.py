"""Our programs in forks of a process that has loaded torch, as `run_ranks` has it: 2 s of processor less for each.

All that a program does is its own: process, variables, folder, streams, signals, exit. What such a program starts of
ours, or of pytest, is a fork of it: 2 to 10 s less. What a fork cannot show, how a fresh interpreter loads the program
and how it ends at the very last, is shown by programs that are started fresh: those of `subprocess` in a test, and
`start(..., is_fresh=True)`.
"""

import _posixsubprocess
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from cos598d.terminal.program import END_WITH_PARENT
from cos598d.tools.exam import server

# Tests end programs, never the machine: what the kernel has is kept, so nothing waits for the disk (minutes in all).
os.fsync = os.fstat  # which also refuses a descriptor that is closed
_kept: dict[str, object] = {}
_context = multiprocessing.get_context("forkserver")


class WarmProcess:
    """A program in a fork of this process's server: what tests ask of a Popen."""

    def __init__(self, words, folder, output, environ):
        self.words = [str(word) for word in words]
        self._process = _context.Process(target=_be, args=(self.words, str(folder), str(output), environ))
        server.start_server()
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
    # Else its supervisors would take this server's folder for its own, and remove it when the program is killed.
    multiprocessing.current_process()._config.pop("tempdir", None)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the server's fork has some blocked
    subprocess._fork_exec = _posixsubprocess.fork_exec = _start
    _run(words, environ)


def _run(words, environ):
    """Run `python WORDS` in this process, whose folder and streams are those of the program."""
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115 - to the end
    # Python has made the server's way of starting processes this one's, too. Its workers would run the script again.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.set_forkserver_preload(server.PRELOADED)
    sys.path.insert(0, os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        # What the script has is kept until the process is gone: a DDP that is dropped here ends its gloo group while it
        # holds the GIL, and a thread of gloo's that still lets go of its last call may wait for that (torch 2.13).
        _kept.update(runpy.run_path(words[0], run_name="__main__"))


def _start(words, programs, closes, given, folder, environ, *how, execute=_posixsubprocess.fork_exec):
    """In a program: start one of ours, pytest or the server of ranks as a fork of it, all others as ever; its id."""
    told = [os.fsdecode(word) for word in words]
    ends_with_us = tuple(told[: len(END_WITH_PARENT)]) == END_WITH_PARENT
    own = told[len(END_WITH_PARENT) * ends_with_us :]
    environ_there = dict(os.environ) if environ is None else dict(os.fsdecode(each).split("=", 1) for each in environ)
    paths = {*filter(None, environ_there.get("PYTHONPATH", "").split(os.pathsep))}
    is_server = own[-1].startswith("from multiprocessing.forkserver import main")
    is_ours = own[1:2] == ["-m"] and own[2].partition(".")[0] in ("cos598d", "pytest") and paths <= {*sys.path}
    if own[0] != sys.executable or not (is_server or is_ours):
        return execute(words, programs, closes, given, folder, environ, *how)
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        _begin_as_by_exec(given, how)
        if ends_with_us:
            server.prctl(server.SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            assert os.getppid() == parent
        os.chdir(folder or ".")
        target, arguments = (_serve, (own[-1],)) if is_server else (_run, (own[1:], environ_there))
        code = multiprocessing.Process(target=target, args=arguments)._bootstrap()
    finally:
        os._exit(code)


def _serve(code):
    server._end_with_starter()
    server._server = os.getpid()
    exec(code, {})


def _begin_as_by_exec(given, how):
    """Take the streams that are given, and leave behind what a process loses by exec: handlers, other descriptors."""
    (stdin, _, _, stdout, _, stderr, *_, ended), (_, has_own_session) = how[:8], how[8:10]
    if has_own_session:
        os.setsid()
    for number, source in enumerate((stdin, stdout, stderr)):
        if source not in (-1, number):
            os.dup2(source, number)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    gc.freeze()  # or garbage would close descriptors that are others' by then
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and (int(name) not in given or int(name) == ended):
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
