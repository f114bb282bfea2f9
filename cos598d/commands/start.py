"""The start and the end of every program: one sentence for an error or a Ctrl-C, never a traceback."""

import contextlib
import os
import select
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
# What a shell reports for a program that the kernel ended because its reader had ended.
UNREAD_EXIT_CODE = 128 + getattr(signal, "SIGPIPE", 13)
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

    sys.exit(exit_code_of(run))


def exit_code_of(program: Callable[..., int], *arguments: Any, **options: Any) -> int:
    """Call a program's function and return its exit code, whatever ends it.

    An error that a user can cause is printed as its sentence. If nobody reads the output (`| head`), it ends silently.
    """
    try:
        try:
            return program(*arguments, **options)
        except UserError as error:
            return _ended(f"{ERROR}{printable(error)}", error.exit_code)
        except KeyboardInterrupt:
            return _ended(WORDS, EXIT_CODE)
        except ModuleNotFoundError as missing:
            if missing.name not in NEEDED:
                raise
            place = f"is not installed in this Python, {sys.executable}"
            return _ended(f"{ERROR}{missing.name} {place}. Run make setup, then . .venv/bin/activate.", 2)
        finally:
            _flush()  # at the interpreter's end it would be too late: it could only complain
    except OutputLost as lost:
        return _ended(f"{ERROR}{lost}", lost.exit_code)
    except KeyboardInterrupt:
        return _ended(WORDS, EXIT_CODE)
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise  # it was another pipe
        _redirect_to_nowhere(unread)
        return UNREAD_EXIT_CODE


def _ended(sentence: str, exit_code: int) -> int:
    print(sentence, file=sys.stderr)
    return exit_code


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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            raise
        except (AttributeError, ValueError, OSError):  # `streams` handles closed or full streams
            pass


def _is_unread(stream: Any) -> bool:
    """Whether the other end of a pipe is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except (AttributeError, ValueError, OSError):  # there is no such stream, or this system cannot tell
        return False


def _redirect_to_nowhere(streams: list[Any]) -> None:
    """Redirect to nowhere what was not read, and what the interpreter flushes when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
