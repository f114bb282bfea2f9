"""What goes when a new checkpoint is there, and what a killed program left."""

import shutil
from pathlib import Path

from cos598d.checkpoints.layout import Damaged, Manifest, beside_name, left_over, read_manifest, steps

REMOVING = "0" * 16  # in place of a token, where no run of ranks removes


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

    Nobody else may be saving there. Raises OSError.
    """
    put_back(folder)
    for place in list(folder.iterdir()):
        if left_over(place.name) is None:
            continue
        if place.is_symlink() or not place.is_dir():
            place.unlink()
        else:
            shutil.rmtree(place)


def put_back(folder: Path) -> None:
    """Give a checkpoint that was about to be replaced, when its run was killed, its name back, where that is free.

    Nobody else may be saving in `folder`. Raises OSError.
    """
    for place in list(folder.iterdir()):
        name, what = left_over(place.name) or (None, None)
        if what == "old" and not (folder / str(name)).exists():
            place.rename(folder / str(name))


def has_checkpoints(folder: Path) -> bool:
    """Whether runs have left checkpoints in `folder`, or what was to become some."""
    return folder.is_dir() and bool(steps(folder) or any(left_over(place.name) for place in folder.iterdir()))


def whole_in(folder: Path) -> set[tuple[str, int]]:
    """The whole checkpoints in `folder`: of which run, by what its manifests call it, and after which iteration."""
    found = [_whole(place) for _, place in steps(folder)] if folder.is_dir() else []
    return {(manifest.run, manifest.iteration) for manifest in found if manifest}


def remove_all(folder: Path) -> None:
    """Remove the checkpoints of all runs, and `folder` if nothing else is in it. Raises OSError."""
    if not folder.is_dir():
        return
    tidy(folder)  # first: it gives names back
    for _, place in steps(folder):
        remove(place, REMOVING)
    if not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def _whole(place: Path) -> Manifest | None:
    """Its manifest, if all files have the sizes in it."""
    try:
        return read_manifest(place)
    except Damaged:
        return None
