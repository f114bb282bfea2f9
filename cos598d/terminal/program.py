"""How to run this same code again in another process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# If this program is installed, the kernel ends the child when this process is killed.
END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")


def own_python_path() -> str:
    """The PYTHONPATH with which a program started from here runs this same code, installed or not."""
    code = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(part for part in (code, os.environ.get("PYTHONPATH")) if part)


def program() -> list[str]:
    """The command that starts this program again: a script's path, or `-m cos598d` if it was started as a module."""
    started = Path(sys.argv[0])
    return ["-m", "cos598d"] if started.name == "__main__.py" else [str(started)]


def as_typed() -> str:
    """The command that starts this program again, as you type it: `cos598d`, or `python -m cos598d`."""
    words = program()
    if words[0] != "-m":
        return Path(words[0]).name if shutil.which(Path(words[0]).name) else words[0]
    return " ".join([os.path.relpath(sys.executable), *words])


def own_environment() -> dict[str, str]:
    """This process's environment, with which a program started from here runs this same code."""
    return os.environ | {"PYTHONPATH": own_python_path()}


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """The command for the same program, ended with SIGTERM when the process that started it is killed."""
    before = END_WITH_PARENT if shutil.which(END_WITH_PARENT[0]) else ()
    return [*before, *command]


def start(command: Sequence[str], **streams: Any) -> subprocess.Popen:
    """Start a program with this same code in its path. It ends when this process is killed. `streams` are Popen's."""
    # In a session of its own, so that a Ctrl-C reaches it only once.
    return subprocess.Popen(
        ends_with_parent(command),
        env=own_environment(),
        text=True,
        errors="replace",
        start_new_session=True,
        **streams,
    )
