"""What a program does when it is asked to end."""

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt, so that every `finally` runs."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
