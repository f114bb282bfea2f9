"""What a submission gets for one claim, and for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

# Exit codes of whatever grades one submission.
PASSED, WRONG, NOT_JUDGED = 0, 1, 2


@dataclass(frozen=True)
class Judged:
    """What became of a claim: it holds, it does not, or (None) nobody could tell. `words` say why."""

    name: str
    passed: bool | None
    words: str


@dataclass(frozen=True)
class Scored:
    """A claim with the points that it gave, of `most`. What could not be judged gives none."""

    name: str
    points: float
    most: float
    passed: bool | None
    words: str

    @classmethod
    def of(cls, judged: Judged, most: float) -> "Scored":
        """The points for what became of a claim."""
        return cls(judged.name, most if judged.passed else 0.0, most, judged.passed, judged.words)

    @property
    def status(self) -> str:
        """In a word or two."""
        return {True: "passed", False: "wrong", None: "not judged"}[self.passed]


def total(scored: Sequence[Scored]) -> float:
    """The points of all claims."""
    return sum(each.points for each in scored)


def most(scored: Sequence[Scored]) -> float:
    """The points that all claims can give."""
    return sum(each.most for each in scored)


def exit_code(scored: Sequence[Scored]) -> int:
    """PASSED where all claims hold, NOT_JUDGED where nobody could tell of one, else WRONG."""
    if any(each.passed is None for each in scored):
        return NOT_JUDGED
    return PASSED if all(each.passed for each in scored) else WRONG


def number(points: float) -> str:
    """Points as they are written: 2, 2.5."""
    return f"{points:.10g}"
