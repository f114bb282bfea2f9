"""cos598d: learn, teach and measure data-parallel training by fine-tuning BERT."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cos598d.commands.from_python import TrainedRun as TrainedRun
    from cos598d.commands.from_python import compare as compare
    from cos598d.commands.from_python import train as train
    from cos598d.doors.fully_shard import fully_shard as fully_shard
    from cos598d.doors.parallel import data_parallel as data_parallel
    from cos598d.doors.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from cos598d.doors.sharded_parallel import parallelize as parallelize

__version__ = "0.1.0"

# What the package offers to Python, and the module of each name.
_OFFERED = {
    "data_parallel": "cos598d.doors.parallel",
    "fully_shard": "cos598d.doors.fully_shard",
    "parallelize": "cos598d.doors.sharded_parallel",
    "ShardedOptimizer": "cos598d.doors.sharded_optimizer",
    "train": "cos598d.commands.from_python",
    "compare": "cos598d.commands.from_python",
    "TrainedRun": "cos598d.commands.from_python",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: asking for the version, or reading a run's files, must not import torch.
    if name in _OFFERED:
        return getattr(importlib.import_module(_OFFERED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
