"""The registry of gradient syncs: one file each, loaded when its name is asked for."""

import importlib

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync

# name on the command line -> module and class
SYNCS = {
    "none": "cos598d.sync.none:NoSync",
    "gather_scatter": "cos598d.sync.gather_scatter:GatherScatter",
    "all_reduce": "cos598d.sync.all_reduce:AllReduce",
    "flat": "cos598d.sync.flat:Flat",
    "overlap": "cos598d.sync.overlap:Overlap",
    "bucketed": "cos598d.sync.bucketed:Bucketed",
    "ddp": "cos598d.sync.ddp:DDP",
}


def get_sync(name: str) -> type[GradientSync]:
    """The class of the gradient sync called `name`. Raises UsageError with the known names for any other."""
    if name not in SYNCS:
        raise UsageError(f"--sync {name}: no such gradient sync; the known ones are {', '.join(SYNCS)}.")
    module, class_name = SYNCS[name].split(":")
    return getattr(importlib.import_module(module), class_name)
