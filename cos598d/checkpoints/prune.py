"""What goes when a new checkpoint is there, and what a killed program left."""

import errno
import os
import shutil
import stat
from pathlib import Path

from cos598d.checkpoints.layout import (
    MANIFEST,
    MODEL_FOLDER,
    OPTIMIZER,
    OWN,
    RANK,
    TRAINING,
    Damaged,
    Manifest,
    beside_name,
    left_over,
    read_json_inside,
    read_manifest,
    steps,
)
from cos598d.records.conventions import MODEL_FILES
from cos598d.terminal.files import is_named, own_folder, remove_known

# What a save writes; its manifest names the same.
FILES = (TRAINING, *(name.format(rank="[0-9]*") for name in (RANK, OWN, OPTIMIZER)))
REMOVING = "0" * 16  # in place of a token, where no run of ranks removes


def prune(folder: Path, newest: Manifest, keep: int, token: str) -> None:
    """Remove what a run needs no more: all but its `keep` newest whole checkpoints and the best one.

    `newest` is whole, has just taken its name, and stays. What belongs to another run, or comes after `newest` in a run
    that went back to an earlier checkpoint, goes. A damaged one stays until there are `keep` whole ones, so that
    whoever resumes is told of it, and so does a folder without a manifest, which no save has finished. Order is by
    iteration, since clocks jump. Raises OSError when one cannot be removed; those that can be are.
    """
    kept, has_best, refused = 0, False, None
    for iteration, place in steps(folder):
        if not has_manifest(place):
            continue
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


def has_manifest(place: Path) -> bool:
    """Whether a save has finished the folder `place`: its manifest comes last. Without one it may be anybody's."""
    try:
        return stat.S_ISREG(os.lstat(place / MANIFEST).st_mode)
    except OSError:
        return False


def remove(place: Path, token: str) -> None:
    """Remove a checkpoint, under another name: what is half removed must not look like one.

    What else is in its folder stays there. Raises OSError.
    """
    hidden = place.with_name(beside_name(place.name, token, "removed"))
    place.rename(hidden)
    discard(hidden)


def discard(hidden: Path) -> None:
    """Remove what a save has written into a folder that was renamed; with something else in it, it gets its name back.

    Raises OSError.
    """
    ours, of_model = _names(hidden)
    remove_known(hidden / MODEL_FOLDER, of_model)
    remove_known(hidden, ours)
    if hidden.is_dir():
        (hidden / MANIFEST).unlink(missing_ok=True)  # last: it names the others
        if not any(hidden.iterdir()):
            hidden.rmdir()
            return
        target = hidden.with_name(str((left_over(hidden.name) or (hidden.name, ""))[0]))
        if not os.path.lexists(target):
            hidden.rename(target)


def check_replaceable(place: Path) -> None:
    """Raise OSError where `place`, which is to make room for a checkpoint, holds anything that no save has written."""
    ours, of_model = _names(place)
    model = place / MODEL_FOLDER
    foreign = place.is_symlink() or not has_manifest(place) or model.is_symlink()
    for inside in () if foreign else place.iterdir():
        foreign |= inside != model and not is_named(inside.name, (*ours, MANIFEST))
    for inside in model.iterdir() if not foreign and model.is_dir() else ():
        foreign |= not is_named(inside.name, of_model)
    if foreign:
        raise OSError(errno.EEXIST, f"{place.name} there holds what no run has saved", str(place))


def _names(place: Path) -> tuple[set[str], set[str]]:
    """What of a checkpoint's folder is its own, and what in the model's folder: all but the manifest."""
    try:
        named = read_json_inside(place, MANIFEST)["files"].keys()
    except (Damaged, KeyError, TypeError, AttributeError):
        named = ()
    ours, of_model = set(FILES), set(MODEL_FILES)
    for name in named:
        folder, _, inside = name.rpartition("/")
        if not set(inside) & set("*?[") and folder in ("", MODEL_FOLDER):
            (of_model if folder else ours).add(inside)
    return ours - {MANIFEST}, of_model


def tidy(folder: Path) -> None:
    """Remove what saves that were killed have left in `folder`; a checkpoint that was about to be replaced is back.

    Nobody else may be saving there. Raises OSError.
    """
    put_back(folder)
    for place in list(folder.iterdir()):
        found = left_over(place.name)
        if found is None:
            continue
        if place.is_symlink() or not place.is_dir():
            place.unlink()
        elif found[1] in ("old", "removed"):  # it was a checkpoint, to which somebody may have added files
            discard(place)
        else:
            shutil.rmtree(place)


def put_back(folder: Path) -> None:
    """Give a checkpoint that was about to be replaced, when its run was killed, its name back, where that is free.

    Nobody else may be saving in `folder`. Raises OSError.
    """
    for place in list(folder.iterdir()):
        name, what = left_over(place.name) or (None, None)
        if what == "old" and not os.path.lexists(folder / str(name)):
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
    own_folder(folder)
    tidy(folder)  # first: it gives names back
    for _, place in steps(folder):
        if has_manifest(place):
            remove(place, REMOVING)
    if not any(folder.iterdir()):
        folder.rmdir()


def _whole(place: Path) -> Manifest | None:
    """Its manifest, if all files have the sizes in it."""
    try:
        return read_manifest(place)
    except Damaged:
        return None
