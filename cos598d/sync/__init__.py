"""The registry of gradient syncs: one file each, loaded when its name is asked for."""

import importlib
from collections.abc import Iterable

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync
from cos598d.terminal.words import did_you_mean

# name on the command line -> module and class
SYNCS = {
    "none": "cos598d.sync.none:NoSync",
    "gather_scatter": "cos598d.sync.gather_scatter:GatherScatter",
    "reduce_broadcast": "cos598d.sync.reduce_broadcast:ReduceBroadcast",
    "all_reduce": "cos598d.sync.all_reduce:AllReduce",
    "flat": "cos598d.sync.flat:Flat",
    "overlap": "cos598d.sync.overlap:Overlap",
    "bucketed": "cos598d.sync.bucketed:Bucketed",
    "ring": "cos598d.sync.ring:Ring",
    "halving_doubling": "cos598d.sync.halving_doubling:HalvingDoubling",
    "tree": "cos598d.sync.tree:Tree",
    "shared_memory": "cos598d.sync.shared_memory:SharedMemory",
    "hierarchical": "cos598d.sync.hierarchical:Hierarchical",
    "sparse_rows": "cos598d.sync.sparse_rows:SparseRows",
    "local_sgd": "cos598d.sync.local_sgd:LocalSGD",
    "diloco": "cos598d.sync.diloco:DiLoCo",
    "ddp": "cos598d.sync.ddp:DDP",
}


def or_choose(option: str) -> str:
    """The end of a sentence that refuses an option to one sync: which of the registered ones take it, if any does."""
    takers = [name for name in SYNCS if option in get_sync(name).uses]
    return f", or choose one of {', '.join(takers)}" if takers else ""


def get_sync(name: str, also: Iterable[str] = ()) -> type[GradientSync]:
    """The class of the gradient sync called `name`, or of your own in a file, FILE.py:CLASS.

    Raises UsageError with the known names, `also` among them, for any other, and what is wrong with a file that cannot
    be used.
    """
    if name in SYNCS:
        module, class_name = SYNCS[name].split(":")
        return getattr(importlib.import_module(module), class_name)
    from cos598d.sync.from_file import is_own, load_own  # which few runs need

    if is_own(name):
        return load_own(name)
    raise UsageError(
        f"--sync {name}: no such gradient sync; the known ones are {', '.join([*SYNCS, *also])}, and your own as "
        f"FILE.py:CLASS.{did_you_mean(name, [*SYNCS, *also])}"
    )
