"""The registry of gradient syncs: each is one file of this folder, loaded when its name is used."""

import importlib

from cos598d.heart.sync.base import GradientSync

SYNCS = {  # the name on the command line, and of the file -> the class
    "none": "NoSync", "gather_scatter": "GatherScatter", "reduce_broadcast": "ReduceBroadcast",
    "all_reduce": "AllReduce", "flat": "Flat", "overlap": "Overlap", "bucketed": "Bucketed", "ring": "Ring",
    "tree": "Tree", "halving_doubling": "HalvingDoubling", "ddp": "DDP", "local_sgd": "LocalSGD", "shared_memory": "SharedMemory",
    "sparse_rows": "SparseRows",
    "zero1": "Zero1", "zero2": "Zero2", "zero3": "Zero3",
}  # fmt: skip


def get_sync(name: str) -> type[GradientSync]:
    """The class of the sync called `name`. Raises ValueError for another name, with the known ones."""
    if name not in SYNCS:
        raise ValueError(f"unknown sync {name}. Choose one of {', '.join(SYNCS)}, or your own as FILE.py:CLASS.")
    file = "cos598d.heart.zero.sharded" if name.startswith("zero") else f"cos598d.heart.sync.{name}"
    return getattr(importlib.import_module(file), SYNCS[name])
