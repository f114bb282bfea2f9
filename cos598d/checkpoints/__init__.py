"""Checkpoints: everything that a run needs to resume to the last bit, written while it trains, read by any strategy."""

from cos598d.checkpoints.contents import Forms
from cos598d.checkpoints.folder import has_checkpoints, remove_all, whole_in
from cos598d.checkpoints.layout import FOLDER
from cos598d.checkpoints.restore import AUTO, Checkpoint, find
from cos598d.checkpoints.save import Checkpoints
from cos598d.checkpoints.snapshot import RankState, load_random_states, random_states

__all__ = [
    "AUTO",
    "FOLDER",
    "Checkpoint",
    "Checkpoints",
    "Forms",
    "RankState",
    "find",
    "has_checkpoints",
    "load_random_states",
    "random_states",
    "remove_all",
    "whole_in",
]
