"""The points of a submission for one claim, and for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

# Exit codes of whatever grades one submission.
PASSED, WRONG, NOT_JUDGED = 0, 1, 2
# Begins the names of tests that give points for a lesson's hints that were not shown. A submission passes without them.
WITHOUT_HINT = "without_hint_"


@dataclass(frozen=True)
class Judged:
    """The result of a claim: passed, failed, or (None) not judged. `words` are the reason."""

    name: str
    passed: bool | None
    words: str


@dataclass(frozen=True)
class Scored(Judged):
    """A judged claim with its points, of `most`. One that did not pass, or could not be judged, gives none."""

    points: float
    most: float

    @property
    def status(self) -> str:
        """In a word or two."""
        return {True: "passed", False: "no points" if self.is_of_hint else "wrong", None: "not judged"}[self.passed]

    @property
    def is_of_hint(self) -> bool:
        """Whether it only gives points for a hint that was not shown."""
        return self.name.rpartition(".")[2].startswith(WITHOUT_HINT)


def total(scored: Sequence[Scored]) -> float:
    """The points of all claims."""
    return sum(each.points for each in scored)


def most(scored: Sequence[Scored]) -> float:
    """The points that all claims can give."""
    return sum(each.most for each in scored)


def exit_code(scored: Sequence[Scored]) -> int:
    """PASSED if all claims passed, apart from those of hints, NOT_JUDGED if one could not be judged, else WRONG."""
    if any(each.passed is None for each in scored):
        return NOT_JUDGED
    own = [each for each in scored if not each.is_of_hint] or scored
    return PASSED if all(each.passed for each in own) else WRONG


def hint_lines(scored: Sequence[Scored], is_missed: bool = False) -> list[str]:
    """A sentence for each part that has points for hints: how many it gives, and why. With `is_missed` only for those
    that do not give all."""
    parts: dict[str, list[Scored]] = {}
    for each in scored:
        if each.is_of_hint:
            parts.setdefault(each.name.rpartition(".")[0], []).append(each)
    points = {part: f"{number(total(own))} of {number(most(own))}" for part, own in parts.items()}
    return [
        f"{part and f'{part}: '}Hint points: {points[part]}, because {own[0].words.rstrip('.')}."
        for part, own in parts.items()
        if not is_missed or total(own) < most(own)
    ]


def number(points: float) -> str:
    """Points as text: 2, 2.5."""
    return f"{points:.10g}"
