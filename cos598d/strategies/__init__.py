"""Strategies: what owns the module, the optimizer and the communication of one replica; and the registry of them."""

import functools
import importlib
from collections.abc import Callable

from cos598d.comm.communicator import Communicator
from cos598d.strategies.base import Strategy
from cos598d.strategies.replicated import Replicated
from cos598d.sync import SYNCS, get_sync
from cos598d.sync.base import GradientSync
from cos598d.sync.options import SyncOptions

# What --sync takes next to the gradient syncs: the names of files, each loaded when its name is asked for.
OURS = ("zero1", "zero2", "zero3", "sparse_zero1", "shared_weights")
ENGINES = ("torch_zero1", "torch_fsdp", "horovod", "dp", "fabric", "deepspeed")  # other libraries'
STRATEGIES = (*OURS, *ENGINES)

# What --sync takes for one of the exact ones, chosen when the run's ranks have met (`cos598d/cost/choice.py`).
AUTO_SYNC = "auto"

# Called with a communicator, find_unused_parameters, SyncOptions and a precision.
MakeStrategy = Callable[..., Strategy]


def known_names() -> tuple[str, ...]:
    """All that --sync takes by name."""
    return (*SYNCS, *STRATEGIES)


def is_our_own(name: str) -> bool:
    """Whether `--sync name` is this project's code alone: no other library's engine, and no file of the user's."""
    return name in (*SYNCS, *OURS, AUTO_SYNC)


def class_of(name: str) -> type[Strategy] | type[GradientSync]:
    """The class that `--sync name` means: of a strategy, of a gradient sync, or of your own sync in FILE.py:CLASS.

    Raises UsageError with the known names for any other, and what is wrong with a file that cannot be used.
    """
    if name not in STRATEGIES:
        return get_sync(name, also=(*STRATEGIES, AUTO_SYNC))
    file = importlib.import_module(f"cos598d.strategies.{'engines.' if name in ENGINES else ''}{name}")
    (found,) = (kind for kind in vars(file).values() if _is_strategy_of(kind, file.__name__))
    return found


def _is_strategy_of(kind: object, module: str) -> bool:
    return isinstance(kind, type) and issubclass(kind, Strategy) and kind.__module__ == module


def get_strategy(name: str) -> MakeStrategy:
    """What makes the strategy that `--sync name` means: whole replicas that average by it, if it is a gradient sync.

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
