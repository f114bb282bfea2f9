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
    alike = [each.__name__ for each in vars(module).values() if _is_alike(each, module, contract)]
    known = f"Choose {' or '.join(alike)}" if alike else f"Write one: no class there is a {kind}"
    if not class_name:
        raise UsageError(f"{path} names no class. Give {path}:{alike[0] if alike else 'CLASS'}.")
    found = getattr(module, class_name, None)
    if found is None:
        raise UsageError(f"{path} has no class {class_name}. {known}.")
    if not isinstance(found, type):
        raise UsageError(f"{class_name} in {path} is a {type(found).__name__}, not a class. {known}.")
    missing = [method for method in contract if not callable(getattr(found, method, None))]
    if missing:
        raise UsageError(
            f"{class_name} in {path} lacks {' and '.join(missing)}. A {kind} has {', '.join(contract)}. {how}."
        )
    return found


def _compiled(module: ModuleType, source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec")


def load_file(path: Path, shown: str, compiled: Callable[[ModuleType, bytes, str], CodeType] = _compiled) -> ModuleType:
    """Run a Python file as a module of its own; errors call it `shown`. Raises UsageError with the line.

    `compiled(module, source, path)` returns the code to run. Before that it may add names to the module.
    """
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{shown} is not a Python file. Give FILE.py:CLASS.")
    from cos598d.terminal.reading import read_plain  # which most runs never need

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
    sys.modules[module.__name__] = module  # dataclasses look up their own module there
    if str(path.parent) not in sys.path:
        # so that it can import its neighbours; last, so that it hides no other module
        sys.path.append(str(path.parent))
    try:
        # Compiled here, so that nothing is written next to the file.
        exec(compiled(module, source, str(path)), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UsageError(f"{shown} {_explain(error, path)}. Fix that file.") from error
    _modules[path, source] = module
    return module


def _explain(error: BaseException, path: Path) -> str:
    """The error of a file's import as a phrase, with the line."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        text = f": {error.text.strip()}" if error.text else ""
        return f"is not Python ({error.msg}, line {error.lineno}{text})"
    if _line_in(error, str(path)) is None:  # the compiler refused it, without a line
        return f"is not Python ({error})"
    return raised(error, str(path), " while being imported,")


def raised(error: BaseException, file: str, when: str = "") -> str:
    """The phrase for an error that code in `file` raised: its type, its line and its message.

    `when` follows the type, such as " in its second step".
    """
    line = _line_in(error, file)
    return f"raises {type(error).__name__}{when}{f' at line {line}' if line else ''}: {one_line(error).rstrip('.')}"


def _line_in(error: BaseException, file: str) -> int | None:
    """The innermost line of `file` in the error's traceback; None if it came from elsewhere."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def _is_alike(value: object, module: ModuleType, contract: Sequence[str]) -> bool:
    is_its_own = isinstance(value, type) and value.__module__ == module.__name__
    return is_its_own and all(callable(getattr(value, method, None)) for method in contract)
