"""An assignment: which kind of submission, the points of each claim, and what a submission may use up."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cos598d.errors import UsageError
from cos598d.records.kinds import TEXT, ListOf, Number, OneOf
from cos598d.terminal.words import did_you_mean
from cos598d.tools.grade.gradescope import VISIBILITIES
from cos598d.tools.grade.kinds import KINDS
from cos598d.tools.grade.kinds.kind import AssignmentKind
from cos598d.tools.grade.scored import Judged, Scored
from cos598d.tools.grade.table import TomlTable

DEFAULT = "default"
POINTS = Number("a number of points from 0 to 1000000", least=0, most=1e6)


@dataclass(frozen=True)
class Limits:
    """What one submission may use up, its processes together unless it says otherwise."""

    seconds_in_all: float = 540.0  # Gradescope ends an autograder after 10 minutes, unless the teacher allows more
    processes: int = 100
    disk_mb: int = 1024  # in its own folders
    file_mb: int = 256  # of one file
    memory_mb: int = 8192  # of addresses, by one process


@dataclass(frozen=True)
class Assignment:
    """What is asked for. `points` are those of each claim that is scored, in the order in which they are judged;
    `environment` names the variables that a submission's processes are given."""

    title: str
    kind_name: str
    kind: AssignmentKind
    points: dict[str, float]
    visibility: str
    environment: tuple[str, ...]
    limits: Limits

    def scored(self, judged: Sequence[Judged], otherwise: Judged) -> list[Scored]:
        """What all claims give; those that were not judged are as `otherwise`, but for their names."""
        known = {each.name: each for each in judged}
        rest = {name: Judged(name, otherwise.passed, otherwise.words) for name in self.points}
        return [Scored.of((rest | known)[name], most) for name, most in self.points.items()]


def assignment_of(word: str) -> Assignment:
    """The assignment in a file, or the plain one of a kind that `word` names. Raises UsageError."""
    if word in KINDS:
        return read_assignment(TomlTable.of_text(word, f'kind = "{word}"\n'))
    if (near := did_you_mean(word, KINDS)) and not Path(word).exists():
        raise UsageError(
            f"there is no file {word}.{near} Give an assignment's TOML file, or one of {', '.join(KINDS)}."
        )
    return read_assignment(TomlTable.read(Path(word)))


def read_assignment(table: TomlTable) -> Assignment:
    """The assignment in a TOML table. Raises UsageError, with the line, for what cannot work."""
    name = table.take("kind", OneOf(tuple(KINDS)))
    if name is None:
        raise UsageError(f"{table.path} has no kind. Give one of {', '.join(KINDS)}.")
    kind = KINDS[name].read(table)
    title = table.take("title", TEXT, f"{name} assignment")
    visibility = table.take("visibility", OneOf(VISIBILITIES), VISIBILITIES[0])
    environment = tuple(table.take("environment", ListOf(TEXT), []))
    points = _points(table.table("points"), kind)
    limits = _limits(table.table("limits"))
    table.end(("title", "kind", "visibility", "environment", *KINDS[name].keys, "points", "limits"))
    return Assignment(title, name, kind, points, visibility, environment, limits)


def _points(table: TomlTable, kind: AssignmentKind) -> dict[str, float]:
    """The points of each claim that is scored: those that are named, and what the kind scores anyway."""
    default = table.take(DEFAULT, POINTS, 1)
    known = kind.claims()
    points: dict[str, float] = {}
    for name, is_scored in known.items():
        given = table.take(name, POINTS)
        found = given if given is not None else default if is_scored else 0
        if found:
            points[name] = float(found)
    table.end((DEFAULT, *known))
    if not points:
        raise table.error("points", "no test gives points. Give one of them more than 0")
    return points


def _limits(table: TomlTable) -> Limits:
    defaults = Limits()
    seconds = Number("a number of seconds above 0", least=0, most=1e6, is_above=True)
    above = Number("a whole number above 0", least=1, most=1e9, is_whole=True)
    whole = ("processes", "disk_mb", "file_mb", "memory_mb")
    found = Limits(
        float(table.take("seconds_in_all", seconds, defaults.seconds_in_all)),
        *(table.take(name, above, getattr(defaults, name)) for name in whole),
    )
    table.end(("seconds_in_all", *whole))
    return found
