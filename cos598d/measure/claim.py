"""A run's folder: one run at a time uses it, and its files are kept unless the user asks to overwrite them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cos598d.errors import UserError
from cos598d.records.conventions import (
    ATTEMPTS,
    CHECKPOINTS,
    CONFIG_FILE,
    CSV_EVALUATIONS,
    CSV_STEPS,
    ENVIRONMENT_FILE,
    EPOCHS,
    EVALUATIONS,
    LIVE,
    MODEL,
    ROWS,
    SETTING,
    TENSORBOARD,
)
from cos598d.terminal.files import is_named, remove_known
from cos598d.terminal.locks import locked

# A run's files in `live/`: of all ranks, and rank 0's files other than rows.
ALL_ROWS = (*(name.format(rank="[0-9]*") for name in ROWS), EPOCHS, EVALUATIONS)
FACTS = (ATTEMPTS, SETTING, CONFIG_FILE, ENVIRONMENT_FILE)
TABLES = (CSV_STEPS, CSV_EVALUATIONS)
TEST_PREDICTIONS = "predictions{part}.tsv"  # of a test set, by --do_predict
PREDICTION_FILES = (
    *("predictions.json", "nbest_predictions.json", "null_odds.json"),
    *(TEST_PREDICTIONS.format(part=part) for part in ("", "_mismatched")),
)

# The state of the folder: at the beginning, before an earlier run's files are removed, and after that.
NOTHING_DONE = "Nothing of this run is in {folder}, and an earlier run's files are still there."
OLD_STANDS = "This run's rows so far stay in {folder}/live, and an earlier run's files are still there."
OLD_IS_GONE = "The files in {folder} are incomplete, and the earlier run's are already removed."


@contextlib.contextmanager
def told(folder: Path, remains: str = OLD_STANDS) -> Iterator[None]:
    """Convert an OSError in the block into a UserError. `remains` describes the state of the record's `folder` then."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be written ({error.strerror}). {remains.format(folder=folder)} Make room "
            "there, or choose another --output_dir."
        ) from None


def clear(folder: Path) -> None:
    """Remove only what a run that did not end well left in `folder`.

    It is for a run that starts over: each of its ranks calls it, before any of them creates its files.
    """
    if was_left(folder):
        with contextlib.suppress(OSError):  # what cannot be removed is overwritten
            remove_known(folder / LIVE, (*ALL_ROWS, *FACTS))


def was_left(folder: Path) -> bool:
    """Whether a run that did not end well has left rows in `folder`, complete or not."""
    try:
        names = os.listdir(folder / LIVE)
    except OSError:
        return False
    return not names or any(is_named(name, (*ALL_ROWS, ATTEMPTS, SETTING)) for name in names)


def check_places(folder: Path) -> None:
    """Raise UserError if a run would write through something in its `folder` that leads elsewhere.

    Its subfolders must not be links, since the run deletes files in them. No folder may have the name of one of its
    files. The folder itself may be a link, since the user named it.
    """
    for name in (LIVE, CHECKPOINTS, MODEL, TENSORBOARD):
        place = folder / name
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            what = "a link" if place.is_symlink() else "no folder"
            raise UserError(
                f"{place} is {what}, but a run writes and deletes files in a folder of its own. Remove it, or choose "
                "another --output_dir."
            )
    for place in folder.iterdir():
        if place.is_dir() and is_named(place.name, ("summary.json", *FACTS, *ALL_ROWS, *PREDICTION_FILES, *TABLES)):
            raise UserError(
                f"{place} is a folder, but a run writes a file of that name. Remove it, or choose another --output_dir."
            )


@contextlib.contextmanager
def claim_folder(folder: Path, overwrite: bool, locks: bool = True, flag: str = "--output_dir") -> Iterator[None]:
    """Create the output folder and lock it for the block, so that no other program of ours uses it.

    Raises UserError if it is not empty and `overwrite` is off, or if another run has locked it. Without `locks` it is
    only checked: a run's first rank locks it for all. `flag` is the flag that named it.
    """
    if folder.is_file():
        raise UserError(f"{flag} {folder} is a file. Give a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be created ({error.strerror}). Give another folder.") from None
    if flag == "--output_dir":
        check_places(folder)
    with contextlib.ExitStack() as claim:
        if locks and not claim.enter_context(locked(folder)):
            raise UserError(f"{flag} {folder} is in use by another run. Choose another folder.")
        # Only now, since nobody else can have checked meanwhile.
        if not overwrite and flag == "--output_dir" and was_left(folder):
            raise UserError(
                f"{flag} {folder} has an unfinished run. Resume it with --resume auto, start over with "
                "--overwrite_output_dir, or choose another folder."
            )
        if not overwrite and any(folder.iterdir()):
            remedy = " or add --overwrite_output_dir" if flag == "--output_dir" else ""
            raise UserError(f"{flag} {folder} is not empty. Choose another folder{remedy}.")
        yield
