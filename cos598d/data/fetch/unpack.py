"""From a fetched file to a folder of data files, without trusting an archive's own claims."""

import contextlib
import errno
import gzip
import io
import lzma
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, NamedTuple

from cos598d.errors import UserError
from cos598d.terminal.files import write_whole
from cos598d.terminal.printable import printable

# GLUE's largest archive, MNLI, has a few dozen files and unpacks to about five times its size.
MOST_MEMBERS = 10_000
MOST_BYTES = 4 * 1024**3
MOST_GROWTH = 100
ALWAYS_ALLOWED_BYTES = 16 * 1024**2
_BLOCK = 1024 * 1024
# What zipfile, tarfile and the decompressors raise for a file that is not an archive, or a damaged one.
_DAMAGED = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError, MemoryError),
)
# From a broken bz2 stream, and for positions before the archive's start. Any other number is the disk's fault.
_DAMAGED_ERRNO = (None, errno.EINVAL)
# For a name that this disk does not accept: it exists, is a file where a folder is needed, or is too long.
_NAME_ERRNO = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EILSEQ)


class _Member(NamedTuple):
    """One member as its archive describes it: `size` in bytes when unpacked, `kind` as in `stat.S_IFMT` (0 if the
    archive does not have it), and a function that opens its content."""

    name: str
    size: int
    kind: int
    is_encrypted: bool
    content: Callable[[], IO[bytes] | None]


def unpack_zip(files: Mapping[str, Path], into: Path) -> Path:
    """Unpack one zip archive into the empty folder `into`. Return the folder in there that has the files.

    That is `into` without the folders that all files share: QQP-clean.zip's QQP/train.tsv is in into/QQP. Files that
    macOS adds are skipped. Raises UserError if the archive is damaged or its total unreasonably large. Also raises it
    if a member would land outside, is a link or another special file, is encrypted or has a name that the disk does not
    accept. Raises OSError if the disk refuses. The caller deletes `into` after a failure.
    """
    ((name, archive),) = files.items()
    with _refusing_damage(name, archive, "zip archive"), zipfile.ZipFile(archive) as opened:
        _take((_zip_member(opened, info) for info in opened.infolist()), name, archive.stat().st_size, into)
    return _inmost(into)


def _zip_member(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    kind = stat.S_IFDIR if info.is_dir() else stat.S_IFMT(info.external_attr >> 16)
    # Reading stops at the stated size and compares the CRC, so the check of sizes holds.
    return _Member(info.orig_filename, info.file_size, kind, bool(info.flag_bits & 1), lambda: opened.open(info))


def unpack_tar(files: Mapping[str, Path], into: Path) -> Path:
    """Unpack one gzipped tar archive, as `unpack_zip` does a zip. It is read to its end, where gzip's checksum is."""
    ((name, archive),) = files.items()
    size = archive.stat().st_size
    with _refusing_damage(name, archive, "gzipped tar archive"), gzip.open(archive) as file:
        stream = _Bounded(file, name, size)
        with tarfile.open(fileobj=stream, mode="r|") as opened:
            _take((_tar_member(opened, info) for info in opened), name, size, into)
        while stream.read(_BLOCK):
            pass
    return _inmost(into)


def _tar_member(opened: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    plain = info.isreg() and not info.issparse()  # a sparse file's size differs from what was read
    kind = stat.S_IFDIR if info.isdir() else stat.S_IFREG if plain else stat.S_IFLNK
    return _Member(info.name, info.size, kind, False, lambda: opened.extractfile(info))


def copy_files(files: Mapping[str, Path], into: Path) -> Path:
    """Use the fetched files unchanged, under their own names."""
    for name, path in files.items():
        shutil.copyfile(path, into / name)
    return into


def split_mrpc(files: Mapping[str, Path], into: Path) -> Path:
    """Make GLUE's train.tsv, dev.tsv and test.tsv from the paraphrase corpus and GLUE's list of dev pairs.

    The corpus consists of msr_paraphrase_train.txt and msr_paraphrase_test.txt (label, two ids, two sentences). The
    pairs of ids in mrpc_dev_ids.tsv form the dev set. As in GLUE, the test file has a running index instead of labels.
    Raises UserError if a line does not have its five columns.
    """
    header, *rows = _table(files["msr_paraphrase_train.txt"], "msr_paraphrase_train.txt")
    _, *test = _table(files["msr_paraphrase_test.txt"], "msr_paraphrase_test.txt")
    ids = files["mrpc_dev_ids.tsv"].read_text(encoding="utf-8-sig", errors="replace").splitlines()
    dev_pairs = {tuple(line.split("\t")[:2]) for line in ids}
    tables = {
        "train": [header, *(row for row in rows if (row[1], row[2]) not in dev_pairs)],
        "dev": [header, *(row for row in rows if (row[1], row[2]) in dev_pairs)],
        "test": [["index", *header[1:]], *([str(index), *row[1:]] for index, row in enumerate(test))],
    }
    for part, table in tables.items():
        write_whole(into / f"{part}.tsv", "".join("\t".join(row) + "\n" for row in table))
    return into


def _table(path: Path, name: str) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text ({error.reason} at byte {error.start}). Download it again."
        ) from error
    rows = [line.split("\t") for line in lines if line]
    for number, row in enumerate(rows, start=1):
        if len(row) != 5:
            raise UserError(f"{name} has {len(row)} columns in line {number}, not five. Download it again.")
    if not rows:
        raise UserError(f"{name} is empty. Download it again.")
    return rows


def _take(members: Iterable[_Member], name: str, archive_bytes: int, into: Path) -> None:
    """Write the files among the members into `into`, up to the allowed size."""
    total, allowed = 0, _allowed_bytes(archive_bytes)
    for count, member in enumerate(members, start=1):
        if count > MOST_MEMBERS:
            raise UserError(
                f"{name} holds more than the {MOST_MEMBERS} members that were expected, so it was not unpacked. Use "
                "another mirror."
            )
        total += member.size
        if total > allowed:
            raise UserError(
                f"{name} of {archive_bytes} bytes would unpack to {total} or more, and {allowed} are allowed, so it "
                "was not unpacked. Use another mirror."
            )
        windows = PureWindowsPath(member.name)  # handles both kinds of slashes, and drive letters
        if windows.anchor or ".." in windows.parts or "\0" in member.name or not windows.parts:
            raise _refused(name, member, "which leads outside its folder")
        if member.kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _refused(name, member, "a link or special file")
        path = PurePosixPath(*windows.parts)
        if member.kind == stat.S_IFDIR or _added_by_a_mac(path):
            continue
        if member.is_encrypted:
            raise _refused(name, member, "which is encrypted")
        source = member.content()
        if source is None:
            raise _refused(name, member, "which has no content")
        try:
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            with source, open(into / path, "xb") as copy:
                shutil.copyfileobj(source, copy, _BLOCK)
        except OSError as error:
            if error.errno not in _NAME_ERRNO:
                raise
            raise _refused(name, member, f"a name that the disk does not take ({error.strerror})") from error


def _allowed_bytes(archive_bytes: int) -> int:
    """The most bytes to which an archive of this size may unpack."""
    return min(MOST_BYTES, max(ALWAYS_ALLOWED_BYTES, MOST_GROWTH * archive_bytes))


def _refused(name: str, member: _Member, why: str) -> UserError:
    return UserError(
        f'{name} holds "{printable(member.name, 100)}", {why}. Nothing of it was kept. '
        "Download it again, or use another mirror."
    )


def _added_by_a_mac(path: PurePosixPath) -> bool:
    return "__MACOSX" in path.parts or path.name.startswith("._") or path.name in (".DS_Store", "Icon\r")


def _inmost(folder: Path) -> Path:
    """The innermost folder that has more than just one folder."""
    while len(inside := list(folder.iterdir())) == 1 and inside[0].is_dir():
        folder = inside[0]
    return folder


class _Bounded(io.BufferedIOBase):
    """The unpacked content of an archive of `size` bytes, read from the start, up to the allowed size."""

    def __init__(self, file: gzip.GzipFile, name: str, size: int):
        self._file, self._name, self._left = file, name, _allowed_bytes(size)

    def read(self, count: int | None = -1, /) -> bytes:
        most = self._left + 1
        found = self._file.read(most if count is None or count < 0 else min(count, most))
        self._left -= len(found)
        if self._left < 0:
            raise UserError(
                f"{self._name} unpacks to more than is allowed, so it was not unpacked. Use another mirror."
            )
        return found


@contextlib.contextmanager
def _refusing_damage(name: str, archive: Path, kind: str) -> Iterator[None]:
    """Raise a UserError for an archive that is damaged or not one; the error itself if it is the disk's fault."""
    try:
        yield
    except UserError:
        raise
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGED_ERRNO:
            raise
        with open(archive, "rb") as handle:
            is_page = handle.read(512).lstrip().startswith(b"<")
        page = "it is a web page, perhaps the login page of this network" if is_page else ""
        why = page or printable(error, 200).rstrip(".") or type(error).__name__
        raise UserError(f"{name} is not a complete {kind} ({why}). Download it again.") from error
