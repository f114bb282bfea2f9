"""This same code again, in another process."""

import os
import sys
from pathlib import Path


def own_python_path() -> str:
    """The PYTHONPATH with which a program started from here runs this same code, installed or not."""
    code = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(part for part in (code, os.environ.get("PYTHONPATH")) if part)


def program() -> list[str]:
    """The words that start this program again: a script's path, or `-m cos598d` where it was started as a module."""
    started = Path(sys.argv[0])
    return ["-m", "cos598d"] if started.name == "__main__.py" else [str(started)]


def own_environment() -> dict[str, str]:
    """This process's environment, with which a program started from here runs this same code."""
    return os.environ | {"PYTHONPATH": own_python_path()}
