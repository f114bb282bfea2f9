"""The registry of gradient syncs: each is one file of this folder, loaded when its name is used."""

import importlib

from cos598d.heart.sync.base import GradientSync

SYNCS = {  # the name on the command line, and of the file -> the class
    "none": "NoSync", "gather_scatter": "GatherScatter", "reduce_broadcast": "ReduceBroadcast",
    "all_reduce": "AllReduce", "flat": "Flat", "overlap": "Overlap", "bucketed": "Bucketed", "ring": "Ring",
    "tree": "Tree", "halving_doubling": "HalvingDoubling", "ddp": "DDP", "local_sgd": "LocalSGD", "shared_memory": "SharedMemory",
    "sparse_rows": "SparseRows",
    "zero1": "Zero1", "zero2": "Zero2", "zero3": "Zero3", "sparse_zero1": "SparseZero1", "shared_weights": "SharedWeights",
}  # fmt: skip
SHARDED = ("zero1", "zero2", "zero3", "sparse_zero1", "shared_weights")  # each rank steps a part of the weights


def get_sync(name: str) -> type[GradientSync]:
    """The class of the sync called `name`. Raises ValueError for another name, with the known ones."""
    if name not in SYNCS:
        raise ValueError(f"unknown sync {name}. Choose one of {', '.join(SYNCS)}, or your own as FILE.py:CLASS.")
    folder = "zero" if name in SHARDED else "sync"
    return getattr(importlib.import_module(f"cos598d.heart.{folder}.{name}"), SYNCS[name])
