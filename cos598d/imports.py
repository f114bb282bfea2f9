"""Packages that are imported when something of them is asked for: they take seconds, for what is rarely used."""

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class Later(ModuleType):
    """A module that is imported when an attribute of it is asked for; importlib's LazyLoader does so at `import`."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_later(name: str, stand_in: type[Later] = Later) -> None:
    """Let `import name` cost nothing until an attribute is asked for; a package that is missing stays missing."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        sys.modules[name] = stand_in(name)
        sys.modules[name].__spec__ = spec
        sys.modules[name].__file__ = spec.origin  # which inspect.getmodule reads of all modules there are


def leave_out_compiler() -> None:
    """Save the two seconds of processor that making DDP, or an optimizer's first step, takes (torch 2.13) to load it.

    For a process that compiles nothing, and not for other people's scripts: what torch marks as not to be compiled
    meanwhile would be compiled later.
    """
    import torch

    import_later("torch._dynamo", _NoCompiler)
    torch._dynamo = sys.modules["torch._dynamo"]


def bring_back_compiler() -> None:
    """Undo `leave_out_compiler`, for code that imports parts of torch._dynamo: some lead in a circle to a stand-in."""
    if isinstance(sys.modules.get("torch._dynamo"), _NoCompiler):
        import torch

        del sys.modules["torch._dynamo"]
        torch._dynamo = importlib.import_module("torch._dynamo")


class _NoUtilities:
    """What DistributedDataParallel asks of torch._dynamo.utils when it is made; all else is the real one's."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        """How graphs would be cut at DDP's buckets, by default; "python_reducer" would replace its own reducer."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        bring_back_compiler()
        return getattr(importlib.import_module("torch._dynamo.utils"), name)


class _NoSettings:
    """What torch.utils.checkpoint asks of torch._dynamo.config, by default; all else is the real one's."""

    error_on_nested_fx_trace = True  # for a compiler that traces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    @staticmethod
    def _real() -> ModuleType:
        bring_back_compiler()
        return importlib.import_module("torch._dynamo.config")


class _NoCompiler(Later):
    """What torch asks of torch._dynamo at an optimizer's step, for a checkpoint, for a process group and for DDP.

    All else of it is the real one's, imported when asked for.
    """

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # it knows no rules yet
    utils = _NoUtilities()
    config = _NoSettings()

    @staticmethod
    def graph_break(*_: Any) -> None:
        """There is no graph."""

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        """Nothing compiles the function."""
        return function
