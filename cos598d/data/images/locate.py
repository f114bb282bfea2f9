"""Where a task of images looks for its files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cos598d.errors import UserError

VARIABLE = "IMAGE_DIR"


def candidates(data_dir: str | None, environ: Mapping[str, str], names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """The paths that a task's data may be at, with words for each: --data_dir, else IMAGE_DIR, and what is in it by
    these `names`; "" for itself. Raises UserError where what was named is not there."""
    named = data_dir or environ.get(VARIABLE)
    if not named:
        return
    place = Path(named)
    if not place.exists():
        raise UserError(f"There is no {named} ({'--data_dir' if data_dir else VARIABLE}): give the images' folder.")
    for name in names:
        said = named if data_dir else VARIABLE
        yield place / name, f"{said}/{name}" if name else said
