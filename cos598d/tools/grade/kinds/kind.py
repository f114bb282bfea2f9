"""What every kind of assignment says: its keys, the claims that it can score, and how it judges a submission."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from cos598d.records.kinds import TEXT, ListOf, Number
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable

MOST_RANKS = 16


class AssignmentKind(ABC):
    """One kind of assignment, with the values of its keys.

    file  the file that a submission must have
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
    def claims(self) -> Mapping[str, bool]:
        """All claims that can be scored, in order, and whether each is where the assignment does not name it."""

    @abstractmethod
    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """What becomes of these claims for the submission whose file lies in `folder`.

        Called in a process of its own, into which no code of the submission may be loaded, in a scratch folder.
        """


def take_file(table: TomlTable, default: str) -> str:
    """The key `file`: a Python file's name, or its path in the submission. Raises UsageError."""
    name = table.take("file", TEXT, default)
    path = PurePosixPath(name)
    if path.suffix != ".py" or path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise table.error("file", f"file is {name!r}. Give a Python file's name, as {default}")
    return str(path)


def take_sizes(table: TomlTable, default: list[int], least: int) -> tuple[int, ...]:
    """The key `world_sizes`: numbers of ranks from `least`, each once, in order. Raises UsageError."""
    rank_number = Number(f"a number of ranks from {least} to {MOST_RANKS}", least=least, most=MOST_RANKS, is_whole=True)
    return tuple(sorted(set(table.take("world_sizes", ListOf(rank_number, least=1), default))))


def take_seconds(table: TomlTable, default: float, most: float = 9999) -> float:
    """The key `seconds`: above 0, and at most so many. Raises UsageError."""
    return float(table.take("seconds", Number("a number above 0", least=0, most=most, is_above=True), default))


def all_alike(claims: Sequence[str], passed: bool | None, words: str) -> Iterator[Judged]:
    """The same of every claim."""
    for name in claims:
        yield Judged(name, passed, words)
