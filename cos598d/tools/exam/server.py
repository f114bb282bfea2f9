"""The first module of the server from which ranks are forked: the server then ends with the process that started it.

Python's own server ends when nothing holds the other end of its pipe any more. It does not check that until it has
loaded its modules. Whatever a killed process leaves may hold that end forever.

The server itself collects no garbage: that would take a fifth of the time in which it loads. Its forks do.
"""

import ctypes
import gc
import os
import signal
import threading
from multiprocessing import forkserver, resource_tracker, set_forkserver_preload, util
from pathlib import Path

ENDS_WITH_STARTER, STARTER = "cos598d.tools.exam.server", "COS598D_STARTER"
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)
PRELOADED = [ENDS_WITH_STARTER, "cos598d.tools.exam.on_rank", "cos598d.tools.exam.models", "torch._dynamo"]


_server = 0  # in the server: its process


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing."""
    function = getattr(ctypes.CDLL(None), "prctl", None)
    if function is not None:
        function(option, value, 0, 0, 0)


def start_server() -> None:
    """Start the server of this process, unless it runs. It finds this package in any working directory."""
    if forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        return
    # The kernel takes the end of a thread for that of the process: only the main one lasts.
    is_main = threading.current_thread() is threading.main_thread()
    root, path = str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")
    ours = {
        STARTER: str(os.getpid()) if is_main else "",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, path))),
        # created as soon as torch._dynamo loads
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(util.get_temp_dir(), "inductor"),
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    resource_tracker.ensure_running()  # which unblocks signals
    # A Ctrl-C is for this process, which ends what it has started.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end_with_starter() -> None:
    starter = os.environ.pop(STARTER, "")  # not for those that are forked from here
    if starter:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if str(os.getppid()) != starter:  # it ended before the kernel could be asked
            os._exit(1)


def _be_fork() -> None:
    """In a fork of the server, and in what that forks: a rank ends with the server."""
    global _server  # noqa: PLW0603
    gc.freeze()  # loaded objects: otherwise each collection would scan them, and copy memory that ranks share
    gc.enable()
    if _server:
        server, _server = _server, 0  # its own forks are its own affair
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)


if STARTER in os.environ:  # in the server
    _end_with_starter()
    _server = os.getpid()
    gc.disable()
    os.register_at_fork(after_in_child=_be_fork)
else:
    set_forkserver_preload(PRELOADED)
