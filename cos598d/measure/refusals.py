"""What the user is told where the disk refuses a file of the record, and what is safe then."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cos598d.errors import UserError

# What stands in the folder: at the begin, before an earlier run's files are removed, and after that.
NOTHING_DONE = "this run has left nothing in {folder}, and an earlier run's files are still there."
OLD_STANDS = "this run's rows so far stay in {folder}/live, and an earlier run's files are still there."
OLD_IS_GONE = "the record in {folder} is incomplete, and the earlier run's is already gone."


@contextlib.contextmanager
def told(folder: Path, remains: str = OLD_STANDS) -> Iterator[None]:
    """Make a UserError of an OSError in the block; `remains` says what stands in the record's `folder` then."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be written ({error.strerror}): make room there or choose another "
            f"--output_dir; {remains.format(folder=folder)}"
        ) from None
