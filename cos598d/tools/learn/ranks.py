"""What grading a lesson does on each rank: the student's code runs here, and never in the grader's process."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.tools.check.evidence import Evidence, Nonce
from cos598d.tools.check.notes import CHECK
from cos598d.tools.check.ranks import MOST_DIRECT_CALLS
from cos598d.tools.check.trace import trace_direct_calls
from cos598d.tools.learn import student
from cos598d.tools.learn.checking import OnLesson
from cos598d.tools.learn.comm import LessonCommunicator
from cos598d.tools.learn.lessons import get_lesson
from cos598d.tools.learn.picture.probe import RECORD


def observe(comm: Communicator, path: str, number: int, names: Sequence[str], secret: list[int]) -> None:
    """Drive the file at `path` for these checks of a lesson, and hand in, after each, what came of all so far.

    `secret` has the trial's nonce. It is emptied, so that no frame above the file's has it.
    """
    nonce = Nonce(secret.pop(), comm.rank)
    direct: list[str] = []
    trace_direct_calls(direct.append)  # before the file is loaded, which may keep functions under names of its own
    lesson = get_lesson(number)
    checks = lesson.load_checks()
    claims = {check.name: check.claim for check in checks.checks}
    if checks.record:
        claims[RECORD] = checks.record
    if checks.golf:
        claims[checks.golf.check.name] = checks.golf.check.claim
    is_without = comm.rank in checks.without_file
    module = ModuleType("no file") if is_without else student.load(path, lesson, comm.rank)
    own = LessonCommunicator(comm, path)
    evidence = Evidence(comm.rank, nonce)
    make_sync = checks.sync_of(module)
    for name in names:
        own.notes.write(CHECK, name)
        with tempfile.TemporaryDirectory() as of_check:
            claims[name].observe(OnLesson(name, module, make_sync, own, evidence, Path(of_check)))
        own.ledger = Ledger()
        evidence.report("", "direct calls", list(direct)[:MOST_DIRECT_CALLS])
        evidence.hand_in()
