"""Run a command within limits; at its end, or when told to, end every process below it, also one that left its session.

`python -m cos598d.tools.grade.keeper COMMAND ...`, ended by SIGTERM.
"""

import contextlib
import resource
import signal
import subprocess
import sys

import psutil

from cos598d.tools.exam.server import SET_PARENT_DEATH_SIGNAL, prctl

FILE_BYTES = 1 << 28  # of one file that a submission writes
SET_CHILD_SUBREAPER = 36  # prctl(2): what a submission leaves behind becomes ours to end


def main() -> None:
    """Keep the command that the program was given."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(SET_CHILD_SUBREAPER, 1)
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        subprocess.run(sys.argv[1:], check=False)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while below := psutil.Process().children(recursive=True):
            for each in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(below, timeout=1)


if __name__ == "__main__":
    main()
