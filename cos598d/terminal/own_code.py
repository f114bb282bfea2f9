"""Code of your own, named on the command line as FILE.py:CLASS: a sync, a task, a logger."""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from cos598d.errors import UsageError, one_line

SUFFIXES = (".py", ".py.txt")  # the second is of files that a package carries, and that no tool takes for its own code

_modules: dict[tuple[Path, bytes], ModuleType] = {}


def is_own(name: str) -> bool:
    """Whether `name` is meant as a file's class, not as a registered name."""
    return ":" in name or name.endswith(".py")


def label_of(name: str) -> str:
    """A name for use in a file name: for FILE.py:CLASS, the class."""
    return name.rpartition(":")[2] if is_own(name) else name


def load_class(name: str, contract: Sequence[str], kind: str, how: str) -> type:
    """The class that FILE.py:CLASS names, the path relative to the working directory.

    `contract` are the methods that the class must have, `kind` is what it is then called ("gradient sync"), and `how`
    says how to get missing methods. Raises UsageError in one sentence when there is no such file or class, when the
    file cannot be imported, and when the class is of another kind.
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
    """Run a Python file as a module of its own, `shown` in what is said of it. Raises UsageError, with the line.

    `compiled(module, source, path)` is the code that runs, and may give the module names before.
    """
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{shown} is not a Python file. Give FILE.py:CLASS.")
    from cos598d.terminal.reading import read_plain  # which few runs need

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
    if _line_in(error, str(path)) is None:  # refused by the compiler, without a line
        return f"is not Python ({error})"
    return raised(error, str(path), " while being imported,")


def raised(error: BaseException, file: str, when: str = "") -> str:
    """What code in `file` raised, for a sentence after what was called: the error's type, its line and its message."""
    line = _line_in(error, file)
    return f"raises {type(error).__name__}{when}{f' at line {line}' if line else ''}: {one_line(error).rstrip('.')}"


def _line_in(error: BaseException, file: str) -> int | None:
    """The line of `file` that raised, the innermost one; None where the error comes from elsewhere."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def _is_alike(value: object, module: ModuleType, contract: Sequence[str]) -> bool:
    is_its_own = isinstance(value, type) and value.__module__ == module.__name__
    return is_its_own and all(callable(getattr(value, method, None)) for method in contract)
