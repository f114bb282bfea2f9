"""Checkpoints: what a run needs to go on to the last bit, written while it trains, and read by any strategy."""

from cos598d.checkpoints.contents import Forms
from cos598d.checkpoints.layout import FOLDER
from cos598d.checkpoints.prune import has_checkpoints, remove_all, whole_in
from cos598d.checkpoints.randomness import load_random_states, random_states
from cos598d.checkpoints.restore import AUTO, Checkpoint, Restored, find
from cos598d.checkpoints.saving import Checkpoints
from cos598d.checkpoints.snapshot import RankState

__all__ = [
    "AUTO",
    "FOLDER",
    "Checkpoint",
    "Checkpoints",
    "Forms",
    "RankState",
    "Restored",
    "find",
    "has_checkpoints",
    "load_random_states",
    "random_states",
    "remove_all",
    "whole_in",
]
