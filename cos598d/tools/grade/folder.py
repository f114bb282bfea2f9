"""A class: grade every submission in a folder, and write each result at once to a file, the table and a page."""

import contextlib
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

from cos598d.errors import UsageError, UserError, one_line
from cos598d.terminal.printable import printable
from cos598d.terminal.words import did_you_mean
from cos598d.tools.check.supervisor import SET_PARENT_DEATH_SIGNAL, prctl
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.feedback import write_feedback
from cos598d.tools.grade.grades import RESULTS, Graded, GradesTable, KeptResults, Result
from cos598d.tools.grade.handed_in import Student, digest_of, handed_in, owners
from cos598d.tools.grade.processes import orphans_come_here
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.submission import Grader

MOST_NAMES = 20  # in one line
ITEM = struct.Struct("i")  # small enough that a pipe never splits one

Work = Callable[[int, Iterator[int]], Iterator[int]]


def submissions_in(folder: Path, pages: Path | None = None) -> tuple[list[Path], list[str]]:
    """The submissions of a class, which are the folders and the Python files that lie in `folder`, and the names of all
    else in it: links, hidden files, archives, names that begin with an underscore, kept results, and the folder of
    `pages`. Raises UsageError."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror}). Give the folder of a class.") from None
    found = [
        entry
        for entry in entries
        if not entry.is_symlink()
        and entry.name[0] not in "._"
        and (entry.is_dir() or entry.suffix == ".py")
        and entry.suffix != RESULTS
        and not (pages and entry.resolve() == pages.resolve())
    ]
    passed_over = [entry.name for entry in entries if entry not in found]
    if not found:
        there = f"; it only has {names(passed_over)}" if passed_over else ""
        raise UsageError(f"{folder} has no submission. It must have a folder or a Python file for each{there}.")
    return found, passed_over


def names(found: Sequence[str]) -> str:
    """The first of these names, as one line, and how many more there are."""
    shown = ", ".join(printable(name, 40) for name in found[:MOST_NAMES])
    return shown + (f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else "")


class SubmittedClass:
    """The submissions of a class, of which some may have been graded before. `table` is the file of its table, and
    `feedback` the folder for its pages (None: no pages). Raises UsageError.

    known  the results of earlier runs, by the submission's name
    """

    def __init__(
        self,
        submissions: Sequence[Path],
        assignment: Assignment,
        table: Path,
        students: Sequence[Student] = (),
        feedback: Path | None = None,
    ):
        self._assignment, self._feedback, self._students = assignment, feedback, students
        self._sources = {path.name: path for path in submissions}
        self._owners = owners(self._sources, students)
        self._table = GradesTable(table, assignment, {*self._sources, *(student.id for student in students)})
        self._kept = KeptResults(table)
        self._digests = {name: digest_of(path) for name, path in self._sources.items()}
        results = (self._kept.get(name, assignment.digest) for name in self._sources)
        self.known = {
            result.name: result
            for result in results
            if result and result.end.is_final and result.files and result.files == self._digests[result.name]
        }

    @property
    def strangers(self) -> list[str]:
        """Submissions of nobody in the roster, if there is one."""
        return [name for name in self._sources if name not in self._owners] if self._students else []

    @property
    def absent(self) -> list[Student]:
        """Students who handed in nothing."""
        return [student for student in self._students if student not in self._owners.values()]

    def chosen(self, flag: str, names: Collection[str]) -> set[str]:
        """The submissions of these names, or of these students' ids. Raises UsageError for other names."""
        by_id = {student.id: name for name, student in self._owners.items()}
        for name in names:
            if name not in self._sources and name not in by_id:
                near = did_you_mean(name, [*self._sources, *by_id])
                raise UsageError(
                    f"{flag} {printable(name, 60)} is not a submission.{near} Give a name from the folder."
                )
        return {by_id.get(name, name) for name in names}

    def grade(
        self, names: Collection[str], grader: Grader, parallel: int, say: Callable[[Graded], None]
    ) -> list[Graded]:
        """Grade these submissions, so many at the same time; once each is known, write it down and call `say`.

        Returns all of the class that have a result then. Raises UserError.
        """
        self._table.add_missing(self.absent)
        found = [self._put(result) for name, result in self.known.items() if name not in names]
        if found or self.absent:
            self._table.write()
        for name in self._graded([name for name in self._sources if name in names], grader, parallel):
            result = self._kept.get(name, self._assignment.digest)
            if result is None:
                raise UserError(f"the result of {printable(name, 60)} cannot be read. Start the command again.")
            found.append(self._put(result))
            self._table.write()
            say(found[-1])
        return found

    def _graded(self, names: Sequence[str], grader: Grader, parallel: int) -> Iterator[str]:
        """Grade each of them and keep its result."""

        def work(slot: int, numbers: Iterator[int]) -> Iterator[int]:
            grader.take_slot(slot)
            with orphans_come_here():
                for number in numbers:
                    self._kept.keep(self._result(names[number], grader))
                    yield number

        if parallel == 1:
            yield from map(names.__getitem__, work(0, iter(range(len(names)))))
        elif names:
            with contextlib.closing(in_processes(parallel, len(names), work)) as done:
                yield from map(names.__getitem__, done)

    def _result(self, name: str, grader: Grader) -> Result:
        began = time.monotonic()
        judged: list[Judged] = []
        end = grader.grade(self._sources[name], judged.append)
        seconds = round(time.monotonic() - began, 3)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        files = self._digests[name] if digest_of(self._sources[name]) == self._digests[name] else ""
        return Result(name, files, self._assignment.digest, tuple(judged), end, seconds, now)

    def _put(self, result: Result) -> Graded:
        source = self._sources[result.name]
        graded = Graded.of(result, self._assignment, handed_in(source), self._owners.get(result.name))
        self._table.put(graded)
        if self._feedback:
            write_feedback(self._feedback, graded, source, self._assignment)
        return graded


def in_processes(count: int, items: int, work: Work) -> Generator[int, None, None]:
    """Numbers below `items`, each once a fork of this process has done it. All forks have ended afterwards.

    Fork `slot` of `count` calls `work(slot, numbers)`, which takes numbers and yields each that is done. Raises
    UserError, once the others have done the rest, where a fork ended before its time.
    """
    todo, gives = os.pipe()
    done, says = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    parent = os.getpid()
    try:
        for slot in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(gives)
                os.close(done)
                _work(work, slot, todo, says, parent)
            pids.append(pid)
        os.close(todo)
        os.close(says)
        with contextlib.suppress(BrokenPipeError):  # all have ended
            os.write(gives, b"".join(map(ITEM.pack, range(items))))
        os.close(gives)
        yield from _numbers(done)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pids.pop(), 0)[1]) for _ in range(count)]
        if any(ended):
            raise UserError(
                "a process that graded has ended early. Start the command again: it grades what is missing."
            )
    finally:
        os.close(done)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _work(work: Work, slot: int, todo: int, says: int, parent: int) -> NoReturn:
    """In a fork: work until nothing is left, and leave."""
    status = 1
    try:
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() == parent:
            for number in work(slot, _numbers(todo)):
                os.write(says, ITEM.pack(number))
            status = 0
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _numbers(line: int) -> Iterator[int]:
    while data := os.read(line, ITEM.size):
        yield ITEM.unpack(data)[0]
