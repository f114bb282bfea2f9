"""The start and the end of every program: one sentence for an error or a Ctrl-C, never a traceback."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from cos598d.errors import ERROR, UserError
from cos598d.terminal.printable import printable

NEEDED = ("torch", "numpy", "msgspec", "psutil", "safetensors", "tokenizers", "huggingface_hub", "scipy")
UNREAD = 141  # what a shell reports for a program whose reader has ended: 128 + SIGPIPE


def start(program: Callable[..., int], *arguments: Any, **options: Any) -> NoReturn:
    """Call a program's function, and exit with the code it returns. What takes seconds is imported by that function."""
    for stream in (sys.stdout, sys.stderr):  # a character that the encoding lacks is written as an escape
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.argv[1:2] != ["audit"]:  # an audited script keeps its threads and torch's messages
        # Nothing here uses numpy's own threads, and a process with threads must not be forked.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # A lost rank is reported in our own sentence, not in those of torch's store.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.disable()  # it takes a fifth of the time of imports; after these, the program turns it on again
    exit_code = exit_code_of(program, *arguments, **options)
    gc.freeze()  # else the interpreter looks at all that torch has made before it ends: half a second
    sys.exit(exit_code)


def exit_code_of(program: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Call a program's function and return its exit code, whatever ends it.

    An error that a user can cause is printed as its sentence. If nobody reads the output (`| head`), it ends silently.
    """
    try:
        exit_code = program(*arguments, **options)
        sys.stdout.flush()
        return exit_code
    except UserError as error:
        sentence, exit_code = f"{ERROR}{printable(error)}", error.exit_code
    except KeyboardInterrupt:
        sentence, exit_code = "interrupted (Ctrl-C).", 128 + signal.SIGINT
    except ModuleNotFoundError as missing:
        if missing.name not in NEEDED:
            raise
        place = f"is not installed in this Python, {sys.executable}"
        sentence, exit_code = f"{ERROR}{missing.name} {place}. Run make setup, then . .venv/bin/activate.", 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # at its end the interpreter would try to write again
        return UNREAD
    except OSError as error:
        if not error.filename:
            raise
        sentence, exit_code = f"{ERROR}{printable(error.filename)} cannot be used ({error.strerror}). Give another.", 1
    print(sentence, file=sys.stderr)
    return exit_code
