"""A student's file: which lesson it is of, what can be told of it without running it, and its functions on a rank."""

import ast
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from cos598d.errors import UsageError
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain

if TYPE_CHECKING:
    from cos598d.tools.learn.lessons import Lesson

MARKER = re.compile(rb"^# cos598d lesson (\d{1,3})\b", flags=re.MULTILINE)
BLANK = re.compile(r"\.\.\.\s*#\s*your turn")
MOST_BYTES = 1 << 20
LESSONS = "cos598d.tools.learn.lessons"
STARTS = frozenset(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"))  # a program


@dataclass(frozen=True)
class Mistake:
    """What is wrong, in one sentence. `line` of the student's file is 0 where none is known.

    `detail` says what was expected and got where the sentence does not.
    """

    words: str
    line: int = 0
    detail: str = ""


def read_file(path: Path, lesson: "Lesson | None" = None) -> bytes:
    """The file's content. Raises UsageError if it cannot be read, is too large, or is another lesson's."""
    try:
        source = read_plain(path)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        fetch = f"cos598d learn {lesson.number}" if lesson else "cos598d learn"
        raise UsageError(
            f"{path}: {reason}. Give your file's path after --check, or write a new file with `{fetch}`."
        ) from None
    if len(source) > MOST_BYTES:
        raise UsageError(f"{path} has {len(source)} bytes. A lesson's file may have at most {MOST_BYTES}.")
    found = number_of(source)
    if lesson and found is not None and found != lesson.number:
        raise UsageError(
            f"{path} is a file of lesson {found}, not of lesson {lesson.number}. "
            f"Check it with `cos598d learn {found} --check {path}`."
        )
    return source


def number_of(source: bytes) -> int | None:
    """The lesson whose marker is in the file; None without one."""
    marker = MARKER.search(source)
    return int(marker[1]) if marker else None


def first_mistake(source: bytes, path: Path, page: str) -> Mistake | None:
    """What is wrong with a file before it runs: it is not Python, or blanks of its `page` are left."""
    try:
        ast.parse(source, str(path))
    except SyntaxError as error:
        text = f": `{printable(error.text.strip())}`" if error.text and error.text.strip() else ""
        return Mistake(f"this is not valid Python ({error.msg}){text}", error.lineno or 0)
    except (ValueError, RecursionError, MemoryError) as error:
        return Mistake(f"this is not valid Python ({error or 'nested too deeply'})")
    lines = enumerate(source.decode(errors="replace").splitlines(), 1)
    blanks = [line for line, text in lines if BLANK.search(text)]
    if not blanks:
        return None
    is_untouched = len(blanks) >= len(BLANK.findall(page))
    what = "nothing is filled in yet" if is_untouched else "this blank is still to be filled in"
    more = f"; {len(blanks)} blanks are left" if len(blanks) > 1 else ""
    return Mistake(f"{what}: write your code instead of `...`{more}", blanks[0])


def line_of(source: bytes, name: str) -> int:
    """Where the file defines `name`; 0 if it does not do so itself. Of "Class.method" at least where the class is."""
    line, body = 0, ast.parse(source).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next((each for each in body if isinstance(each, kinds) and each.name == part), None)
        if node is None:
            return line
        line, body = node.lineno, node.body
    return line


def rebound(source: bytes, name: str) -> tuple[int, str] | None:
    """The line where the function `name`, or a method of that class, gives a parameter's name a computed value, and the
    parameter's name; None where none does."""
    for node in ast.parse(source).body:
        if getattr(node, "name", "") == name:
            for function in (each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)):
                parameters = {each.arg for each in function.args.args}
                for line in (each for each in ast.walk(function) if isinstance(each, ast.Assign)):
                    first = line.targets[0]
                    if isinstance(first, ast.Name) and first.id in parameters and isinstance(line.value, ast.BinOp):
                        return line.lineno, first.id
    return None


def load(path: str, lesson: "Lesson", rank: int) -> ModuleType:
    """Run the file, on a rank. Raises UsageError if that fails, or if it lacks a name that the lesson asks for."""
    from cos598d.terminal.own_code import load_file
    from cos598d.tools.learn.unshared import compiled_for

    close_answers(lesson, path)
    module = load_file(Path(path), Path(path).name, compiled_for(rank))
    for name, form in lesson.contract.items():
        if not callable(getattr(module, name, None)):
            raise UsageError(f"{Path(path).name} does not define {name}. The lesson asks for {form}.")
    return module


def close_answers(lesson: "Lesson", file: str) -> None:
    """From now on this process cannot open the files of the lessons' folder and of the modules that are `closed`.

    Only `file`, which is checked, may be one of them. So a file cannot copy an answer, or import the functions that it
    is judged by. Nor can it import the lesson's own modules, through which it could change how it is measured. No code
    of this process can open them again.
    """
    here = os.path.dirname(os.path.realpath(__file__))
    package = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    closed = (
        os.path.join(here, "lessons", ""),
        *(os.path.join(package, *name.split(".")) + end for name in lesson.closed for end in (".", os.sep)),
    )
    # Bound here, since a file may replace what the module has under that name.
    real, decoded, starts = os.path.realpath, os.fsdecode, STARTS
    own = real(file)

    def refuse(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = real(decoded(arguments[0]))
            if path != own and path.replace(f"__pycache__{os.sep}", "").startswith(closed):
                name = os.path.relpath(path, package)
                raise PermissionError(f"{name} is closed while a file is checked: write your own code")
        elif event in starts and "answer" in str(arguments[:2]):
            raise PermissionError("answers are closed while a file is checked, to programs too: write your own code")

    out_of_reach = (f"{LESSONS}.lesson{lesson.number}.", f"{LESSONS}.golf.", *(f"{one}." for one in lesson.closed))
    for name in [each for each in sys.modules if f"{each}.".startswith(out_of_reach)]:
        parent, _, attribute = name.rpartition(".")
        del sys.modules[name]
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(attribute, None)
    sys.addaudithook(refuse)
