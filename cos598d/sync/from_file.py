"""A gradient sync of your own from a file, `--sync FILE.py:CLASS`, and a template for one."""

import functools
import inspect
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync
from cos598d.sync.facts import SyncFacts
from cos598d.sync.options import DEFAULTS, SyncOptions
from cos598d.terminal.own_code import SUFFIXES, load_class

CONTRACT = ("attach", "finish", "no_sync", "detach")
TEMPLATE = "template.py.txt"


def load_own(name: str) -> type[GradientSync]:
    """The class that FILE.py:CLASS names. The path is relative to the working directory.

    Raises UsageError if there is no such file or class, if the file cannot be imported, or if the class is not a
    gradient sync. It need not inherit GradientSync, but must have its methods and take (comm, find_unused_parameters).
    """
    found = load_class(
        name, CONTRACT, "gradient sync", "Inherit them from cos598d.sync.base.GradientSync or write them"
    )
    return _complete(found, name.rpartition(":")[0])


def write_template(path: Path) -> None:
    """Write a template at `path`. Raises UsageError if the path is not a .py file, exists, or cannot be written."""
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{path} is not the name of a Python file. Give one that ends in .py.")
    text = (files("cos598d.sync") / TEMPLATE).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as output:
            output.write(text.replace("FILE.py", path.name))
    except FileExistsError:
        raise UsageError(f"{path} exists already and is not overwritten. Give another name.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}). Give another path.") from None


@functools.cache  # a class is completed only once
def _complete(own: Any, path: str) -> type[GradientSync]:
    """The class with everything that the loop needs: the defaults of SyncFacts, and a constructor that takes options.

    The interface's `settle` finds the communicator and the model, whatever names the class gives them.
    """
    try:
        signature = inspect.signature(own)
        signature.bind(None, find_unused_parameters=True)
    except TypeError as error:
        raise UsageError(
            f"{own.__name__} in {path} cannot be constructed with (comm, find_unused_parameters): {error}. Let its "
            "__init__ take both, and pass them to GradientSync's."
        ) from None
    try:
        signature.bind(None, True, DEFAULTS)
        takes_options = True
    except TypeError:
        takes_options = False
    forgotten = f"everything that {own.__name__} keeps from step to step, since it has no own_state(),"
    keeps_nothing = getattr(own, "own_state", SyncFacts.own_state) is SyncFacts.own_state

    class Own(own, SyncFacts):
        never_kept = forgotten if keeps_nothing else None

        def __init__(self, comm, find_unused_parameters: bool = True, options: SyncOptions = DEFAULTS):
            if takes_options:
                super().__init__(comm, find_unused_parameters, options)
            else:
                super().__init__(comm, find_unused_parameters=find_unused_parameters)
            if not hasattr(self, "comm"):
                self.comm = comm

        def attach(self, model: nn.Module) -> nn.Module:
            self._model = model  # before the class's own attach, which may call `settle`
            return super().attach(model)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Own, name, getattr(own, name))
    return Own
