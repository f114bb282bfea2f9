"""pytorch-transformers, imported without two packages that only unused parts of it need."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """A module that is imported when an attribute of it is used; importlib's LazyLoader does it at `import`."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_later(name: str) -> None:
    """Let `import name` cost nothing until an attribute is used. A missing package stays missing."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        sys.modules[name] = Later(name)
        sys.modules[name].__spec__ = spec
        sys.modules[name].__file__ = spec.origin  # inspect.getmodule reads it from every module


# For its download from Amazon's storage, and the tokenizer of XLM.
RARELY_USED = ("boto3", "sacremoses")

for _name in RARELY_USED:
    import_later(_name)

import pytorch_transformers  # noqa: E402
from pytorch_transformers import (  # noqa: E402
    modeling_bert,
    modeling_distilbert,
    modeling_xlm,
    modeling_xlnet,
)

__all__ = ["modeling_bert", "modeling_distilbert", "modeling_xlm", "modeling_xlnet", "pytorch_transformers"]
