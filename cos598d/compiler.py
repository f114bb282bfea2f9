"""torch's compiler, left out of ranks that never compile: every optimizer's first step would import it for nothing."""

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_NAME = "torch._dynamo"


class _NoCompiler(ModuleType):
    """What torch asks of torch._dynamo at an optimizer's step and when a process group opens.

    All else of it is the real one's, imported when asked for.
    """

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # it knows no rules yet

    @staticmethod
    def graph_break(*_: Any) -> None:
        """There is no graph."""

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        """Nothing compiles the function."""
        return function

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def leave_out_compiler() -> None:
    """Save two seconds of processor at the first step of an optimizer (torch 2.13), in a process that compiles nothing.

    Not for other people's scripts: what torch marks as not to be compiled meanwhile would be compiled later.
    """
    if _NAME in sys.modules:
        return
    stand_in = _NoCompiler(_NAME)
    stand_in.__spec__ = importlib.util.find_spec(_NAME)
    sys.modules[_NAME] = torch._dynamo = stand_in
