"""The points of a submission for one claim, and for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

# Exit codes of whatever grades one submission.
PASSED, WRONG, NOT_JUDGED = 0, 1, 2


@dataclass(frozen=True)
class Judged:
    """The result of a claim: passed, failed, or (None) not judged. `words` are the reason."""

    name: str
    passed: bool | None
    words: str


@dataclass(frozen=True)
class Scored:
    """A claim with its points, of `most`. A claim that could not be judged gives none."""

    name: str
    points: float
    most: float
    passed: bool | None
    words: str

    @classmethod
    def of(cls, judged: Judged, most: float) -> "Scored":
        """The points for a judged claim."""
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
    """PASSED if all claims passed, NOT_JUDGED if one could not be judged, else WRONG."""
    if any(each.passed is None for each in scored):
        return NOT_JUDGED
    return PASSED if all(each.passed for each in scored) else WRONG


def number(points: float) -> str:
    """Points as text: 2, 2.5."""
    return f"{points:.10g}"
