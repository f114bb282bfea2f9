"""From a fetched file to a folder of data files, trusting nothing that an archive says about itself."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NoReturn

from cos598d.data.fetch.members import Member, allowed_bytes, files_of
from cos598d.errors import UserError
from cos598d.terminal.files import write_whole
from cos598d.terminal.printable import printable

_BLOCK = 1024 * 1024
# What zipfile, tarfile and the decompressors raise for a file that is not an archive, or a damaged one.
_DAMAGED = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError, MemoryError),
)
# Of a broken bz2 stream, of places before the archive's begin, of names that a disk does not take.
_NOT_THE_DISKS = (None, errno.EINVAL, errno.EILSEQ)


def unpack_zip(files: Mapping[str, Path], into: Path) -> None:
    """Unpack one zip archive into the folder `into`, without the folder that all its members share.

    Raises UserError if the archive is broken or not a zip, or holds what `files_of` refuses; OSError if the disk
    refuses. A failure can leave files in `into`, which the caller throws away.
    """
    ((name, archive),) = files.items()
    try:
        with zipfile.ZipFile(archive) as opened:
            for path, info in files_of(_zipped(opened), name, archive.stat().st_size):
                # Reading stops at the declared size and compares the CRC, so the check of sizes holds.
                with opened.open(info) as source:
                    _write(source, into / path)
    except UserError:
        raise
    except (*_DAMAGED, OSError) as error:
        _refuse(error, name, archive, "zip archive")


def unpack_tar(files: Mapping[str, Path], into: Path) -> None:
    """Unpack one gzipped tar archive, as `unpack_zip` does a zip.

    It is read twice: to its end, where gzip's checksum stands, to look at all members, and where nothing is wrong with
    any of them once more to unpack them.
    """
    ((name, archive),) = files.items()
    size = archive.stat().st_size
    try:
        with gzip.open(archive) as file:
            stream = _Bounded(file, name, size)
            paths = {info.offset: path for path, info in files_of(_tarred(stream), name, size)}
        with gzip.open(archive) as file, tarfile.open(fileobj=_Bounded(file, name, size), mode="r|") as opened:
            for info in opened:
                source = opened.extractfile(info) if info.offset in paths else None
                if source is not None:
                    _write(source, into / paths[info.offset])
    except UserError:
        raise
    except (*_DAMAGED, OSError) as error:
        _refuse(error, name, archive, "gzipped tar archive")


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


def _zipped(opened: zipfile.ZipFile) -> Iterator[Member[zipfile.ZipInfo]]:
    for info in opened.infolist():
        kind = stat.S_IFDIR if info.is_dir() else stat.S_IFMT(info.external_attr >> 16)
        yield Member(info.orig_filename, info.file_size, kind, info, is_encrypted=bool(info.flag_bits & 0x1))


def _tarred(stream: "_Bounded") -> Iterator[Member[tarfile.TarInfo]]:
    with tarfile.open(fileobj=stream, mode="r|") as opened:
        for info in opened:
            plain = info.isreg() and not info.issparse()  # a sparse file's size says nothing of what was read
            kind = stat.S_IFDIR if info.isdir() else stat.S_IFREG if plain else stat.S_IFLNK
            yield Member(info.name, info.size, kind, info)
    while stream.read(_BLOCK):
        pass


class _Bounded(io.BufferedIOBase):
    """What an archive of `size` bytes unpacks to, read from the begin on, and no further than it may grow."""

    def __init__(self, file: gzip.GzipFile, name: str, size: int):
        self._file, self._name, self._left = file, name, allowed_bytes(size)

    def read(self, count: int | None = -1, /) -> bytes:
        most = self._left + 1
        found = self._file.read(most if count is None or count < 0 else min(count, most))
        self._left -= len(found)
        if self._left < 0:
            raise UserError(f"{self._name} unpacks to more than is allowed; not unpacked.")
        return found


def _write(source: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") as copy:
        shutil.copyfileobj(source, copy, _BLOCK)


def _refuse(error: Exception, name: str, archive: Path, kind: str) -> NoReturn:
    """Raise the sentence for an archive that is damaged or none; the error itself where the disk is to blame."""
    if isinstance(error, OSError) and error.errno not in _NOT_THE_DISKS:
        raise error
    why = _looks_like(archive) or printable(error, 200).rstrip(".") or type(error).__name__
    raise UserError(f"{name} is not a whole {kind} ({why}).") from error


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
