"""Which of a run's epochs are whole: one that --max_steps, early stopping or a time limit cut short is no epoch."""

from collections.abc import Mapping
from typing import Any

from cos598d.records.run import Summary

Epoch = Mapping[str, Any]


def is_cut(epoch: Epoch, run: Summary) -> bool:
    """Whether the run's epoch ended before its last iteration; in an older record, whether another one is longer."""
    longest = max((one.get("iterations", 0) for one in run["epochs"]), default=0)
    return epoch.get("is_cut", False) or 0 < epoch.get("iterations", 0) < longest


def whole_epochs(run: Summary) -> list[Epoch]:
    """The epochs that were not cut, in their order."""
    return [epoch for epoch in run["epochs"] if not is_cut(epoch, run)]


def number_in_words(epoch: Epoch, run: Summary) -> str:
    """ "2", and "2 (cut)" of an epoch that was cut."""
    return f"{epoch['epoch']} (cut)" if is_cut(epoch, run) else str(epoch["epoch"])
