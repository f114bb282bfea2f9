"""cos598d: learn, teach and measure data-parallel training by fine-tuning BERT."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cos598d.comm.ledger import Ledger as Ledger
    from cos598d.commands.from_python import TrainedRun as TrainedRun
    from cos598d.commands.from_python import compare as compare
    from cos598d.commands.from_python import train as train
    from cos598d.parallel import Parallel as Parallel
    from cos598d.parallel import data_parallel as data_parallel
    from cos598d.parallel import parallelize as parallelize
    from cos598d.sync.base import GradientSync as GradientSync
    from cos598d.zero.sharded_optimizer import ShardedOptimizer as ShardedOptimizer

__version__ = "0.2.0"

# What the package offers to Python, and the module of each name.
_OFFERED = {
    "data_parallel": "cos598d.parallel",
    "parallelize": "cos598d.parallel",
    "Parallel": "cos598d.parallel",
    "Ledger": "cos598d.comm.ledger",
    "GradientSync": "cos598d.sync.base",
    "ShardedOptimizer": "cos598d.zero.sharded_optimizer",
    "train": "cos598d.commands.from_python",
    "compare": "cos598d.commands.from_python",
    "TrainedRun": "cos598d.commands.from_python",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: asking for the version, or reading a run's files, must not import torch.
    if name in _OFFERED:
        return getattr(importlib.import_module(_OFFERED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
