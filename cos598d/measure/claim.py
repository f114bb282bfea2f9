"""A run's folder: one program at a time uses it, and what is in it is kept unless the user asks to overwrite it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from cos598d.errors import UserError
from cos598d.records.conventions import ITERATIONS, LOCK, SETTING, SUMMARY

TEST_PREDICTIONS = "predictions{part}.tsv"  # of a test set, by --do_predict
PREDICTION_FILES = (
    *("predictions.json", "nbest_predictions.json", "null_odds.json"),
    *(TEST_PREDICTIONS.format(part=part) for part in ("", "_mismatched")),
)
PATIENCE = 0.5  # seconds; a program that only looks whether the folder is locked holds it for some microseconds


@contextlib.contextmanager
def claim_folder(folder: Path, overwrite: bool, locks: bool = True, flag: str = "--output_dir") -> Iterator[None]:
    """Create the folder and lock it for the block. Raises UserError if it is in use, or not empty without `overwrite`.

    Without `locks` it is only checked: a run's first rank locks it for all. `flag` is the flag that named it.
    """
    if folder.is_file():
        raise UserError(f"{flag} {folder} is a file. Give a folder.")
    lock = filelock.FileLock(folder / LOCK, timeout=PATIENCE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if locks:
            lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{flag} {folder} is in use by another run. Choose another folder.") from None
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be created ({error.strerror}). Give another folder.") from None
    try:
        if not overwrite and was_left(folder):
            raise UserError(
                f"{flag} {folder} has an unfinished run. Resume it with --resume auto, start over with "
                "--overwrite_output_dir, or choose another folder."
            )
        if not overwrite and any(place.name != LOCK for place in folder.iterdir()):
            remedy = " or add --overwrite_output_dir" if flag == "--output_dir" else ""
            raise UserError(f"{flag} {folder} is not empty. Choose another folder{remedy}.")
        yield
    finally:
        lock.release()


def was_left(folder: Path) -> bool:
    """Whether a run that did not end well has left rows in `folder`, complete or not."""
    has_rows = (folder / SETTING).exists() or any(folder.glob(ITERATIONS.format(rank="*")))
    return has_rows and not (folder / SUMMARY).exists()
