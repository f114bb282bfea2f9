"""The start of every program: a Ctrl-C while torch is still loading ends it without a traceback."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from cos598d.errors import ERROR, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.program import importing
from cos598d.terminal.streams import OutputLost, prepare_streams

WORDS, EXIT_CODE = "interrupted (Ctrl-C).", 128 + signal.SIGINT
NEEDED = ("torch", "numpy", "msgspec", "psutil", "safetensors", "tokenizers", "huggingface_hub", "scipy")


def start(load: Callable[[], Callable[..., int]], *arguments: Any, **options: Any) -> NoReturn:
    """Call `load`, which imports and returns a function, then that function, and exit with the code it returns."""
    prepare_streams()
    # Nothing here uses numpy's own threads, and a process with threads must not be forked. An audited script keeps
    # its threads.
    if sys.argv[1:2] != ["audit"]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    def run() -> int:
        with loading():
            function = load()
        return function(*arguments, **options)

    sys.exit(ended(run))


def ended(program: Callable[[], int]) -> int:
    """Call a program and return its exit code, also if it is interrupted or cannot print."""
    try:
        return program()
    except OutputLost as lost:
        print(f"{ERROR}{lost}", file=sys.stderr)
        return lost.exit_code
    except ModuleNotFoundError as missing:
        if missing.name not in NEEDED:
            raise
        print(
            f"{ERROR}{missing.name} is not installed in this Python, {sys.executable}. Run make setup, then "
            ". .venv/bin/activate.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(WORDS, file=sys.stderr)
        return EXIT_CODE


def guarded(run: Callable[..., int], *arguments: Any) -> int:
    """Run a command and return its exit code; an error that a user can cause is printed as its sentence."""
    try:
        return run(*arguments)
    except UserError as error:
        print(f"{ERROR}{printable(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(WORDS, file=sys.stderr)
        return EXIT_CODE


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """`importing`, and a Ctrl-C within the block ends this process at once: there is nothing to clean up yet."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        with importing():
            yield
        return
    # An exception would get lost in some of the import system's callbacks, and leave libraries half loaded.
    signal.signal(signal.SIGINT, _leave)
    try:
        with importing():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: Any) -> NoReturn:
    os.write(sys.stderr.fileno(), f"{WORDS}\n".encode())
    os._exit(EXIT_CODE)
