"""Lessons' files as students write them: right ones that look unlike the answer, and wrong ones, by lesson.

RIGHT has a name and the code. WRONG has a name, the code, and what the first line that is printed must say. `#!` is
at the end of the line that it must name. Most files are changes of the answer; the book shows some of the wrong ones.
"""

from pathlib import Path

import audit_scripts

from cos598d.tools.course import get_lesson

SHOWN = Path(__file__).resolve().parents[2] / "docs" / "lessons" / "wrong"


def part_of(number, begin, end=None):
    """The text of the lesson's answer from `begin` up to `end`, or to where it ends."""
    answer = get_lesson(number).answer()
    start = answer.index(begin)
    return answer[start : answer.index(end, start) if end else None]


def changed(number, changes):
    """The answer of the lesson with each (old, new) of `changes` made."""
    return audit_scripts.changed(get_lesson(number).answer(), changes)


def all_right(number, cases):
    """Cases by name, as files."""
    return {name: changed(number, changes) for name, changes in cases.items()}


def all_wrong(number, cases):
    """Cases by name, as files with what the check must print, and on which numbers of ranks if not on the lesson's first.

    A case has changes, or the name of a wrong file that the book shows.
    """
    return {
        name: ((SHOWN / code).read_text() if isinstance(code, str) else changed(number, code), *words)
        for name, (code, *words) in cases.items()
    }
