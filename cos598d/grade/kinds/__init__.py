"""The kinds of assignments, one file each: `kind = "NAME"` in an assignment's file chooses one."""

from cos598d.grade.kinds.kind import Kind
from cos598d.grade.kinds.lesson import LessonKind
from cos598d.grade.kinds.script import ScriptKind
from cos598d.grade.kinds.sync import SyncKind
from cos598d.grade.kinds.tests import TestsKind

KINDS: dict[str, type[Kind]] = {"sync": SyncKind, "script": ScriptKind, "lesson": LessonKind, "tests": TestsKind}
