"""Files of lessons through the course's tests, in one process: what is refused, in which words, where. Imports these
tests to call them without pytest."""

import functools
import importlib
import tempfile
from pathlib import Path

from cos598d.tools.exam.plugin import check_text
from cos598d.tools.exam.ranks import Wrong, run

SEED = 20260101


def module_of(number):
    """The lesson's tests."""
    return importlib.import_module(f"cos598d.tools.course.lessons.lesson{number}.test_lesson")


def tests_of(number):
    """The lesson's tests, in order: (name, function, numbers of ranks)."""
    module = module_of(number)
    found = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    sizes = {name: getattr(test, "pytestmark", None) for name, test in found.items()}  # one rank, if none are named
    return [(name, test, sizes[name][0].args[1] if sizes[name] else [1]) for name, test in found.items()]


def first_mistake(number, code, sizes=None, name=""):
    """The first mistake that the lesson's tests find in `code`; None if it passes. sizes: the numbers of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (name or f"lesson{number}.py")
        path.write_text(code)
        try:
            mark = getattr(module_of(number), "pytestmark", None)
            check_text(path, may_call_torch=mark is not None and mark.name == "calls_torch")
            for size in sizes or [None]:
                for _, test, every in tests_of(number):
                    for n in every:
                        if size in (None, n):
                            test(functools.partial(run, file=path), SEED, n)
        except Wrong as wrong:
            return wrong
    return None


def verdict(number, code, says, sizes):
    """ "" for a wrong file that is refused in the demanded words at the marked line; else what came out."""
    wrong = first_mistake(number, code, sizes or tests_of(number)[0][2][:1]) or first_mistake(number, code)
    if wrong is None:
        return "passes"
    text = " ".join(f"lesson{number}.py line {wrong.line}: {wrong.words} {wrong.detail}".split())
    marked = [place for place, line in enumerate(code.splitlines(), 1) if line.endswith("#!")]
    where = "" if not marked or wrong.line == marked[0] else f" (line {wrong.line}, not {marked[0]})"
    return "" if says in text and not where else f"wanted {says!r}, got {text[:300]!r}{where}"
