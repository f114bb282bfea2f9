"""A class: every submission in a folder, several at a time, with results that are kept, and a table of all."""

import csv
import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from cos598d.errors import UsageError
from cos598d.terminal.files import write_json, write_whole
from cos598d.terminal.printable import printable
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.judging import judge

FORMULAS = ("=", "+", "-", "@")  # a spreadsheet would run what begins so
Results = dict[str, Any]


def submissions_in(folder: Path, file_name: str) -> tuple[dict[str, Path], list[str]]:
    """The files of a class by name, from `ann/lesson3.py` or `ann.py`; and the names of those without the file."""
    found: dict[str, Path] = {}
    missing = []
    for path in sorted(folder.iterdir()):
        if path.name[0] in "._" or path.is_symlink():
            continue
        file = path / file_name if path.is_dir() else path
        if path.is_dir() and not file.is_file():
            missing.append(path.name)
        elif path.is_dir() or path.suffix == ".py":
            name = path.stem if path.is_file() else path.name
            if name in found:
                raise UsageError(f"{folder} has {name} twice, as {found[name]} and {file}. Take one away.")
            found[name] = file
    if not found and not missing:
        raise UsageError(f"{folder} has no submissions. Give a folder with a folder or a Python file for each student.")
    return found, missing


def grade_class(
    found: Mapping[str, Path],
    assignment: Assignment,
    kept: Path,
    parallel: int,
    container: str,
    say: Callable[[str, Results], None],
) -> dict[str, Results]:
    """The results of every submission, by name. Those in the folder `kept` that still hold are not judged again.

    A Ctrl-C ends what is under way.
    """
    kept.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def grade(name: str) -> Results:
        result = kept / f"{name}.json"
        stamp = _stamp(found[name], assignment)
        known = _known(result)
        if known is None or known.get("extra_data", {}).get("stamp") != stamp:
            known = judge(found[name], assignment, container, stop)
            if stop.is_set():
                return known  # half judged: nobody waits for it
            known["extra_data"] = {"stamp": stamp}
            write_json(result, known)
        say(name, known)
        return known

    with ThreadPoolExecutor(parallel) as pool:
        try:
            return dict(zip(found, pool.map(grade, found), strict=True))
        finally:
            stop.set()


def _stamp(file: Path, assignment: Assignment) -> str:
    """What the results depend on: the file's content, and the assignment."""
    try:
        content = file.read_bytes()
    except OSError:
        content = b""
    return hashlib.sha256(content + msgspec.json.encode(assignment)).hexdigest()[:16]


def _known(result: Path) -> Results | None:
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("tests"), list) else None


def write_table(file: Path, rows: Mapping[str, Results]) -> None:
    """Write the class's table: a row for each submission, with the points of each test and the first words."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    names = list(dict.fromkeys(test["name"] for row in rows.values() for test in row["tests"]))
    writer.writerow(["submission", "score", *names, "words"])
    for name, row in rows.items():
        scores = {test["name"]: test["score"] for test in row["tests"]}
        cells = [name, printable(" ".join(str(row["output"]).split()), 500)]
        shown, words = (f"'{cell}" if cell.startswith(FORMULAS) else cell for cell in cells)
        writer.writerow([shown, row["score"], *(scores.get(each, 0) for each in names), words])
    write_whole(file, text.getvalue().encode())


def points_of(results: Results) -> Iterator[tuple[str, float, float, str]]:
    """Each test's name, points, most points, and words."""
    for test in results["tests"]:
        yield test["name"], test["score"], test["max_score"], test["output"]
