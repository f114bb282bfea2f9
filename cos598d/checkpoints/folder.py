"""The folder of a run's checkpoints: which of them are kept, how one gets its name, and what a killed program left.

Only files that a save has written are deleted, and no link is followed.
"""

import contextlib
import errno
import os
import re
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
    read_json_inside,
    read_manifest,
    steps,
)
from cos598d.records.conventions import MODEL_FILES
from cos598d.terminal.files import is_named, own_folder, remove_known, sync_folder

# What a save writes next to the manifest, which lists these names.
FILES = (TRAINING, *(name.format(rank="[0-9]*") for name in (RANK, OWN, OPTIMIZER)))
PARTIAL, OLD, REMOVED = "partial", "old", "removed"  # the states of a folder with a hidden name
REMOVING = "0" * 16  # replaces the token when no ranks of a run do the removing

_HIDDEN = re.compile(rf"\.(?:(step-\d{{8,15}})\.[0-9a-f]{{16}}\.({PARTIAL}|{OLD}|{REMOVED})|probe-[0-9a-f]{{16}})")


def hidden_name(name: str, token: str, state: str) -> str:
    """The name of a checkpoint's folder in the state PARTIAL, OLD (to be replaced) or REMOVED."""
    return f".{name}.{token}.{state}"


def probe_name(token: str) -> str:
    """The name of the folder by which ranks find out whether they share a disk."""
    return f".probe-{token}"


def prune(folder: Path, newest: Manifest, keep: int, token: str) -> None:
    """Remove all checkpoints except the `keep` newest complete ones and the best one.

    `newest` is complete, has just got its name, and is kept. Checkpoints of another run are removed. So are those later
    than `newest`, in a run that went back to an earlier checkpoint. A damaged one is kept until there are `keep`
    complete ones, so that a resume can report it. A folder without a manifest, which no save has finished, is kept too.
    They are ordered by iteration, since clocks jump. Raises OSError at the end if one cannot be removed.
    """
    kept, has_best, refused = 0, False, None
    for iteration, place in steps(folder):
        if not _has_manifest(place):
            continue
        manifest = newest if iteration == newest.iteration else _whole(place)
        if manifest and manifest.run == newest.run and manifest.iteration <= newest.iteration:
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
    """Remove a checkpoint, renamed first, so that a half-removed one is not taken for one. Raises OSError.

    Files in its folder that no save has written stay there.
    """
    hidden = place.with_name(hidden_name(place.name, token, REMOVED))
    place.rename(hidden)
    _discard(hidden)


def take_name(partial: Path, target: Path, token: str) -> None:
    """Give a complete checkpoint its name, replacing one with that name, which is restored if this fails."""
    old = target.with_name(hidden_name(target.name, token, OLD))
    if os.path.lexists(target):
        _check_replaceable(target)
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync_folder(target.parent)
    if old.exists():
        with contextlib.suppress(OSError):
            _discard(old)


def tidy(folder: Path) -> None:
    """Remove what killed saves have left in `folder`, and restore a checkpoint that was about to be replaced.

    Nothing else may save there at the same time. Raises OSError.
    """
    put_back(folder)
    for place in list(folder.iterdir()):
        found = _HIDDEN.fullmatch(place.name)
        if found is None:
            continue
        if place.is_symlink() or not place.is_dir():
            place.unlink()
        elif found[2] in (OLD, REMOVED):  # a checkpoint, to which somebody may have added files
            _discard(place)
        else:
            shutil.rmtree(place)


def put_back(folder: Path) -> None:
    """If a run was killed while replacing a checkpoint, restore the old one's name, if that is free.

    Nothing else may save in `folder` at the same time. Raises OSError.
    """
    for place in list(folder.iterdir()):
        found = _HIDDEN.fullmatch(place.name)
        if found and found[2] == OLD and not os.path.lexists(folder / found[1]):
            place.rename(folder / found[1])


def has_checkpoints(folder: Path) -> bool:
    """Whether runs have left checkpoints in `folder`, complete or not."""
    return folder.is_dir() and bool(steps(folder) or any(_HIDDEN.fullmatch(place.name) for place in folder.iterdir()))


def whole_in(folder: Path) -> set[tuple[str, int]]:
    """The complete checkpoints in `folder`: the run of each, as in its manifest, and its iteration."""
    found = [_whole(place) for _, place in steps(folder)] if folder.is_dir() else []
    return {(manifest.run, manifest.iteration) for manifest in found if manifest}


def remove_all(folder: Path) -> None:
    """Remove the checkpoints of all runs, and `folder` if nothing else is in it. Raises OSError."""
    if not folder.is_dir():
        return
    own_folder(folder)
    tidy(folder)  # first, because it restores names
    for _, place in steps(folder):
        if _has_manifest(place):
            remove(place, REMOVING)
    if not any(folder.iterdir()):
        folder.rmdir()


def _has_manifest(place: Path) -> bool:
    """Whether a save has finished the folder `place`: the manifest is written last. Without one it may be anybody's."""
    try:
        return stat.S_ISREG(os.lstat(place / MANIFEST).st_mode)
    except OSError:
        return False


def _whole(place: Path) -> Manifest | None:
    """Its manifest, if all files have the sizes listed there."""
    try:
        return read_manifest(place)
    except Damaged:
        return None


def _discard(hidden: Path) -> None:
    """Remove what a save has written into a renamed folder. If something else is in it, restore its name.

    Raises OSError.
    """
    ours, of_model = _names(hidden)
    remove_known(hidden / MODEL_FOLDER, of_model)
    remove_known(hidden, ours)
    if hidden.is_dir():
        (hidden / MANIFEST).unlink(missing_ok=True)  # last: it lists the others
        found = _HIDDEN.fullmatch(hidden.name)
        if not any(hidden.iterdir()):
            hidden.rmdir()
        elif found and not os.path.lexists(hidden.with_name(found[1])):
            hidden.rename(hidden.with_name(found[1]))


def _check_replaceable(place: Path) -> None:
    """Raise OSError if `place`, which is to be replaced by a checkpoint, has anything that no save has written."""
    ours, of_model = _names(place)
    model = place / MODEL_FOLDER
    foreign = place.is_symlink() or not _has_manifest(place) or model.is_symlink()
    for inside in () if foreign else place.iterdir():
        foreign |= inside != model and not is_named(inside.name, (*ours, MANIFEST))
    for inside in model.iterdir() if not foreign and model.is_dir() else ():
        foreign |= not is_named(inside.name, of_model)
    if foreign:
        raise OSError(errno.EEXIST, f"{place.name} there has files that no run has saved", str(place))


def _names(place: Path) -> tuple[set[str], set[str]]:
    """The checkpoint's own files in its folder, and those in the model's folder: all except the manifest."""
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
