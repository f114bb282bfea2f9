"""Your own code, named on the command line as FILE.py:CLASS: a sync or a task."""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from cos598d.errors import UsageError, one_line

SUFFIXES = (".py", ".py.txt")  # .py.txt is for files inside a package that tools must not take for its code

_modules: dict[tuple[Path, bytes], ModuleType] = {}


def is_own(name: str) -> bool:
    """Whether `name` means a class in a file, not a registered name."""
    return ":" in name or name.endswith(".py")


def label_of(name: str) -> str:
    """A form of `name` for file names: the class of FILE.py:CLASS, or the name itself."""
    return name.rpartition(":")[2] if is_own(name) else name


def load_class(name: str, contract: Sequence[str], kind: str, how: str) -> type:
    """Load the class that FILE.py:CLASS names. The path is relative to the working directory.

    `contract` are the methods that the class must have. `kind` is its kind in errors ("gradient sync"). `how` is a
    sentence that explains how to get missing methods. Raises UsageError if there is no such file or class, if the file
    cannot be imported, or if the class lacks a method.
    """
    path, _, class_name = name.rpartition(":") if ":" in name else (name, "", "")
    module = load_file(Path(path), path)
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
        fits = [f"{path}:{one.__name__}" for one in own if not _missing(one, contract)]
        remedy = f"Give {' or '.join(fits)}" if fits else f"Write one: no class there is a {kind}"
        raise UsageError(f"{path} {f'has no class {class_name}' if class_name else 'names no class'}. {remedy}.")
    if missing := _missing(found, contract):
        raise UsageError(
            f"{class_name} in {path} lacks {' and '.join(missing)}. A {kind} has {', '.join(contract)}. {how}."
        )
    return found


def check_file(name: str) -> None:
    """Raise UsageError unless FILE.py:CLASS names a Python file that mentions the class. The file is not run."""
    path, _, class_name = name.rpartition(":")
    source = _source(Path(path), path)
    try:
        compile(source, path, "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not Python ({one_line(error)}). Fix that file.") from None
    if class_name.encode() not in source:
        raise UsageError(f"{path} has no class {class_name}. Give the name of a class that is there.")


def _missing(kind: type, contract: Sequence[str]) -> list[str]:
    return [method for method in contract if not callable(getattr(kind, method, None))]


def load_file(
    path: Path, shown: str, compiled: Callable[[ModuleType, bytes, str], CodeType] | None = None
) -> ModuleType:
    """Run a Python file as a module of its own; errors call it `shown`. Raises UsageError with the line.

    `compiled(module, source, path)` returns the code to run. Before that it may add names to the module.
    """
    source = _source(path, shown)
    path = path.resolve()
    if (path, source) in _modules:
        return _modules[path, source]
    module = ModuleType(f"{__name__}:{path}")  # a name that no other module has
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their own module there
    if str(path.parent) not in sys.path:
        # so that it can import its neighbours; last, so that it hides no other module
        sys.path.append(str(path.parent))
    try:
        # Compiled here, so that nothing is written next to the file.
        code = compiled(module, source, str(path)) if compiled else compile(source, str(path), "exec")
        exec(code, vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        why = raised(error, str(path))
        if isinstance(error, SyntaxError) and error.filename == str(path):
            why = f"is not Python ({error.msg}, line {error.lineno})"
        raise UsageError(f"{shown} {why}. Fix that file.") from error
    _modules[path, source] = module
    return module


def _source(path: Path, shown: str) -> bytes:
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{shown} is not a Python file. Give FILE.py:CLASS.")
    try:
        return path.read_bytes()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UsageError(
            f"{shown}: {reason}. Give the path of FILE.py:CLASS relative to {Path.cwd()}, or in full."
        ) from None


def raised(error: BaseException, file: str) -> str:
    """The phrase for an error that code in `file` raised: its type, the innermost line there, and its message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" at line {lines[-1]}" if lines else ""
    return f"raises {type(error).__name__}{where}: {one_line(error).rstrip('.')}"
