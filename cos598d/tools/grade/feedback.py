"""A page for each student: every test, what was expected, what was found and on which line, and the picture."""

import base64
import hashlib
import html
import re
from pathlib import Path

from cos598d.errors import UserError
from cos598d.terminal.files import own_folder, write_whole
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain
from cos598d.tools.grade.assignment import Assignment
from cos598d.tools.grade.grades import Graded
from cos598d.tools.grade.handed_in import plain_files
from cos598d.tools.grade.scored import Scored, hint_lines, most, number

MOST_BYTES = 1 << 20  # of a file that a line is taken from
MOST_LINES = 3  # of a test
LONGEST, LONGEST_LINE = 20_000, 200  # characters
PLACE = re.compile(r"(?<![\w./-])([\w./-]+\.py) line (\d{1,6})\b")
YOUR_CODE = "Your code at that line. If results are wrong, it is the last call before them:"
# No script runs and nothing is loaded, whatever text of a submission is in the page.
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body{{font:16px sans-serif;max-width:50em;margin:auto;padding:1em}}pre{{white-space:pre-wrap;background:#eee;
color:#111;padding:.5em}}img{{max-width:100%}}</style></head><body>
"""


def write_feedback(folder: Path, graded: Graded, source: Path, assignment: Assignment) -> None:
    """Write the student's page to `folder`, complete or not at all. Raises UserError."""
    name = graded.result.name.removesuffix(".py")
    if name != graded.result.name and (source.parent / name).exists():  # another submission
        name = graded.result.name
    try:
        own_folder(folder)
        write_whole(folder / page_name(name), page(graded, source, assignment))
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}). Give --feedback another folder.") from None


def page_name(name: str) -> str:
    """The page's file name; of a name that could mean something else in a link or a path, with a digest."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}", name):
        return f"{name}.html"
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60]
    return f"{plain}-{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:8]}.html"


def page(graded: Graded, source: Path, assignment: Assignment) -> str:
    """The page as HTML. Text from a submission is escaped in it, and pictures are images, which run no script."""
    result, student = graded.result, graded.student
    who = student.name or student.id if student else result.name
    title = f"{assignment.title}: {who}"
    score = f"{number(graded.points)} of {number(most(graded.scored))} points"
    parts = [HEAD.format(title=_clean(title)), f"<h1>{_clean(title)}</h1>", f"<p><b>{score}</b></p>"]
    if graded.days_late:
        days = f"{graded.days_late} day{'s' if graded.days_late > 1 else ''} late"
        cost = f": {number(graded.late_points)} points less" if graded.late_points else "; no points to lose"
        parts.append(f"<p>{days}{cost}</p>")
    if result.end.remark:
        parts.append(f"<p>{_clean(result.end.remark)}</p>")
    for each in graded.scored:
        parts += [] if each.is_of_hint else _test(each, assignment.kind.expected(each.name), source)
    parts += [f"<p>{_clean(line)}</p>" for line in hint_lines(graded.scored)]
    for caption, svg in result.end.pictures:
        image = base64.b64encode(svg.encode(errors="replace")).decode()
        parts.append(f'<h2>{_clean(caption)}</h2><img alt="{_clean(caption)}" src="data:image/svg+xml;base64,{image}">')
    if result.end.printed:
        parts.append(f"<h2>What it printed last</h2><pre>{_clean(result.end.printed)}</pre>")
    about = f"Graded {result.graded}, assignment {assignment.version}"
    commit = f", commit {graded.handed_in.commit}" if graded.handed_in.commit else ""
    return "\n".join([*parts, f"<p><small>{_clean(about + commit)}</small></p></body></html>\n"])


def _test(scored: Scored, expected: str, source: Path) -> list[str]:
    points = f"{number(scored.points)} of {number(scored.most)}"
    parts = [f"<h2>{_clean(scored.name)}: {scored.status} ({points})</h2>", f"<p>Expected: {_clean(expected)}</p>"]
    if not scored.passed or scored.points < scored.most:
        parts.append(f"<pre>{_clean(scored.words)}</pre>")
        lines = [_clean(line) for line in lines_named(scored.words, source)]
        parts += [f"<p>{YOUR_CODE}</p>", f"<pre>{'<br>'.join(lines)}</pre>"] if lines else []
    return parts


def lines_named(words: str, source: Path) -> list[str]:
    """The lines of the submission that `words` name as "FILE line N", each with its place; at most MOST_LINES."""
    found: list[str] = []
    for file, line in dict.fromkeys(PLACE.findall(words)):
        try:
            (path,) = [path for path in plain_files(source) if source.is_file() or path.name == Path(file).name]
            lines = read_plain(path, MOST_BYTES, follows=False).decode(errors="replace").split("\n")
        except (OSError, ValueError):  # not one file of this name
            continue
        if 0 < int(line) <= len(lines) and len(found) < MOST_LINES:
            found.append(f"{file} line {line}: {printable(lines[int(line) - 1].strip(), LONGEST_LINE)}")
    return found


def _clean(text: str) -> str:
    """Text from anywhere, escaped for HTML."""
    return html.escape(printable(text, LONGEST, keep="\n"))
