"""The record of a run that is running or was killed: a summary made from the rows so far."""

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import ATTEMPTS, EPOCHS, EVALUATIONS, ITERATIONS, LIVE, SETTING
from cos598d.records.figures import RankSums, run_figures
from cos598d.records.run import (
    ATTEMPTS_FILE,
    EPOCH,
    EVALUATION,
    ITERATION,
    SETTING_FILE,
    Summary,
    read_object,
    read_table,
)
from cos598d.terminal.locks import is_locked


def live_folder(folder: Path) -> Path | None:
    """The folder of an unfinished run's rows, given its folder or its `live/`; None if there is a summary."""
    if (folder / "summary.json").exists():
        return None
    for place in (folder / LIVE, folder):
        if (place / SETTING).exists():
            return place
    return None


def read_unfinished(live: Path) -> Summary:
    """What the summary would be if the run ended now; `unfinished` is a phrase for how far it got.

    An iteration that some ranks have not written yet is summed without them. Facts known only at the end are missing,
    such as the kernel's byte counts of an epoch. Raises UserError if something is damaged.
    """
    setting = read_object(live / SETTING, SETTING_FILE)
    if setting is None:
        raise UserError(f"{live / SETTING} is missing: the run has not started yet, or has just ended. Look again.")
    attempts = (read_object(live / ATTEMPTS, ATTEMPTS_FILE) or {"attempts": []})["attempts"]
    ranks = [RankSums() for _ in range(setting["world_size"])]
    losses, seconds = array("d"), array("d")
    for rank, sums in enumerate(ranks):
        for row in read_table(live / ITERATIONS.format(rank=rank), ITERATION, is_needed=rank == 0, grows=True):
            sums.add(row)
            if rank == 0:
                losses.append(row["loss"])
                seconds.append(row["seconds"])
    return {
        **setting,
        **run_figures(ranks, losses, seconds),
        "epochs": list(read_table(live / EPOCHS, EPOCH, is_needed=False, grows=True)),
        "evaluations": list(read_table(live / EVALUATIONS, EVALUATION, is_needed=False, grows=True)),
        "attempts": attempts,
        "unfinished": _where(live, len(losses), attempts[-1] if attempts else {}),
    }


def _where(live: Path, iterations: int, attempt: Mapping[str, Any]) -> str:
    if is_locked(live.parent):
        return f"is still running, and has done {iterations} iterations"
    why = attempt.get("why")
    return f"ended after {iterations} iterations" + (
        f": {why}" if why else " without an error (killed, or its host is down)"
    )
