"""Every collective call of this process, and how long it is waited for."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from cos598d.comm.dispatcher import Listener, Sums, listening

_listening = contextlib.ExitStack()
_waited: Callable[[Any, float], None] | None = None


def listen(seen: Listener, sums: Sums, waited: Callable[[Any, float], None]) -> None:
    """From here on call `seen` after every call that this process makes, `sums` with what is about to be added up over
    the ranks, and `waited` with a call's work and the seconds that were waited for it."""
    global _waited  # noqa: PLW0603 - torch's class is this process's, too
    _waited = waited
    _listening.enter_context(listening(seen, sums))
    _time_waits()


def deafen() -> None:
    """Hand all calls on without a look at them."""
    global _waited  # noqa: PLW0603
    _waited = None
    _listening.close()


@functools.cache
def _time_waits() -> None:
    kind: Any = dist.Work
    original = kind.wait

    @functools.wraps(original)
    def wait(work: Any, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(work, *arguments, **options)
        finally:
            if _waited is not None:
                _waited(work, time.perf_counter() - began)

    kind.wait = wait
