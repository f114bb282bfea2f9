"""The registry of gradient syncs: each is one file, loaded when its name is used."""

import importlib

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync

# The names on the command line, in the order of tables -> the class of each.
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
    "zero1": "cos598d.zero.zero1:Zero1",
    "zero2": "cos598d.zero.zero2:Zero2",
    "zero3": "cos598d.zero.zero3:Zero3",
    "sparse_zero1": "cos598d.zero.sparse_zero1:SparseZero1",
    "shared_weights": "cos598d.zero.shared_weights:SharedWeights",
}
# Other libraries' engines, which may not be installed.
ENGINES = {
    "torch_fsdp": "cos598d.engines.torch_fsdp:TorchFSDP",
    "horovod": "cos598d.engines.horovod:Horovod",
    "dp": "cos598d.engines.dp:DP",
    "fabric": "cos598d.engines.fabric:Fabric",
    "deepspeed": "cos598d.engines.deepspeed:DeepSpeed",
}
KNOWN = SYNCS | ENGINES
AUTO_SYNC = "auto"  # the name by which --sync tries several, and takes the fastest


def get_sync(name: str) -> type[GradientSync]:
    """The class of the sync called `name`, or of your own in a file, FILE.py:CLASS.

    Raises UsageError for any other name, with the known names; and for a file that cannot be used, with the reason.
    """
    if name in KNOWN:
        file, _, kind = KNOWN[name].partition(":")
        return getattr(importlib.import_module(file), kind)
    from cos598d.terminal.own_code import is_own  # which few runs need

    if is_own(name):
        from cos598d.sync.from_file import load_own

        return load_own(name)
    from cos598d.terminal.words import did_you_mean  # which only a wrong name needs

    choices = ", ".join(KNOWN)
    raise UsageError(
        f"unknown sync {name}.{did_you_mean(name, list(KNOWN))} Choose one of {choices}, or your own as FILE.py:CLASS."
    )
