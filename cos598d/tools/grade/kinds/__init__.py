"""The kinds of assignments, one file each: `kind = "NAME"` in an assignment's file chooses one."""

from cos598d.tools.grade.kinds.kind import AssignmentKind
from cos598d.tools.grade.kinds.lesson import LessonKind
from cos598d.tools.grade.kinds.script import ScriptKind
from cos598d.tools.grade.kinds.sync import SyncKind
from cos598d.tools.grade.kinds.tests import TestsKind

KINDS: dict[str, type[AssignmentKind]] = {
    "sync": SyncKind,
    "script": ScriptKind,
    "lesson": LessonKind,
    "tests": TestsKind,
}
