"""From a fetched file to a folder of data files, trusting nothing that an archive says about itself."""

import errno
import lzma
import shutil
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from cos598d.errors import UserError
from cos598d.files import write_whole
from cos598d.terminal.printable import printable

# GLUE's largest archive, MNLI, holds a few dozen files and unpacks to about five times its size.
MOST_MEMBERS = 10_000
MOST_BYTES = 4 * 1024**3
MOST_GROWTH = 100
ALWAYS_ALLOWED_BYTES = 16 * 1024**2
LONGEST_NAME = 255  # bytes, of a file or folder: what the usual disks take
LONGEST_PATH = 1024
# What zipfile and the decompressors raise for a file that is not an archive, or a damaged one.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError, MemoryError),
)
# Of a broken bz2 stream, of places before the archive's begin, of names that a disk does not take.
_NOT_THE_DISKS = (None, errno.EINVAL, errno.EILSEQ)


def unpack_zip(files: Mapping[str, Path], into: Path) -> None:
    """Unpack one zip archive into the folder `into`, without the folder that all its members share.

    What a Mac adds (__MACOSX, .DS_Store, ._x, Icon) is left out. Raises UserError if the archive is broken or not a
    zip, if a member would land outside `into`, is a link or another special file, is encrypted, appears twice or
    where another needs a folder, has a name that no disk takes, or if the whole would be unreasonably large; OSError if
    the disk refuses. A failure can leave files in `into`, which the caller throws away.
    """
    ((name, archive),) = files.items()
    try:
        with zipfile.ZipFile(archive) as opened:
            members = _checked(opened, name, archive.stat().st_size)
            shared = _shared_folders([path for path, _ in members])
            for path, info in members:
                target = into.joinpath(*path.parts[shared:])
                target.parent.mkdir(parents=True, exist_ok=True)
                # Reading stops at the declared size and compares the CRC, so the size check above holds.
                with opened.open(info) as source, open(target, "xb") as copy:
                    shutil.copyfileobj(source, copy, 1024 * 1024)
    except UserError:
        raise
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NOT_THE_DISKS:
            raise
        why = _looks_like(archive) or printable(error, 200).rstrip(".") or type(error).__name__
        raise UserError(f"{name} is not a whole zip archive ({why}).") from error


def copy_files(files: Mapping[str, Path], into: Path) -> None:
    """Take the fetched files as they are, under their own names."""
    for name, path in files.items():
        shutil.copyfile(path, into / name)


def split_mrpc(files: Mapping[str, Path], into: Path) -> None:
    """Make GLUE's train.tsv, dev.tsv and test.tsv from the paraphrase corpus and GLUE's list of dev pairs.

    The corpus comes as msr_paraphrase_train.txt and msr_paraphrase_test.txt (label, two ids, two sentences); the pairs
    of ids in mrpc_dev_ids.tsv form the dev set. As in GLUE, the test file carries a running index instead of labels.
    Raises UserError if a line does not have its five columns.
    """
    header, *rows = _table(files["msr_paraphrase_train.txt"], "msr_paraphrase_train.txt")
    _, *test = _table(files["msr_paraphrase_test.txt"], "msr_paraphrase_test.txt")
    ids = files["mrpc_dev_ids.tsv"].read_text(encoding="utf-8-sig", errors="replace").splitlines()
    dev_pairs = {tuple(line.split("\t")[:2]) for line in ids}
    dev = [row for row in rows if (row[1], row[2]) in dev_pairs]
    train = [row for row in rows if (row[1], row[2]) not in dev_pairs]
    _write_table(into / "train.tsv", [header, *train])
    _write_table(into / "dev.tsv", [header, *dev])
    indexed = [[str(index), *row[1:]] for index, row in enumerate(test)]
    _write_table(into / "test.tsv", [["index", *header[1:]], *indexed])


def _checked(opened: zipfile.ZipFile, name: str, archive_bytes: int) -> list[tuple[PurePosixPath, zipfile.ZipInfo]]:
    """The archive's files with their paths inside it, or UserError where one of them is not to be unpacked."""
    infos = opened.infolist()
    if len(infos) > MOST_MEMBERS:
        raise UserError(f"{name} holds {len(infos)} members where at most {MOST_MEMBERS} were expected; not unpacked.")
    total = sum(info.file_size for info in infos)
    allowed = min(MOST_BYTES, max(ALWAYS_ALLOWED_BYTES, MOST_GROWTH * archive_bytes))
    if total > allowed:
        raise UserError(
            f"{name} of {archive_bytes} bytes would unpack to {total}, more than the {allowed} allowed; not unpacked."
        )
    members: dict[PurePosixPath, zipfile.ZipInfo] = {}
    alike: dict[str, PurePosixPath] = {}  # as a disk sees it that tells no case apart
    for info in infos:
        path = _inside(info.orig_filename, name)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _not_unpacked(name, path, "a link or special file")
        if info.is_dir() or _added_by_a_mac(path):
            continue
        if info.flag_bits & 0x1:
            raise _not_unpacked(name, path, "which is encrypted")
        folded = _folded(path)
        if folded in alike:
            other = alike[folded]
            also = "twice" if other == path else f"and {_quoted(other)}, which not every disk can tell apart"
            raise UserError(f"{name} holds {_quoted(path)} {also}; nothing of it was unpacked.")
        members[path] = info
        alike[folded] = path
    looked_at: set[PurePosixPath] = set()
    for path in members:
        for folder in path.parents:
            if folder in looked_at:
                break
            looked_at.add(folder)
            if _folded(folder) in alike:
                other = alike[_folded(folder)]
                raise _not_unpacked(name, other, f"a file, where {_quoted(path)} needs a folder")
    return list(members.items())


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


def _looks_like(archive: Path) -> str:
    with open(archive, "rb") as handle:
        start = handle.read(512).lstrip()
    return "it is a web page, perhaps the login page of this network" if start.startswith(b"<") else ""


def _table(path: Path, name: str) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    rows = [line.split("\t") for line in lines if line]
    for number, row in enumerate(rows, start=1):
        if len(row) != 5:
            raise UserError(f"{name} has {len(row)} columns in line {number} where five were expected.")
    if not rows:
        raise UserError(f"{name} is empty.")
    return rows


def _write_table(path: Path, rows: list[list[str]]) -> None:
    write_whole(path, "".join("\t".join(row) + "\n" for row in rows))
