"""Every collective call of this process, as torch's dispatcher sees it: DDP's reducer, functional calls, async ones.

No function of torch.distributed is replaced: however a script imported it, and though C++ calls it, a kernel in front
of the backend's gets the call, notes it, and hands it on unchanged.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cos598d.tools.audit.contents import BARRIER
from cos598d.tools.audit.watch.traffic import OPERATORS, Operator

_libraries: list[torch.library.Library] = []
_seen: Callable[["WatchedCall"], None] | None = None
_waited: Callable[[Any, float], None] | None = None


class WatchedCall(NamedTuple):
    """One call of this rank. `ranks` are the group's, by their global numbers, `rank` this one's place there."""

    op: str
    operator: str
    tensors: list[torch.Tensor]
    ranks: tuple[int, ...]
    rank: int
    root: int
    backend: str
    work: Any
    seconds: float


def listen(seen: Callable[[WatchedCall], None], waited: Callable[[Any, float], None]) -> None:
    """From here on call `seen` after every call that this process makes, and `waited` with a call's work and the
    seconds that were waited for it."""
    global _seen, _waited  # noqa: PLW0603 - the dispatcher is this process's, too
    _seen, _waited = seen, waited
    if not _libraries:
        _install()


def deafen() -> None:
    """Hand all calls on without a look at them."""
    global _seen, _waited  # noqa: PLW0603
    _seen = _waited = None


def _install() -> None:
    library = torch.library.Library("c10d", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for name, operator in OPERATORS.items():
        overload = getattr(getattr(torch.ops.c10d, name, None), "default", None)
        if overload is not None:
            kernel = functools.partial(_kernel, overload, below, name, operator)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    _libraries.append(library)  # its kernels go with it
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


def _kernel(overload: Any, below: Any, name: str, operator: Operator, keyset: Any, *arguments: Any) -> Any:
    began = time.perf_counter()
    result = overload.redispatch(keyset & below, *arguments)
    seconds = time.perf_counter() - began
    if _seen is not None:
        group = dist.ProcessGroup.unbox(arguments[operator.group])
        tensors = [] if operator.op == BARRIER else list(_flat(arguments[operator.payload]))
        root = 0 if operator.root is None else int(arguments[operator.root])
        call = WatchedCall(
            operator.op, name, tensors, _ranks(group), group.rank(), root, group.name(), _work(result), seconds
        )
        _seen(call)
    return result


def _work(result: Any) -> Any:
    last = result[-1] if isinstance(result, tuple | list) and result else result
    return dist.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None


def _ranks(group: Any) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # a group that torch.distributed does not know by name
        return tuple(range(group.size()))


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
