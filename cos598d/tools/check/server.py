"""What the server that ranks are forked from loads first: from then on it ends with the process that started it.

Python's own server ends when nobody holds the other end of its pipe any more. Until it has loaded all that it is to
load it does not look, and whatever a killed process leaves may hold that end for ever, and with the server all that it
has inherited, such as the stream that somebody reads to its end.
"""

import os
import signal

from cos598d.tools.check.spawn import STARTER
from cos598d.tools.check.supervisor import SET_PARENT_DEATH_SIGNAL, prctl


def _end_with_starter() -> None:
    starter = os.environ.pop(STARTER, "")  # not for those that are forked from here
    if starter:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if str(os.getppid()) != starter:  # gone before the kernel could be asked
            os._exit(1)


_end_with_starter()
