"""Strategies own the module, the optimizer and the communication of one replica. This is also their registry."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import Field, field, fields, make_dataclass
from typing import Any

from cos598d.comm.communicator import Communicator
from cos598d.strategies.base import Strategy
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.base import GradientSync
from cos598d.sync.options import SyncFlags, SyncOptions

# The names that --sync takes in addition to the gradient syncs: each is a file, loaded when its name is used.
OURS = ("zero1", "zero2", "zero3", "sparse_zero1", "shared_weights")
ENGINES = ("torch_zero1", "torch_fsdp", "horovod", "dp", "fabric", "deepspeed")  # of other libraries
STRATEGIES = (*OURS, *ENGINES)
# Those with flags of their own, declared in their `options_kind`, in the order of --help. It loads only their files.
WITH_FLAGS = ("diloco", "ddp", "torch_fsdp", "deepspeed", "fabric", "sparse_zero1")

# The name by which --sync measures and picks an exact strategy after the ranks met (`cos598d/cost/choice.py`).
AUTO_SYNC = "auto"

# Called with a communicator, find_unused_parameters, SyncOptions and a precision.
MakeStrategy = Callable[..., Strategy]


def known_names() -> tuple[str, ...]:
    """All names that --sync accepts."""
    return (*SYNCS, *STRATEGIES)


@functools.cache
def strategy_flags() -> type:
    """A dataclass whose fields are the flags of all syncs and strategies: the shared ones, then each one's own."""
    found: dict[str, Field] = {one.name: one for one in fields(SyncFlags)}
    for name in WITH_FLAGS:
        for one in fields(class_of(name).options_kind):
            if "flag" in one.metadata:
                first = found.setdefault(one.name, one)
                assert (first.default, first.metadata) == (one.default, one.metadata), f"{name}: {one.name}"
    copies = [(one.name, one.type, field(default=one.default, metadata=one.metadata)) for one in found.values()]
    return make_dataclass("StrategyFlags", copies, frozen=True)


def options_kind_of(kind: Any) -> type[SyncOptions]:
    """The class of the options of `kind`, the class of a sync or strategy.

    Your own sync may list a flag in its `uses` that another declares. Then the class has that flag too.
    """
    own = getattr(kind, "options_kind", SyncOptions)
    missing = set(getattr(kind, "uses", ())) - {one.name for one in fields(own)}
    if not missing:
        return own
    more = [one for one in fields(strategy_flags()) if one.name in missing]
    copies = [(one.name, one.type, field(default=one.default, metadata=one.metadata)) for one in more]
    return make_dataclass(own.__name__, copies, bases=(own,), frozen=True)


def is_our_own(name: str) -> bool:
    """Whether `--sync name` runs only this project's code: neither another library's nor a file of the user's."""
    return name in (*SYNCS, *OURS, AUTO_SYNC)


def class_of(name: str) -> type[Strategy] | type[GradientSync]:
    """The class that `--sync name` means: a strategy, a gradient sync, or your own sync in FILE.py:CLASS.

    Raises UsageError for any other name, with the known ones, and for a file that cannot be used, with its error.
    """
    if name not in STRATEGIES:
        return get_sync(name, also=(*STRATEGIES, AUTO_SYNC))
    file = importlib.import_module(f"cos598d.strategies.{'engines.' if name in ENGINES else ''}{name}")
    (found,) = (kind for kind in vars(file).values() if _is_strategy_of(kind, file.__name__))
    return found


def _is_strategy_of(kind: object, module: str) -> bool:
    return isinstance(kind, type) and issubclass(kind, Strategy) and kind.__module__ == module


def get_strategy(name: str) -> MakeStrategy:
    """The constructor of the strategy that `--sync name` means. A gradient sync gives replicas that average by it.

    Raises UsageError as `class_of` does.
    """
    kind = class_of(name)
    if not issubclass(kind, Strategy):
        return functools.partial(_replicated, Replicated, kind)
    return functools.partial(_replicated, kind, kind.sync_kind) if issubclass(kind, Replicated) else kind


def _replicated(
    strategy: type[Replicated],
    sync: type[GradientSync],
    comm: Communicator,
    find_unused_parameters: bool,
    options: SyncOptions,
    precision: str,
) -> Strategy:
    return strategy(sync(comm, find_unused_parameters, options), precision, comm)
