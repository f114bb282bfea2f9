"""The record of a run that is running or was killed: what its summary would be, from the rows so far."""

from pathlib import Path

import filelock
import msgspec

from cos598d.errors import UserError
from cos598d.records.conventions import ATTEMPTS, EPOCHS, EVALUATIONS, ITERATIONS, LOCK, SETTING, SUMMARY
from cos598d.records.figures import attempts_of, epoch_traffic, rank_figures, run_figures
from cos598d.records.schema import AttemptRow, Iteration, Setting, Summary, read, read_rows


def is_at_work(folder: Path) -> bool:
    """Whether a program has locked the folder."""
    if not (folder / LOCK).exists():
        return False
    try:
        with filelock.FileLock(folder / LOCK, blocking=False):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # somebody else's folder, which this user may only read
        return False


def is_unfinished(folder: Path) -> bool:
    """Whether the folder has a run that is at work, or has not ended well."""
    return (folder / SETTING).exists() and not (folder / SUMMARY).exists()


def read_summary(folder: Path, unfinished: bool = False) -> Summary:
    """The summary of the run in a folder; if it may be `unfinished`, what it would be if the run ended now.

    An iteration that some ranks have not written yet is summed without them. What is known only at the end is missing,
    such as memory. Raises UserError if there is no run, or if a file is damaged.
    """
    if (folder / SUMMARY).exists():
        return read(folder / SUMMARY, Summary)
    if not unfinished or not is_unfinished(folder):
        lack = "has no summary.json" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {lack}. Give the folder of a finished run.")
    setting = read(folder / SETTING, Setting)
    files = [folder / ITERATIONS.format(rank=rank) for rank in range(setting.world_size)]
    ranks = [rank_figures(read_rows(file, Iteration)) for file in files]
    figures = run_figures(read_rows(files[0], Iteration), ranks)
    epochs = [row | epoch_traffic(ranks, row["epoch"]) for row in read_rows(folder / EPOCHS, dict)]
    attempts = attempts_of(read_rows(folder / ATTEMPTS, AttemptRow), figures["iterations"])
    done, why = f"{figures['iterations']} iterations", attempts[-1].why if attempts else None
    if is_at_work(folder):
        where = f"is still running, and has done {done}"
    else:
        where = f"ended after {done}" + (f": {why}" if why else " without an error (killed, or its host is down)")
    tables = {"epochs": epochs, "evaluations": list(read_rows(folder / EVALUATIONS, dict)), "attempts": attempts}
    found = {**msgspec.structs.asdict(setting), **figures, **tables, "unfinished": where}
    return msgspec.convert(msgspec.to_builtins(found), Summary)
