"""The outermost calls of modules: which model is trained, on which batches, and how long a forward pass takes."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from cos598d.tools.audit.watch.batches import has_values, tensors_in

Begun = Callable[[torch.nn.Module], None]
Ended = Callable[[torch.nn.Module, list[torch.Tensor], float], None]


class Forwards:
    """Calls `begun` before and `ended` after each outermost call of a module that has parameters, and `inner` after
    every module's."""

    def __init__(self, begun: Begun, ended: Ended, inner: Begun):
        self._begun, self._ended, self._inner = begun, ended, inner
        self._depth, self._began = 0, 0.0
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1:
            # A loss is a module, too: its inputs are no batch.
            first = next(module.parameters(), None)
            if first is None or not has_values(first):
                self._began = 0.0
                return
            self._begun(module)
            self._began = time.perf_counter()

    def _after(self, module: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        self._inner(module)
        if self._depth == 0 and self._began:
            self._ended(module, [*tensors_in(inputs), *tensors_in(keywords)], time.perf_counter() - self._began)
            self._began = 0.0
