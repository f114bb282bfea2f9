"""Our programs in forks of a process that has loaded torch, as `run_ranks` has it: 2 s of processor less for each.

All that a program does is its own: process, variables, folder, streams, signals, exit. What a fork cannot show, how a
fresh interpreter loads the program and how it ends at the very last, is shown by programs that are started fresh: those
of `subprocess` in a test, torchrun's ranks, and `start(..., is_fresh=True)` with all that it starts. What such a fork
starts of our own programs is a fork of it, too: the server that a check forks its ranks from, a bench's ranks, the runs
of a sweep.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path

from cos598d.terminal.program import END_WITH_PARENT
from cos598d.tools.exam.server import ENDS_WITH_STARTER, SET_PARENT_DEATH_SIGNAL, prctl, start_server

ROOT = Path(__file__).resolve().parents[1]
SET_DUMPABLE = 4  # prctl(2)
COUNT_FOR_PYTHON = ("PYTHON", "LD_", "OMP_", "TORCH")  # where Python or torch begins
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
    util.spawnv_passfds = _start
    subprocess.Popen = WarmPopen
    sys.path.insert(0, "")  # for _run
    _run(words, folder)


def _run(words, folder):
    """Run `-m cos598d ...` or a script in this process, which has been made what `python WORDS` begins with."""
    sys.path[0] = folder if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    if words[0] == "-m":
        sys.argv = words[1:]
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


def is_ours(words):
    """Whether it is `-m cos598d`, a lesson's script, an example, or the script of a student."""
    if list(words[:2]) == ["-m", "cos598d"] or Path(words[0]) == ROOT / "benchmarks" / "student.py":
        return True
    return Path(words[0]).parent in (*ROOT.glob("task*"), ROOT / "examples")


class WarmPopen(subprocess.Popen):
    """In a program that is a fork: what starts our own programs as forks of this one, and all others as ever."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        _, _, _, *pipes = more[:9]
        has_own_session = more[14]
        words = [] if isinstance(args, (str, bytes)) else [os.fspath(word) for word in args]
        ends_with_us = tuple(words[: len(END_WITH_PARENT)]) == END_WITH_PARENT
        words = words[len(END_WITH_PARENT) :] if ends_with_us else words
        environ = dict(os.environ if env is None else env)
        ours = [word for word in words[1:] if word != "-u"][:2]
        if words[:1] != [sys.executable] or not ours or not is_ours(ours) or not _may_fork(environ):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            starter = parent if ends_with_us else 0
            _end_with(lambda: _be_child(words[1:], cwd, environ, pipes, pass_fds, has_own_session, mask, starter))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._child_created = True
        return self._close_pipe_fds(*pipes)


def _may_fork(environ):
    """Whether a fork of this program is as good as a fresh one: no other thread, no server, and nothing for Python."""
    is_alone = len(os.listdir("/proc/self/task")) == 1 and forkserver._forkserver._forkserver_pid is None
    paths = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    same = all(
        environ.get(name) == os.environ.get(name)
        for name in {*environ, *os.environ} - {"PYTHONPATH"}
        if name.startswith(COUNT_FOR_PYTHON) and not name.startswith("TORCHELASTIC_")
    )
    return is_alone and same and set(paths) <= set(sys.path)


def _be_child(words, cwd, environ, pipes, pass_fds, has_own_session, mask, starter):
    """In a fork of a program: become the program that `python WORDS` starts; with `starter` (0: nobody) it ends."""
    if has_own_session:
        os.setsid()
    standard_input, _, _, output, _, errors = pipes
    for number, given in enumerate((standard_input, output, errors)):
        if given not in (-1, number):
            os.dup2(given, number)
    _begin_as_by_exec(pass_fds)
    if starter:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != starter:  # gone before the kernel could be asked
            os._exit(1)
    process._parent_process, process._children = None, set()
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    atexit._clear()  # what its starter has to clear up is still needed
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    atexit.register(util._exit_function)
    tempfile.tempdir = None
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    if "RANK" in environ:  # which others see of a fresh program in its environment
        Path("/proc/self/comm").write_text(f"rank {environ['RANK']}")
    is_unbuffered = words[0] == "-u"
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - to the end
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=is_unbuffered)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _run(words[1:] if is_unbuffered else words, os.getcwd())


def _end_with(be):
    """In a fork: call `be`, and end as a program does that has come to its end so."""
    status = 1
    try:
        be()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            sys.stderr.write(f"{left.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
