"""One submission, graded on a copy of its files, in processes of its own, within its limits; none of them stays."""

import contextlib
import errno
import os
import select
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cos598d.errors import UsageError, UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.signals import signal_name
from cos598d.terminal.words import number_of
from cos598d.tools.check.supervisor import ProcessTree
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.handed_in import plain_files
from cos598d.tools.grade.judging import JudgingPlace, be_judge, heard, judged_of
from cos598d.tools.grade.kinds import Golfed, folder_with
from cos598d.tools.grade.processes import (
    hide_this_process,
    megabytes_in,
    orphans_come_here,
    remove_left_folders,
    scratch_base,
    scratch_folder,
)
from cos598d.tools.grade.rights import NOBODY, OwnNamespaces, hide, needed_by, user_for, what_stops
from cos598d.tools.grade.scored import Judged

POLL_SECONDS = 0.1
LOOK_SECONDS = 0.3  # how often its processes are counted
WEIGH_SECONDS = 1.5  # how often its files are
OUTPUT_BYTES = 20_000  # of what it prints, the end is kept
MOST_LINE_BYTES = 1 << 20
MOST_FILES = 10_000
LAST_LINES = 8


@dataclass(frozen=True)
class SubmissionEnd:
    """How grading a submission ended: `otherwise` is what that means for claims that were not judged, and `remark`
    ("": nothing) what there is to say of it. `printed` is the end of what the submission printed, and `pictures` are
    titles and SVGs of what it does, `golf` its scores for a board."""

    otherwise: Judged
    remark: str = ""
    printed: str = ""
    pictures: tuple[tuple[str, str], ...] = ()
    golf: Golfed | None = None

    @property
    def is_final(self) -> bool:
        """Whether grading it again would give the same; not if the judge was ended or failed."""
        return self.otherwise.passed is not None or not self.remark


class Grader:
    """Grades the submissions of an assignment, one after the other. `remark` says in a sentence ("": nothing) why they
    have more rights than they should have. With the `answer` of a lesson, submissions that pass are measured.

    Needs fork: Linux, or another Unix. Made by `grading`.
    """

    def __init__(
        self,
        assignment: Assignment,
        as_root: bool,
        is_parallel: bool = False,
        is_drawn: bool = False,
        answer: str = "",
    ):
        self._assignment = assignment
        self._tree = ProcessTree()
        self._apart: OwnNamespaces | None = None
        self._is_drawn, self._answer = is_drawn, answer
        needed = needed_by(assignment)
        self._user, self.remark = user_for([*needed, scratch_base()])
        if self.remark and os.geteuid() == 0 and not as_root:
            raise UsageError(
                f"{self.remark} Let the user {NOBODY} read it (chmod o+rX; the next try names the next "
                "folder), use a Python that all users can read, or give --as_root in a container with nothing to lose."
            )
        if is_parallel:
            apart = self._apart = OwnNamespaces(tuple(needed))
            why = what_stops(lambda empty: apart.enter(empty, None))
            if why:
                raise UsageError(
                    f"--parallel cannot keep submissions apart here: {why}. Leave it out, or grade on a machine that "
                    "allows namespaces."
                )
            if apart.shared:
                places = " and ".join(map(str, apart.shared))
                self.remark += f" Submissions share {places}, which has Python, a package or data of the assignment."
        hidden = assignment.kind.hides
        why = what_stops(lambda empty: hide(hidden, empty)) if hidden else ""
        if why:
            raise UsageError(
                f"Submissions could read the answers in {', '.join(map(str, hidden))}, since {why}. "
                "Delete these folders, which grading does not need, or grade on a machine that allows mount namespaces."
            )

    def take_slot(self, slot: int) -> None:
        """From now on this process grades at the same time as others, each in a slot of its own."""
        self._tree = ProcessTree()
        if self._apart:
            self._apart = replace(self._apart, slot=slot)
            self._user = self._apart.user(self._user)

    def grade(self, source: Path, tell: Callable[[Judged], None]) -> SubmissionEnd:
        """Grade the submission in `source`, a folder or a file; `tell` is called with each claim once it is judged.

        Raises UserError if this machine cannot do it.
        """
        self._tree.begin()
        with scratch_folder() as scratch:
            try:
                folder = _copied(source, scratch / "submission", self._assignment)
            except UserError as error:
                return SubmissionEnd(Judged("", False, str(error)), str(error))
            except OSError as error:
                raise UserError(
                    f"{scratch.parent} has no room for a submission ({error.strerror}). Make room, or set TMPDIR to "
                    "another folder."
                ) from None
            if self._user:
                self._user.take(scratch)
            place = JudgingPlace(folder, scratch, self._user, self._apart, self._is_drawn, self._answer)
            return _Judgement(self._assignment, place, self._tree, tell).end()


@contextlib.contextmanager
def grading(
    assignment: Assignment,
    as_root: bool = False,
    is_parallel: bool = False,
    is_drawn: bool = False,
    answer: str = "",
) -> Iterator[Grader]:
    """A `Grader`, to which all belongs that is started within the block. This process stays hidden afterwards.

    Raises UsageError where submissions would be root, unless `as_root` allows it, or could read a lesson's answers, or
    would meet each other where they are judged at the same time.
    """
    hide_this_process()
    remove_left_folders()
    with orphans_come_here():
        yield Grader(assignment, as_root, is_parallel, is_drawn, answer)


def _copied(source: Path, target: Path, assignment: Assignment) -> Path:
    """Copy the submission, and return the folder of the copy that the assignment's file is in. Raises UserError for
    what the submission is, and OSError where the disk is full."""
    wanted = assignment.kind.file
    try:
        files = plain_files(source)
        _check_size(files, assignment)
        target.mkdir()
        for file in files:
            place = target / (file.relative_to(source) if source.is_dir() else wanted or source.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"the submission cannot be read ({error.strerror}).") from None
    return folder_with(target, wanted) if wanted else target


def _check_size(files: list[Path], assignment: Assignment) -> None:
    most = assignment.limits.disk_mb // 2
    megabytes = sum(file.stat().st_size for file in files) / (1 << 20)
    if len(files) > MOST_FILES or megabytes > most:
        raise UserError(
            f"the submission has {number_of(len(files), 'file')} of {megabytes:.0f} MB in all. "
            f"Hand in at most {MOST_FILES:,} files of {most} MB in all."
        )


class _Judgement:
    """A submission's judge at work, as the grader sees it."""

    def __init__(
        self,
        assignment: Assignment,
        place: JudgingPlace,
        tree: ProcessTree,
        tell: Callable[[Judged], None],
    ):
        self._assignment, self._limits = assignment, assignment.limits
        self._place, self._tree, self._tell = place, tree, tell
        self._is_over = False
        self._pictures: list[tuple[str, str]] = []
        self._golf: Golfed | None = None
        self._error = ""
        self._said, self._heard = b"", b""

    def end(self) -> SubmissionEnd:
        """Start the judge, wait for its end or the submission's, and end whatever is left."""
        ours, its = socket.socketpair()
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        sys.stdout.flush()
        sys.stderr.flush()
        tree = self._tree
        pid = os.fork()
        if pid == 0:
            be_judge(self._assignment, self._place, its, writes)
        its.close()
        os.close(writes)
        try:
            stopped = self._watch(ours, reads)
        finally:
            is_clean = tree.end()
            with contextlib.suppress(ChildProcessError):  # tree.end may have come first
                tree.exit_codes.setdefault(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            self._drain(reads)
            ours.close()
            os.close(reads)
        printed = "\n".join(self._said.decode(errors="replace").splitlines()[-LAST_LINES:])
        if self._is_over:  # only golf or a picture was left
            stopped = ""
        remark = stopped or self._how_it_failed(tree.exit_codes.get(pid))
        left = Judged("", False if stopped else None, remark)
        if not is_clean:
            remark = f"{remark} Some processes could not be ended.".strip()
        printed = printable(printed, OUTPUT_BYTES, keep="\n")
        return SubmissionEnd(left, remark, printed, tuple(self._pictures), self._golf)

    def _watch(self, line: socket.socket, output: int) -> str:
        """Read the judge's lines until it ends, or the submission exceeds a limit; returns which one ("": none)."""
        began = looked = weighed = time.monotonic()
        streams: list[int] = [line.fileno(), output]
        while line.fileno() in streams:
            ready, _, _ = select.select(streams, [], [], POLL_SECONDS)
            if output in ready and not self._drain(output):
                streams.remove(output)
            if line.fileno() in ready and not self._hear(_received(line)):
                return ""
            now = time.monotonic()
            if now - began > self._limits.seconds_in_all:
                most_seconds = f"{self._limits.seconds_in_all:g} s"
                return f"It took more than {most_seconds} and was ended. The remaining tests give no points."
            if now - looked > LOOK_SECONDS:
                processes = self._tree.processes()
                self._tree.reap(processes)
                looked = time.monotonic()
                if len(self._tree.own(processes)) > self._limits.processes:
                    most = self._limits.processes
                    return f"It started more than {most} processes and was ended. The remaining tests give no points."
            if now - weighed > WEIGH_SECONDS:
                megabytes, most = megabytes_in(self._place.scratch), self._limits.disk_mb
                weighed = time.monotonic()
                if megabytes > most:
                    return f"It wrote more than {most} MB and was ended. The remaining tests give no points."
        return ""

    def _hear(self, data: bytes) -> bool:
        """Read what the judge sends; returns whether there may be more."""
        self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        for said in map(heard, lines):
            self._is_over = self._is_over or said.get("over") is True
            self._error = self._error or str(said.get("error") or "")
            if "picture" in said:
                self._pictures.append((str(said.get("title")), str(said["picture"])))
            if "golf" in said:
                with contextlib.suppress(msgspec.ValidationError):  # forged seconds can be 0
                    self._golf = msgspec.convert(said["golf"], Golfed)
            if "name" in said:
                self._tell(judged_of(said))
        return bool(data) and len(self._heard) < MOST_LINE_BYTES

    def _drain(self, output: int) -> bool:
        """Read what the submission has printed, and keep its end; returns whether there may be more."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(output, 1 << 16)
            self._said = (self._said + data)[-OUTPUT_BYTES:]
            return bool(data)
        return True

    def _how_it_failed(self, exit_code: int | None) -> str:
        """How the judge failed, as a sentence; "" if it finished."""
        if self._is_over:
            return ""
        if self._error:
            return f"The grader itself failed ({printable(self._error, 300)}). The remaining tests could not be judged."
        how = f"exit code {exit_code}" if exit_code is None or exit_code >= 0 else signal_name(-exit_code)
        return (
            f"The process that judged it was ended ({how}), by the submission or for lack of memory. The remaining "
            "tests could not be judged, and give no points."
        )


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(1 << 16)
    except ConnectionError:  # a judge that is killed takes what it had not read with it
        return b""
