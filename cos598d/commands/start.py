"""The start and the end of every program: one sentence for an error or a Ctrl-C, never a traceback."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from cos598d.errors import ERROR, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.program import importing

NEEDED = ("torch", "numpy", "msgspec", "psutil", "safetensors", "tokenizers", "huggingface_hub", "scipy")
UNREAD = 141  # what a shell reports for a program whose reader has ended: 128 + SIGPIPE


def start(load: Callable[[], Callable[..., int]], *arguments: Any, **options: Any) -> NoReturn:
    """Call `load`, which imports and returns a function, then that function, and exit with the code it returns."""
    for stream in (sys.stdout, sys.stderr):  # a character that the encoding lacks is written as an escape
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.argv[1:2] != ["audit"]:  # an audited script keeps its threads and torch's messages
        # Nothing here uses numpy's own threads, and a process with threads must not be forked.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # A lost rank is reported in our own sentence, not in those of torch's store.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    def run() -> int:
        with importing():
            function = load()
        return function(*arguments, **options)

    sys.exit(exit_code_of(run))


def exit_code_of(program: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Call a program's function and return its exit code, whatever ends it.

    An error that a user can cause is printed as its sentence. If nobody reads the output (`| head`), it ends silently.
    """
    try:
        exit_code = program(*arguments, **options)
        sys.stdout.flush()
        return exit_code
    except UserError as error:
        return _ended(f"{ERROR}{printable(error)}", error.exit_code)
    except KeyboardInterrupt:
        return _ended("interrupted (Ctrl-C).", 128 + signal.SIGINT)
    except ModuleNotFoundError as missing:
        if missing.name not in NEEDED:
            raise
        place = f"is not installed in this Python, {sys.executable}"
        return _ended(f"{ERROR}{missing.name} {place}. Run make setup, then . .venv/bin/activate.", 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # at its end the interpreter would try to write again
        return UNREAD


def _ended(sentence: str, exit_code: int) -> int:
    print(sentence, file=sys.stderr)
    return exit_code
