"""Optimizers as ranks have to have them alike: the numbers by which they go, and sketches of what they remember."""

import math
import weakref
from typing import Any

import torch

from cos598d.tools.audit.sketch import Sketcher, to_text
from cos598d.tools.audit.watch.shards import Shards, is_plain

_GROUPS = 8  # of an optimizer that are noted


class SteppedOptimizers:
    """The optimizers that have stepped, in their order. They are not kept alive."""

    def __init__(self, sketch: Sketcher, shards: Shards):
        self._sketch, self._shards = sketch, shards
        self._seen: list[weakref.ref[torch.optim.Optimizer]] = []

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        if not any(each() is optimizer for each in self._seen):
            self._seen.append(weakref.ref(optimizer))

    def settings(self) -> list[dict[str, Any]]:
        """What each goes by now."""
        return [settings_of(each) for each in (reference() for reference in self._seen) if each is not None]

    def state(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, str]:
        """Sketches of what it remembers of the whole weights that have a name, such as their moments, by both names.

        Of a weight that is cut, or unknown to the model, ranks may remember different things by right.
        """
        found = {}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if id(weight) not in names or not self._shards.are_whole(weight):
                    continue
                for key, value in (optimizer.state.get(weight) or {}).items():
                    is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point() and is_plain(value)
                    if is_tensor and value.numel() in (1, weight.numel()):
                        found[f"{key} of {names[id(weight)]}"] = to_text(self._sketch(value))
        return found


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rates of an optimizer's first groups; of those that are tensors none, which could be waited for."""
    rates = [group.get("lr") for group in optimizer.param_groups[:_GROUPS]]
    return [float(each) for each in rates if isinstance(each, int | float) and math.isfinite(each)]


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's class and, of its first groups, the numbers by which it goes."""
    groups = []
    for group in optimizer.param_groups[:_GROUPS]:
        found = {}
        for name, value in group.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if name != "params" and (is_number or (isinstance(value, torch.Tensor) and value.numel() == 1)):
                found[name] = float(value)
        groups.append(found)
    return {"class": type(optimizer).__name__, "groups": groups}
