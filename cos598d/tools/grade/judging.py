"""The process that judges one submission: it starts what runs the submission's code, runs none of it itself, and
tells the grader what became of each claim through a socket that those processes do not have."""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from cos598d.errors import one_line
from cos598d.terminal.program import own_python_path
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.tools.check.supervisor import SET_PARENT_DEATH_SIGNAL, prctl
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.processes import hide_this_process, limit_this_process
from cos598d.tools.grade.rights import NOBODY, OwnNamespaces, User, hide
from cos598d.tools.grade.scored import Judged

LONGEST = 20_000  # characters of the text on one claim
MOST_PICTURE = 400_000  # characters
# Of this process's environment a submission gets these, and what its assignment names.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE")


@dataclass(frozen=True)
class JudgingPlace:
    """Where a submission is judged: the copy of its files in `folder`, within `scratch`; `user` is whose rights its
    processes have (None: the grader's), and `apart` keeps them from others' (None: nothing does). With `is_drawn`
    pictures are drawn too, and what passes is measured in turn with `answer`, a lesson's ("": it is not)."""

    folder: Path
    scratch: Path
    user: User | None
    apart: OwnNamespaces | None = None
    is_drawn: bool = False
    answer: str = ""


def be_judge(assignment: Assignment, place: JudgingPlace, line: socket.socket, output: int) -> NoReturn:
    """In a fork of the grader: judge the submission, send each claim as a line of JSON, and exit."""
    status = 1
    folder = place.folder
    try:
        if place.apart:
            place.apart.enter(place.scratch, place.user)
        _leave_the_grader(assignment, place, output)
        with exits_on_sigterm():
            failed = []
            for judged in assignment.kind.judge(folder, list(assignment.points)):
                failed += [] if judged.passed else [judged.name]
                words = _without_folder(judged.words, folder)[:LONGEST]
                _send(line, {"name": judged.name, "passed": judged.passed, "words": words})
            _send(line, {"over": True})
            status = 0
            if place.answer and (golf := assignment.kind.golf(folder, failed, place.answer)):
                _send(line, {"golf": msgspec.to_builtins(golf)})
            for title, svg in assignment.kind.pictures(folder) if place.is_drawn else ():
                if len(svg) < MOST_PICTURE:
                    _send(line, {"title": title, "picture": svg})
    except BaseException as error:
        with contextlib.suppress(Exception):
            traceback.print_exc()
            _send(line, {"error": f"{type(error).__name__}: {one_line(error)}"[:LONGEST]})
    finally:
        os._exit(status)


def heard(data: bytes) -> dict[str, object]:
    """A line of the judge as an object. Raises ValueError for one that no judge has written."""
    said = json.loads(data)
    if not isinstance(said, dict):
        raise ValueError("no object")
    return said


def judged_of(said: dict[str, object]) -> Judged:
    """The judged claim in a line. Raises ValueError."""
    name, passed, words = said.get("name"), said.get("passed"), said.get("words")
    if not isinstance(name, str) or not isinstance(words, str) or not (passed is None or isinstance(passed, bool)):
        raise ValueError("no claim")
    return Judged(name, passed, words)


def _leave_the_grader(assignment: Assignment, place: JudgingPlace, output: int) -> None:
    """Become a process of its own: session, rights, streams, environment, folders and limits."""
    scratch, user = place.scratch, place.user
    os.setsid()
    grader = os.getppid()
    (scratch / "nothing").mkdir()
    hide(assignment.kind.hides, scratch / "nothing")
    if user:  # first, since the kernel forgets the next one when a process becomes another user's
        user.become()
    # SIGTERM, so that what it has started is ended too.
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != grader:
        os._exit(1)
    hide_this_process()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, os.fdopen(number, "w", 1, encoding="utf-8", errors="replace", closefd=False))
    environ = {name: os.environ[name] for name in (*PASSED_ON, *assignment.environment) if name in os.environ}
    own = {"HOME": scratch / "home", "TMPDIR": scratch / "tmp", "COS598D_CACHE": scratch / "cache"}
    for folder in own.values():
        folder.mkdir(exist_ok=True)
    environ |= {name: str(folder) for name, folder in own.items()}
    if place.apart and user:
        environ |= {"USER": NOBODY, "LOGNAME": NOBODY}  # this user has no entry with a name
    environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.environ.pop("PYTHONPATH", None)
    environ["PYTHONPATH"] = own_python_path()
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    os.chdir(scratch)
    limit_this_process(assignment.limits)


def _send(line: socket.socket, said: dict[str, object]) -> None:
    line.sendall(json.dumps(said).encode() + b"\n")


def _without_folder(words: str, folder: Path) -> str:
    """The text with paths as they are in the submission."""
    for place in (str(folder), os.path.relpath(folder)):
        words = words.replace(place + os.sep, "")
    return words
