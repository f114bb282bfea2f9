"""pytorch-transformers' models, imported without two packages that nothing here uses. These take a second."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """A module that is imported when an attribute of it is used.

    importlib's LazyLoader would import it as soon as `inspect` looks at all modules, which torch does.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


for _name in ("boto3", "sacremoses"):  # for downloads from Amazon's storage, and for the tokenizer of XLM
    _spec = None if _name in sys.modules else importlib.util.find_spec(_name)
    if _spec is not None:  # a missing package stays missing
        sys.modules[_name] = Later(_name)
        sys.modules[_name].__spec__, sys.modules[_name].__file__ = _spec, _spec.origin

from pytorch_transformers import modeling_bert, modeling_distilbert, modeling_roberta  # noqa: E402

__all__ = ["modeling_bert", "modeling_distilbert", "modeling_roberta"]
