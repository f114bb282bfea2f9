"""A page of the book as text: its blocks, which commands fill, what stands between them, and the page again.

A block begins with a comment that says how it is made, and ends with another; each stands on lines of its own:

    <!-- book: output learn 3 --check docs/lessons/wrong/lesson3.py.txt -->
    <!-- book: picture ring.svg picture --sync ring -o alt="A ring of four ranks" -->
    <!-- book: bench flat bench --sync ring,flat --rounds 8 cluster="--hosts 4 --rate 1gbit" -->
    <!-- book: end -->

After the kind (and the name of a picture's file or a bench's record) come the words behind `cos598d`, as a
shell reads them. Words of the comment itself, wherever they stand: `alt="..."` of a picture; `cluster="..."`, the words
of `cluster run` on whose hosts the command runs; `exit=2`, the exit code that an output ends with where it is none of
0 and 1. In fenced code a comment is an example, and no block.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from cos598d.errors import UserError

OUTPUT, PICTURE, BENCH = KINDS = ("output", "picture", "bench")
FIGURES = "figures"  # the folder of pictures, beside the pages
PROGRAM = ("cos598d",)
FORM = ".svg"
# Which kinds take a comment's own words.
OPTIONS = {"alt": (PICTURE,), "cluster": KINDS, "exit": (OUTPUT,)}
END = "end"
COMMENT = re.compile(r"[ \t]*<!--\s*book:")
WHOLE = re.compile(r"<!--\s*book:(?P<words>(?:(?!-->).)*)-->[ \t]*\n?", flags=re.DOTALL)
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})")
NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Block:
    """What a command fills.

    line      of the page, from 1, on which its first comment begins
    comment   that comment as it stands; closing: the other one
    kind      one of KINDS
    name      of a picture's file or a bench's record; "" for an output
    words     the command's, behind `cos598d`
    options   the comment's own words by name
    inside    what stands between the comments
    """

    line: int
    comment: str
    kind: str
    name: str
    words: tuple[str, ...]
    options: dict[str, str] = field(hash=False)
    inside: str = ""
    closing: str = ""

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """How its command may end: a check of a wrong file ends with 1."""
        if "exit" in self.options:
            return (int(self.options["exit"]),)
        return (0,) if self.kind == BENCH else (0, 1)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The words of `cluster run`; none where the command runs here."""
        return tuple(shlex.split(self.options.get("cluster", "")))

    def filled(self, content: str) -> "Block":
        """The same block with `content` between its comments."""
        return replace(self, inside=f"\n{content}\n\n")


def read_page(text: str, name: str) -> list[str | Block]:
    """The page in parts, which joined by `page_text` are the text again.

    Raises UserError, with the page's name and line, for a comment that is no block's.
    """
    lines = text.splitlines(keepends=True)
    parts: list[str | Block] = []
    opened: Block | None = None
    done = 0
    for first, behind, words in _comments(lines, name):
        between = "".join(lines[done:first])
        comment = "".join(lines[first:behind])
        where = f"{name} line {first + 1}"
        if words == [END]:
            if opened is None:
                raise UserError(f"{where}: no block is open that could end here: take this comment out.")
            parts.append(replace(opened, inside=between, closing=comment))
            opened = None
        elif opened is not None:
            raise UserError(
                f"{where}: a block begins within that of line {opened.line}: end that one first, by <!-- book: end -->."
            )
        else:
            parts.append(between)
            opened = _block(words, first + 1, comment, where)
        done = behind
    if opened is not None:
        raise UserError(f"{name} line {opened.line}: this block has no end: put <!-- book: end --> behind it.")
    return [*parts, "".join(lines[done:])]


def page_text(parts: Sequence[str | Block]) -> str:
    """The page whose parts these are."""
    return "".join(part if isinstance(part, str) else part.comment + part.inside + part.closing for part in parts)


def _comments(lines: Sequence[str], name: str) -> Iterator[tuple[int, int, list[str]]]:
    """Of each comment of the book the first line, the line behind it, both from 0, and its words."""
    fence, place = "", 0
    while place < len(lines):
        first, line = place, lines[place]
        place += 1
        if fence:
            closes = line.strip()
            fence = "" if closes.startswith(fence) and not closes.strip(fence[0]) else fence
        elif found := FENCE.match(line):
            fence = found[1]
        elif COMMENT.match(line):
            where = f"{name} line {first + 1}"
            while "-->" not in lines[place - 1]:
                if place == len(lines):
                    raise UserError(f"{where}: this comment has no end: close it by -->.")
                place += 1
            whole = WHOLE.fullmatch("".join(lines[first:place]))
            if whole is None:
                raise UserError(f"{where}: a comment of the book begins its line, and nothing stands behind its -->.")
            yield first, place, _split(whole["words"], where)


def _split(words: str, where: str) -> list[str]:
    try:
        return shlex.split(" ".join(words.split()))
    except ValueError as error:
        raise UserError(f"{where}: its words cannot be told apart ({error}): close every quotation mark.") from None


def _block(words: Sequence[str], line: int, comment: str, where: str) -> Block:
    """The block that these words of its comment describe. Raises UserError, which begins with `where`."""
    kind, *rest = words or [""]
    if kind not in KINDS:
        raise UserError(f"{where}: {kind or 'nothing'} is no kind of block: the known ones are {', '.join(KINDS)}.")
    options: dict[str, str] = {}
    command = []
    for word in rest:
        key, mark, value = word.partition("=")
        if not mark or key not in OPTIONS:
            command.append(word)
        elif key in options:
            raise UserError(f"{where}: {key}= is given twice: give it once.")
        elif kind not in OPTIONS[key]:
            raise UserError(f"{where}: {key}= is for {' and '.join(OPTIONS[key])}: take it out of this {kind}.")
        else:
            options[key] = value
    name = "" if kind == OUTPUT or not command else command.pop(0)
    if kind != OUTPUT and not NAME.fullmatch(name):
        raise UserError(f"{where}: {name or 'nothing'} is no name of a {kind}: give a plain one, without a folder.")
    if kind == PICTURE and not name.endswith(FORM):
        raise UserError(f"{where}: {name}: a picture's name ends in {FORM}.")
    if kind == PICTURE and not options.get("alt"):
        raise UserError(f'{where}: {name} has no words for who cannot see it: say what it shows, by alt="...".')
    if "exit" in options and not options["exit"].isdecimal():
        raise UserError(f"{where}: exit={options['exit']}: give the command's exit code as a number.")
    if not command:
        raise UserError(f"{where}: it has no command: write the words behind `{shlex.join(PROGRAM)}`.")
    for word in command:
        if outside := next((part for part in named(word) if _leaves(part)), None):
            raise UserError(f"{where}: {outside} is outside the repository: name its files from its root on.")
    _split(options.get("cluster", ""), where)
    return Block(line, comment, kind, name, tuple(command), options)


def named(word: str) -> list[str]:
    """The parts of a command's word that may be paths: of "a.py:Mine,ring" and "--flag=a.py" too."""
    return [part for part in re.split("[,:=]", word) if part]


def _leaves(path: str) -> bool:
    return path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts
