"""Packages that are imported when something of them is asked for: they take seconds, for what is rarely used."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """A module that is imported when an attribute of it is asked for; importlib's LazyLoader does so at `import`."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_later(name: str) -> None:
    """Let `import name` cost nothing until an attribute is asked for; a package that is missing stays missing."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        sys.modules[name] = Later(name)
        sys.modules[name].__spec__ = spec
        sys.modules[name].__file__ = spec.origin  # which inspect.getmodule reads of all modules there are
