"""Ranks that a script starts by itself, with torch.multiprocessing.spawn or a process of its own: audited too.

A process that multiprocessing starts calls its target through a `Carried`, which observes it as the script's own
process would be. Workers of data loaders and of pools are left alone.
"""

import functools
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from cos598d.terminal.program import own_python_path
from cos598d.tools.audit.options import Told

_LEFT_ALONE = ("torch.utils.data", "multiprocessing", "concurrent", "torch._inductor")
# Makes this process a rank, and returns the function to call at its end with the exit code and the error.
Begin = Callable[[Told], Callable[[int, str], None]]
_carries: tuple[Told, Begin] | None = None
_count = 0


class Carried:
    """A process's target under observation."""

    def __init__(self, told: Told, begin: Begin, target: Callable[..., Any]):
        self._told, self._begin, self._target = told, begin, target

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        end = self._begin(self._told)
        code, error = 0, ""
        try:
            return self._target(*arguments, **options)
        except SystemExit as asked:
            code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
            raise
        except BaseException as raised:
            code, error = 1, f"{type(raised).__name__}: {raised}"
            raise
        finally:
            end(code, error)


def carry(told: Told, begin: Begin) -> None:
    """Audit the processes that this one starts from here on; `begin` is a function of a module's."""
    global _carries  # noqa: PLW0603 - multiprocessing is this process's, too
    if _carries is None:
        _install()
    _carries = told, begin


def count() -> int:
    """How many processes were started under observation."""
    return _count


def _install() -> None:
    original = BaseProcess.__init__

    @functools.wraps(original)
    def begin(process: Any, group: Any = None, target: Any = None, *arguments: Any, **options: Any) -> None:
        global _count  # noqa: PLW0603
        module = getattr(target, "__module__", "") or ""
        if target is not None and _carries is not None and not module.startswith(_LEFT_ALONE):
            target = Carried(*_carries, target)
            _count += 1
            ours = own_python_path().split(os.pathsep)[0]
            if ours not in sys.path:
                sys.path.append(ours)  # with which a fresh interpreter finds this class
        original(process, group, target, *arguments, **options)

    kind: Any = BaseProcess
    kind.__init__ = begin
