"""Run a command within limits; at its end, or when told to, end every process below it, also one that left its session.

`python -m cos598d.tools.grade.keeper FOLDER COMMAND ...`, ended by SIGTERM, or with the process that started it. That
one would have removed the folder: if it was killed, this does.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys

import psutil

from cos598d.tools.exam.server import SET_PARENT_DEATH_SIGNAL, prctl

FILE_BYTES = 1 << 28  # of one file that a submission writes
SET_CHILD_SUBREAPER = 36  # prctl(2): what a submission leaves behind becomes ours to end


def main() -> None:
    """Keep the command that the program was given."""
    folder, *command = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    starter = os.getppid()
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    try:
        subprocess.run(command, check=False)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while below := psutil.Process().children(recursive=True):
            for each in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(below, timeout=1)
        if os.getppid() != starter:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
