"""The first module of the server from which ranks are forked: the server then ends with the process that started it.

Python's own server ends when nothing holds the other end of its pipe any more. It does not check that until it has
loaded its modules. Whatever a killed process leaves may hold that end forever. The server would then keep all that it
has inherited, such as a stream that somebody reads to its end.

The server itself collects no garbage: that would take a fifth of the time in which it loads. Its forks do.
"""

import gc
import os
import signal

from cos598d.tools.check.spawn import STARTER
from cos598d.tools.check.supervisor import SET_PARENT_DEATH_SIGNAL, prctl


def _end_with_starter() -> None:
    starter = os.environ.pop(STARTER, "")  # not for those that are forked from here
    if starter:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if str(os.getppid()) != starter:  # it ended before the kernel could be asked
            os._exit(1)


def _collect() -> None:
    gc.freeze()  # loaded objects: otherwise each collection would scan them, and copy memory that ranks share
    gc.enable()


_end_with_starter()
gc.disable()
os.register_at_fork(after_in_child=_collect)
