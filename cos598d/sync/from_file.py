"""A gradient sync of your own, from a file: `--sync FILE.py:CLASS`, and a starting file to fill in."""

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from cos598d.errors import UsageError
from cos598d.sync.base import GradientSync
from cos598d.sync.facts import SyncFacts
from cos598d.sync.options import DEFAULTS, SyncOptions
from cos598d.terminal.reading import read_plain

CONTRACT = ("attach", "finish", "no_sync", "detach")
TEMPLATE = "template.py.txt"
SUFFIXES = (".py", ".py.txt")  # the second is of files that a package carries, and that no tool takes for its own code

_modules: dict[tuple[Path, bytes], ModuleType] = {}


def is_own(name: str) -> bool:
    """Whether `name` is meant as a file's class, not as a registered sync."""
    return ":" in name or name.endswith(".py")


def label_of(name: str) -> str:
    """A sync's name for use in a file name: for FILE.py:CLASS, the class."""
    return name.rpartition(":")[2] if is_own(name) else name


def load_own(name: str) -> type[GradientSync]:
    """The class that FILE.py:CLASS names, the path relative to the working directory.

    Raises UsageError in one sentence when there is no such file or class, when the file cannot be imported, and when
    the class is not a gradient sync: it need not inherit GradientSync, but must have the contract's methods and take
    (comm, find_unused_parameters).
    """
    path, _, class_name = name.rpartition(":") if ":" in name else (name, "", "")
    module = load_file(Path(path), path)
    alike = [each.__name__ for each in vars(module).values() if _is_alike(each, module)]
    known = f"Choose {' or '.join(alike)}" if alike else "Write one: no class there is a gradient sync"
    if not class_name:
        raise UsageError(f"{path} names no class. Give {path}:{alike[0] if alike else 'CLASS'}.")
    found = getattr(module, class_name, None)
    if found is None:
        raise UsageError(f"{path} has no class {class_name}. {known}.")
    if not isinstance(found, type):
        raise UsageError(f"{class_name} in {path} is a {type(found).__name__}, not a class. {known}.")
    missing = [method for method in CONTRACT if not callable(getattr(found, method, None))]
    if missing:
        raise UsageError(
            f"{class_name} in {path} lacks {' and '.join(missing)}: a gradient sync has {', '.join(CONTRACT)}. "
            "Inherit them from cos598d.sync.base.GradientSync or write them."
        )
    return _complete(found, path)


def write_template(path: Path) -> None:
    """Write a starting file at `path`. Raises UsageError if it is no .py file, exists or cannot be written."""
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


def _compiled(module: ModuleType, source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec")


def load_file(path: Path, shown: str, compiled: Callable[[ModuleType, bytes, str], CodeType] = _compiled) -> ModuleType:
    """Run a Python file as a module of its own, `shown` in what is said of it. Raises UsageError, with the line.

    `compiled(module, source, path)` is the code that runs, and may give the module names before.
    """
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{shown} is not a Python file. Give FILE.py:CLASS.")
    try:
        source = read_plain(path)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UsageError(
            f"{shown}: {reason}. Give the path of FILE.py:CLASS relative to {Path.cwd()}, or in full."
        ) from None
    path = path.resolve()
    if (path, source) in _modules:
        return _modules[path, source]
    module = ModuleType(f"{__name__}:{path}")  # a name that no other module has
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look there for their own module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for imports of its neighbours; last, so that it hides nothing
    try:
        # Compiled here, so that nothing is written next to the file.
        exec(compiled(module, source, str(path)), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UsageError(f"{shown} {_explain(error, path)}. Fix that file.") from error
    _modules[path, source] = module
    return module


def _explain(error: BaseException, path: Path) -> str:
    """What went wrong in a file's import, with the line."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        text = f": {error.text.strip()}" if error.text else ""
        return f"is not Python ({error.msg}, line {error.lineno}{text})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if not lines:  # refused by the compiler, without a line
        return f"is not Python ({error})"
    message = " ".join(str(error).split())
    return f"raises {type(error).__name__} while being imported, at line {lines[-1]}: {message or 'without a message'}"


def _is_alike(value: object, module: ModuleType) -> bool:
    is_its_own = isinstance(value, type) and value.__module__ == module.__name__
    return is_its_own and all(callable(getattr(value, method, None)) for method in CONTRACT)


@functools.cache  # a class is completed once, however often it is asked for
def _complete(own: Any, path: str) -> type[GradientSync]:
    """The class with all that the loop asks of a sync: SyncFacts' answers, and a constructor that takes options.

    The contract's `settle` finds the communicator and the model, under whatever names the class keeps them.
    """
    try:
        signature = inspect.signature(own)
        signature.bind(None, find_unused_parameters=True)
    except TypeError as error:
        raise UsageError(
            f"{own.__name__} in {path} cannot be made from (comm, find_unused_parameters): {error}. Let its __init__ "
            f"take both, and pass them to GradientSync's."
        ) from None
    try:
        signature.bind(None, True, DEFAULTS)
        takes_options = True
    except TypeError:
        takes_options = False
    forgotten = f"whatever {own.__name__} remembers from step to step, since it has no own_state(),"
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
            self._model = model  # before its own, which may call `settle`
            return super().attach(model)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Own, name, getattr(own, name))
    return Own
