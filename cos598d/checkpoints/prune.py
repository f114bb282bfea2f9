"""What goes when a new checkpoint is there, and what a killed program left."""

import shutil
from pathlib import Path

from cos598d.checkpoints.layout import Damaged, Manifest, beside_name, left_over, read_manifest, steps


def prune(folder: Path, newest: Manifest, keep: int, token: str) -> None:
    """Remove what a run needs no more: all but its `keep` newest whole checkpoints and the best one.

    `newest` is whole, has just taken its name, and stays. What belongs to another run, or comes after `newest` in a run
    that went back to an earlier checkpoint, goes. A damaged one stays until there are `keep` whole ones, so that
    whoever resumes is told of it. Order is by iteration, since clocks jump. Raises OSError when one cannot be removed;
    those that can be are.
    """
    kept, has_best, refused = 0, False, None
    for iteration, place in steps(folder):
        manifest = newest if iteration == newest.iteration else _whole(place)
        is_ours = manifest is not None and manifest.run == newest.run and manifest.iteration <= newest.iteration
        if manifest is not None and is_ours:
            is_the_best = manifest.is_best and not has_best  # each was better than all before it
            has_best |= manifest.is_best
            kept += 1
            if kept <= keep or is_the_best:
                continue
        elif manifest is None and iteration < newest.iteration and kept < keep:
            continue
        try:
            remove(place, token)
        except OSError as error:
            refused = error
    if refused is not None:
        raise refused


def remove(place: Path, token: str) -> None:
    """Remove a checkpoint, under another name: what is half removed must not look like one."""
    hidden = place.with_name(beside_name(place.name, token, "removed"))
    place.rename(hidden)
    shutil.rmtree(hidden)


def tidy(folder: Path) -> None:
    """Remove what saves that were killed have left in `folder`; a checkpoint that was about to be replaced is back.

    Nobody else may be saving there.
    """
    for place in list(folder.iterdir()):
        left = left_over(place.name)
        if left is None:
            continue
        name, what = left
        if what == "old" and not (folder / str(name)).exists():
            place.rename(folder / str(name))
        elif place.is_symlink() or not place.is_dir():
            place.unlink()
        else:
            shutil.rmtree(place)


def _whole(place: Path) -> Manifest | None:
    """Its manifest, if all files have the sizes in it."""
    try:
        return read_manifest(place)
    except Damaged:
        return None
