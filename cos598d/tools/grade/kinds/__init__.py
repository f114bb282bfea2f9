"""What every kind of assignment has: its keys, the claims that it can score, and its judgement of a submission.

An assignment of several parts has a kind for each."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from cos598d.errors import UserError
from cos598d.records.kinds import TEXT, ListOf, Number
from cos598d.terminal.printable import printable
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable
from cos598d.tools.learn.progress import GolfScore

MOST_RANKS = 16
Golfed = tuple[GolfScore, GolfScore]  # a submission's, and the answer's, measured in turn


class AssignmentKind(ABC):
    """One kind of assignment, with the values of its keys.

    file  the file that a submission must have; "": none
    keys  the keys that this kind takes from an assignment's file
    hides the folders of this package whose content submissions must not find
    """

    file: str
    keys: tuple[str, ...] = ()
    hides: tuple[Path, ...] = ()

    @classmethod
    @abstractmethod
    def read(cls, table: TomlTable) -> "AssignmentKind":
        """Take this kind's keys. Raises UsageError for a value that cannot work."""

    @abstractmethod
    def claims(self) -> Mapping[str, float]:
        """All claims that can be scored, in order. The value is whether an assignment that does not name the claim
        scores it; or the points that it then gives, if these are not the assignment's default."""

    @abstractmethod
    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """The verdicts on these claims, for the submission whose file is in `folder`.

        Called in a process of its own, which must not load the submission's code, and in a scratch folder.
        """

    def expected(self, claim: str) -> str:
        """What a submission must do to pass this claim, in a sentence."""
        return claim.replace("_", " ")

    def given(self) -> str:
        """The Python source with which every submission begins; "" if there is none."""
        return ""

    def golf(self, folder: Path, failed: Sequence[str], answer: str) -> Golfed | None:
        """The bytes and seconds of a submission, measured in turn with those of `answer`, which is Python source.
        `failed` are the claims that it did not pass. None if nothing is measured."""
        return None

    def pictures(self, folder: Path) -> Iterator[tuple[str, str]]:
        """Titles and SVGs of what the submission does. They are drawn in the process that judges it, after `judge`."""
        yield from ()


def folder_with(root: Path, file: str) -> Path:
    """The only folder within `root`, which holds a submission, that has this file. Raises UserError."""
    if (root / file).is_file():
        return root
    folders = [Path(folder) for folder, _, _ in os.walk(root)]
    found = sorted(folder for folder in folders if (folder / file).is_file())
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(printable(folder.relative_to(root), 60) for folder in found[:3])
        raise UserError(f"the submission has {file} in several folders ({where}). Hand in one.")
    there = sorted(printable(path.name, 60) for folder in folders for path in folder.glob("*.py") if path.is_file())[:5]
    raise UserError(
        f"the submission has no {file}"
        + (f", but {', '.join(there)}. Name the file {file}." if there else f" and no other .py file. Hand in {file}.")
    )


def take_file(table: TomlTable, default: str) -> str:
    """The key `file`: a Python file's name, or its path in the submission. Raises UsageError."""
    name = table.take("file", TEXT, default)
    path = PurePosixPath(name)
    is_hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)  # no submission's files
    if path.suffix != ".py" or path.is_absolute() or is_hidden or "\\" in name or not name.isprintable():
        raise table.error("file", f"file is {name!r}. Give a Python file's name, as {default}")
    return str(path)


def take_sizes(table: TomlTable, default: list[int], least: int) -> tuple[int, ...]:
    """The key `world_sizes`: numbers of ranks from `least`, each once, in order. Raises UsageError."""
    rank_number = Number(f"a number of ranks from {least} to {MOST_RANKS}", least=least, most=MOST_RANKS, is_whole=True)
    return tuple(sorted(set(table.take("world_sizes", ListOf(rank_number, least=1), default))))


def take_seconds(table: TomlTable, default: float, most: float = 9999) -> float:
    """The key `seconds`: above 0, and at most `most`. Raises UsageError."""
    return float(table.take("seconds", Number("a number above 0", least=0, most=most, is_above=True), default))


def all_alike(claims: Sequence[str], passed: bool | None, words: str) -> Iterator[Judged]:
    """The same verdict on every claim."""
    for name in claims:
        yield Judged(name, passed, words)


@dataclass(frozen=True)
class PartsKind(AssignmentKind):
    """The parts by name. Their tests are called `PART.TEST`."""

    parts: Mapping[str, AssignmentKind]

    file = ""  # a part without its file gets no points, and the others are judged

    @property
    def hides(self) -> tuple[Path, ...]:  # type: ignore[override]
        """The folders that any part hides."""
        return tuple(dict.fromkeys(folder for kind in self.parts.values() for folder in kind.hides))

    @classmethod
    def read(cls, table: TomlTable) -> "PartsKind":
        """Not used: `read_assignment` reads the parts one by one."""
        raise NotImplementedError

    def claims(self) -> Mapping[str, float]:
        """All parts' claims."""
        return {
            f"{name}.{claim}": is_scored
            for name, kind in self.parts.items()
            for claim, is_scored in kind.claims().items()
        }

    def expected(self, claim: str) -> str:
        """As the claim's part says it."""
        name, _, own = claim.partition(".")
        return self.parts[name].expected(own)

    def given(self) -> str:
        """The sources that the parts give, one after another."""
        return "\n".join(kind.given() for kind in self.parts.values())

    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """Judge one part after another, each in a scratch folder of its own."""
        scratch = Path.cwd()
        for name, kind in self.parts.items():
            own = [claim.partition(".")[2] for claim in claims if claim.partition(".")[0] == name]
            place = scratch / f"part-{name}"
            place.mkdir(exist_ok=True)
            os.chdir(place)
            try:
                judged = kind.judge(folder_with(folder, kind.file), own) if own else iter(())
            except UserError as error:
                judged = all_alike(own, False, str(error))
            yield from (replace(each, name=f"{name}.{each.name}") for each in judged)
        os.chdir(scratch)

    def pictures(self, folder: Path) -> Iterator[tuple[str, str]]:
        """The pictures of all parts whose file exists."""
        for kind in self.parts.values():
            try:
                yield from kind.pictures(folder_with(folder, kind.file))
            except UserError:
                continue
