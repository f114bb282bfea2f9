"""Who trained when: a run's attempts, from where each went on to what ended it, and what of its work was lost."""

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
    """Rank 0's list of a run's attempts, in a file that is whole at any time.

    Each has `begun` and `ended` (UTC; None while it goes on, or where nobody was left to write it down), the iteration
    that it went on from and the one it came to (`from_iteration`, `to_iteration`), `lost_iterations`: those of its own
    that a later attempt did again; `ranks`, and `why` it ended (None as for `ended`).
    """

    def __init__(self, path: Path, earlier: list[Attempt], iteration: int, ranks: int):
        self._path = path
        came = {"from_iteration": iteration, "to_iteration": iteration, "lost_iterations": 0}
        self.all = [*earlier, {"begun": _utc(), "ended": None, **came, "ranks": ranks, "why": None}]
        self.write()

    def end(self, why: str, iteration: int) -> None:
        """This attempt ends after `iteration`."""
        self.all[-1] |= {"ended": _utc(), "to_iteration": iteration, "why": why}

    def finished(self, iteration: int) -> list[Attempt]:
        """All of them, for the summary of a run whose work is done."""
        last = {"ended": _utc(), "to_iteration": iteration, "why": self.all[-1]["why"] or FINISHED}
        return [*self.all[:-1], self.all[-1] | last]

    def write(self) -> None:
        """Bring it to the disk. Raises OSError as a disk does."""
        write_json(self._path, {"attempts": self.all})


def find_earlier(places: Sequence[Path], position: Mapping[str, Any] | None) -> list[Attempt]:
    """The attempts before one that resumes from `position`, rank 0's, with what they have lost by that; none without.

    They are read from the first of `places` (a run's live/) that has them, and rank 0's rows there say how far the last
    of them came; else from the checkpoint.
    """
    if not position:
        return []
    found, rows = None, places[0]
    for place in places:
        for file in (place / ATTEMPTS, place.parent / "summary.json"):  # the second of one that has ended well
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
    """Why a run ends that `error` ended, or that ends without one before its work is done."""
    if error is None:
        return "ended before its work was done"
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    said, kind = one_line(error), type(error).__name__
    return said if said == kind else f"{kind}: {said}"


def _last_iteration(rows: Path) -> tuple[int, str | None]:
    """The last iteration in a file of rows, whatever became of the row after it, and when it was written."""
    try:
        content = rows.stat()
        row = last_row(rows, content.st_size)
        if not row.endswith(b"\n"):
            row = last_row(rows, content.st_size - len(row))
        return int(json.loads(row)["iteration"]) if row else 0, _utc(content.st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return 0, None


def _utc(seconds: float | None = None) -> str:
    """A moment of the clock, by default this one."""
    moment = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
