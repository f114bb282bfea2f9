"""What an archive says of its members, none of it trusted: which of them may be unpacked, and where they land."""

import stat
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Generic, TypeVar

from cos598d.errors import UserError
from cos598d.terminal.printable import printable

# GLUE's largest archive, MNLI, holds a few dozen files and unpacks to about five times its size.
MOST_MEMBERS = 10_000
MOST_BYTES = 4 * 1024**3
MOST_GROWTH = 100
ALWAYS_ALLOWED_BYTES = 16 * 1024**2
LONGEST_NAME = 255  # bytes, of a file or folder: what the usual disks take
LONGEST_PATH = 1024

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Member(Generic[Entry]):
    """One member as its archive tells of it: `name` as it stands there, `size` in bytes when unpacked, `kind` as in
    `stat.S_IFMT` (0 where the archive does not say), and the `entry` by which its library finds it again."""

    name: str
    size: int
    kind: int
    entry: Entry
    is_encrypted: bool = False


def allowed_bytes(archive_bytes: int) -> int:
    """How much an archive of this size may unpack to."""
    return min(MOST_BYTES, max(ALWAYS_ALLOWED_BYTES, MOST_GROWTH * archive_bytes))


def files_of(members: Iterable[Member[Entry]], name: str, archive_bytes: int) -> list[tuple[PurePosixPath, Entry]]:
    """The files of the archive `name`, without the folders that all of them share and what a Mac adds (__MACOSX,
    .DS_Store, ._x, Icon): their paths and entries.

    `members` is read no further than is allowed. Raises UserError where one would land outside, is a link or another
    special file, is encrypted, appears twice or where another needs a folder, has a name that no disk takes, or where
    the whole would be unreasonably large.
    """
    files: dict[PurePosixPath, Entry] = {}
    alike: dict[str, PurePosixPath] = {}  # as a disk sees it that tells no case apart
    total, allowed = 0, allowed_bytes(archive_bytes)
    for count, member in enumerate(members, start=1):
        if count > MOST_MEMBERS:
            raise UserError(f"{name} holds more than the {MOST_MEMBERS} members that were expected; not unpacked.")
        total += member.size
        if total > allowed:
            raise UserError(
                f"{name} of {archive_bytes} bytes would unpack to {total} or more, and {allowed} are allowed; "
                "not unpacked."
            )
        path = _inside(member.name, name)
        if member.kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _not_unpacked(name, path, "a link or special file")
        if member.kind == stat.S_IFDIR or _added_by_a_mac(path):
            continue
        if member.is_encrypted:
            raise _not_unpacked(name, path, "which is encrypted")
        folded = _folded(path)
        if folded in alike:
            other = alike[folded]
            also = "twice" if other == path else f"and {_quoted(other)}, which not every disk can tell apart"
            raise UserError(f"{name} holds {_quoted(path)} {also}; nothing of it was unpacked.")
        files[path] = member.entry
        alike[folded] = path
    looked_at: set[PurePosixPath] = set()
    for path in files:
        for folder in path.parents:
            if folder in looked_at:
                break
            looked_at.add(folder)
            if _folded(folder) in alike:
                other = alike[_folded(folder)]
                raise _not_unpacked(name, other, f"a file, where {_quoted(path)} needs a folder")
    shared = _shared_folders(list(files))
    return [(PurePosixPath(*path.parts[shared:]), entry) for path, entry in files.items()]


def _folded(path: PurePosixPath) -> str:
    return unicodedata.normalize("NFC", str(path)).casefold()


def _quoted(path: PurePosixPath | str) -> str:
    return f'"{printable(path, 100)}"'


def _not_unpacked(name: str, path: PurePosixPath | str, why: str) -> UserError:
    return UserError(f"{name} holds {_quoted(path)}, {why}; nothing of it was unpacked.")


def _inside(member: str, name: str) -> PurePosixPath:
    """The member's path, or UserError if any operating system would take it for one outside the folder."""
    windows = PureWindowsPath(member)  # takes both kinds of slashes, and knows drive letters
    if windows.anchor or ".." in windows.parts or "\0" in member or not windows.parts:
        raise _not_unpacked(name, member, "which leads outside its folder")
    path = PurePosixPath(*windows.parts)
    try:
        longest = max(len(part.encode()) for part in path.parts)
    except UnicodeEncodeError:
        raise _not_unpacked(name, member, "a name that no disk takes") from None
    if longest > LONGEST_NAME or len(str(path).encode()) > LONGEST_PATH:
        raise _not_unpacked(name, member, "a name too long for a disk")
    return path


def _added_by_a_mac(path: PurePosixPath) -> bool:
    return "__MACOSX" in path.parts or path.name.startswith("._") or path.name in (".DS_Store", "Icon\r")


def _shared_folders(paths: list[PurePosixPath]) -> int:
    """How many leading folders all paths have in common, so that QQP-clean.zip's QQP/train.tsv becomes train.tsv."""
    folders = [path.parts[:-1] for path in paths]
    depth = 0
    while folders and all(len(parts) > depth and parts[depth] == folders[0][depth] for parts in folders):
        depth += 1
    return depth
