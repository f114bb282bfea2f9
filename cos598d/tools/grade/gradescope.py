"""Gradescope's results.json. Its fields: https://gradescope-autograders.readthedocs.io/en/latest/specs/."""

from collections.abc import Sequence
from typing import Any

from cos598d.terminal.printable import printable
from cos598d.tools.grade.scored import Scored, total

VISIBILITIES = ("visible", "hidden", "after_due_date", "after_published")
LONGEST = 20_000  # characters of one test's output


def gradescope(
    scored: Sequence[Scored],
    output: str,
    seconds: float,
    visibility: str,
    leaderboard: Sequence[tuple[str, float, str]] = (),
) -> dict[str, Any]:
    """The results of one submission, as the value of results.json. `leaderboard` has names, values and orders."""
    results: dict[str, Any] = {
        "score": round(total(scored), 6),
        "execution_time": round(seconds, 1),
        "output": _clean(output),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": visibility,
        "stdout_visibility": "hidden",
        "extra_data": {},
        "tests": [_test(each, number, visibility) for number, each in enumerate(scored, 1)],
    }
    if leaderboard:
        results["leaderboard"] = [{"name": name, "value": value, "order": order} for name, value, order in leaderboard]
    return results


def _test(scored: Scored, number: int, visibility: str) -> dict[str, Any]:
    said = "" if scored.passed is not None else "could not be judged: "
    return {
        "score": round(scored.points, 6),
        "max_score": round(scored.most, 6),
        "status": "passed" if scored.passed else "failed",
        "name": scored.name,
        "name_format": "text",
        "number": str(number),
        "output": _clean(said + scored.words),
        "output_format": "text",
        "tags": [],
        "visibility": visibility,
        "extra_data": {"verdict": scored.status},
    }


def _clean(text: str) -> str:
    """Text that may come from a submission, without characters that its reader would obey."""
    return printable(text, LONGEST, keep="\n")
