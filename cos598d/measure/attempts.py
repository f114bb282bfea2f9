"""A run's attempts: where each started or resumed, what ended it, and how much of its work was lost."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cos598d.errors import UserError, one_line
from cos598d.measure.row_files import last_row
from cos598d.records.conventions import ATTEMPTS, FINISHED, ITERATIONS, SILENT
from cos598d.records.run import ATTEMPTS_FILE, read_object
from cos598d.terminal.files import write_json

Attempt = dict[str, Any]


class Attempts:
    """Rank 0's list of a run's attempts, in a file that is complete at any time.

    Each has `begun` and `ended` (UTC). `ended` is None while it runs, or if nothing was left to write it.
    `from_iteration` and `to_iteration` are where it started or resumed and how far it got. `lost_iterations` are those
    that a later attempt repeated. It also has `ranks`, and `why` it ended (None as for `ended`).
    """

    def __init__(self, path: Path, earlier: list[Attempt], iteration: int, ranks: int):
        self._path = path
        came = {"from_iteration": iteration, "to_iteration": iteration, "lost_iterations": 0}
        self.all = [*earlier, {"begun": _utc(), "ended": None, **came, "ranks": ranks, "why": None}]
        self.write()

    def end(self, why: str, iteration: int) -> None:
        """End this attempt after `iteration`."""
        self.all[-1] |= {"ended": _utc(), "to_iteration": iteration, "why": why}

    def finished(self, iteration: int) -> list[Attempt]:
        """All attempts, for the summary of a run whose work is done."""
        last = {"ended": _utc(), "to_iteration": iteration, "why": self.all[-1]["why"] or FINISHED}
        return [*self.all[:-1], self.all[-1] | last]

    def write(self) -> None:
        """Write the list to the disk. Raises OSError."""
        write_json(self._path, {"attempts": self.all})


def find_earlier(places: Sequence[Path], position: Mapping[str, Any] | None) -> list[Attempt]:
    """The attempts before one that resumes from rank 0's `position`, with the iterations that they lose by that.

    They are read from the first of `places` (a run's live/) that has them, where rank 0's rows show how far the last
    attempt got. Otherwise they come from the checkpoint.
    """
    if not position:
        return []
    found, rows = None, places[0]
    for place in places:
        for file in (place / ATTEMPTS, place.parent / "summary.json"):  # the second file if the run has ended well
            with contextlib.suppress(UserError):  # damaged: that costs some lines of a summary, and no run
                if found is None and (found := read_object(file, ATTEMPTS_FILE)):
                    rows = place
    earlier = [dict(one) for one in (found or position)["attempts"]]
    if earlier:
        last = earlier[-1]
        reached, when = _last_iteration(rows / ITERATIONS.format(rank=0))
        last["to_iteration"] = max(last["to_iteration"], reached)
        if last["ended"] is None:
            last |= {"ended": when, "why": SILENT}
    for one in earlier:
        again = one["to_iteration"] - max(one["from_iteration"], position["iteration"])
        one["lost_iterations"] = max(one["lost_iterations"], again)
    return earlier


def why(error: BaseException | None) -> str:
    """Why a run ends: by `error`, or without one before its work is done."""
    if error is None:
        return "ended before its work was done"
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    said, kind = one_line(error), type(error).__name__
    return said if said == kind else f"{kind}: {said}"


def _last_iteration(rows: Path) -> tuple[int, str | None]:
    """The last iteration in a file of rows, even if the row after it is incomplete, and the time of its writing."""
    try:
        content = rows.stat()
        row = last_row(rows, content.st_size)
        if not row.endswith(b"\n"):
            row = last_row(rows, content.st_size - len(row))
        return int(json.loads(row)["iteration"]) if row else 0, _utc(content.st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return 0, None


def _utc(seconds: float | None = None) -> str:
    """A time, by default now, as UTC text."""
    moment = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
