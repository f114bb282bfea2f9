"""Images as files of a folder or a zip archive: listing them, reading them, and decoding a part of them."""

import hashlib
import os
import stat
import threading
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from cos598d.data.images.decode import MOST_BYTES, SUFFIXES, Refused, check_pillow, decode
from cos598d.data.images.encoder import ImageEncoder
from cos598d.data.images.task import ImageSource
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

MOST_FILES = 5_000_000
_THREADS = 8  # at most; Pillow decodes without Python's lock
_BLOCK = 4096  # files that wait for a thread at a time
_NAMED = 3  # refused files that an error names


class ImageStore(ABC):
    """name: for errors. files: the paths of all images in it, sorted, with "/" between their parts."""

    name: str
    files: list[str]

    @abstractmethod
    def read(self, file: str) -> bytes:
        """A file's content; safe to call from several threads. Raises Refused."""

    @abstractmethod
    def stamp(self, file: str) -> str:
        """A value that changes when the file does, found without reading it."""


class Folder(ImageStore):
    """A folder on disk. A link that leads out of it is refused; hidden files are skipped."""

    def __init__(self, path: Path):
        self.name, self._root = str(path), path.resolve()
        found = []
        for folder, folders, files in os.walk(path, followlinks=False):
            folders[:] = [one for one in folders if not one.startswith(".")]
            linked = [one for one in folders if (Path(folder) / one).is_symlink()]
            if linked:
                raise UserError(
                    f"{Path(folder) / linked[0]} is a link to a folder, which is not followed. Put the images there."
                )
            inside = Path(folder).relative_to(path)
            found += [(inside / one).as_posix() for one in files if _is_image(one)]
            if len(found) > MOST_FILES:
                raise UserError(f"{path} holds more than {MOST_FILES:,} images. Give a folder with fewer.")
        self.files = sorted(found)

    def read(self, file: str) -> bytes:
        path = self._root / file
        if self._root not in path.resolve().parents:
            raise Refused("is a link that leads out of its folder")
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise Refused("is not a plain file")
            with open(path, "rb") as handle:
                return handle.read(MOST_BYTES + 1)
        except OSError as error:
            raise Refused(f"cannot be read ({error.strerror})") from error

    def stamp(self, file: str) -> str:
        path = self._root / file
        found = path.stat() if path.exists() else path.lstat()
        return f"{file} {found.st_size} {found.st_mtime_ns}"


class Archive(ImageStore):
    """A zip archive. Nothing is unpacked onto the disk."""

    def __init__(self, path: Path):
        self.name = str(path)
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise UserError(f"{path} cannot be read as a zip archive ({error}). Fetch it again.") from error
        self._members = {}
        for member in self._archive.infolist():
            parts = PurePosixPath(member.filename).parts
            if member.is_dir() or not _is_image(parts[-1] if parts else ""):
                continue
            if member.filename.startswith("/") or ".." in parts or "\\" in member.filename:
                raise UserError(
                    f"{path} holds {printable(repr(member.filename), 100)}, a path that leads out of the archive. "
                    "Give one whose paths stay inside."
                )
            if parts[0] != "__MACOSX" and not any(part.startswith(".") for part in parts):
                self._members["/".join(parts)] = member
        if len(self._members) > MOST_FILES:
            raise UserError(f"{path} holds more than {MOST_FILES:,} images. Give an archive with fewer.")
        self.files = sorted(self._members)
        self._lock = threading.Lock()

    def read(self, file: str) -> bytes:
        member = self._members[file]
        if member.file_size > MOST_BYTES:
            raise Refused(f"is a file of more than {MOST_BYTES >> 20} MB")
        if member.flag_bits & 1:
            raise Refused("is encrypted")
        try:
            with self._lock, self._archive.open(member) as handle:
                return handle.read(MOST_BYTES + 1)  # whatever size the archive claims
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise Refused(f"cannot be unpacked ({error})") from error

    def stamp(self, file: str) -> str:
        member = self._members[file]
        return f"{file} {member.file_size} {member.CRC}"


def open_store(path: Path) -> ImageStore:
    """The folder or the archive at `path`."""
    return Folder(path) if path.is_dir() else Archive(path)


def _is_image(name: str) -> bool:
    return not name.startswith(".") and PurePosixPath(name).suffix.lower() in SUFFIXES


class ImageFiles(ImageSource):
    """`files` of a store and the class number of each, decoded by several threads."""

    def __init__(self, store: ImageStore, files: Sequence[str], labels: np.ndarray, words: str):
        """`words`: a phrase for this part, for a bar while it is decoded."""
        check_pillow()
        self.files, self.labels = list(files), labels.astype(np.int64)
        self._store, self._words = store, words
        digest = hashlib.sha256(self.labels.tobytes())
        for file in self.files:
            digest.update(store.stamp(file).encode("utf-8", "surrogateescape") + b"\0")
        self.digest = digest.hexdigest()

    def pixels(self, places: np.ndarray, encoder: ImageEncoder) -> np.ndarray:
        from tqdm import tqdm

        def decoded(place: int) -> np.ndarray | str:
            """The image, or why it is refused."""
            file = self.files[place]
            try:
                return encoder.fit(decode(self._store.read(file))[None])[0]
            except Refused as why:
                return f"{printable(file, 100)} {why}"

        found = np.empty((len(places), encoder.size, encoder.size, encoder.channels), dtype=np.uint8)
        refused: list[str] = []
        bar = tqdm(None, f"{self._words}: images", len(places), unit=" images", delay=2, disable=None, leave=False)
        with bar, ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "decode") as pool:
            for start in range(0, len(places), _BLOCK):
                block = places[start : start + _BLOCK].tolist()
                for number, one in enumerate(pool.map(decoded, block), start):
                    bar.update()
                    if isinstance(one, str):
                        refused.append(one)
                    else:
                        found[number] = one
        if refused:
            more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            raise UserError(
                f"{printable(self._store.name, 200)}: {'; '.join(refused[:_NAMED])}{more}. Fix or remove "
                f"{'them' if len(refused) > 1 else 'it'}."
            )
        return found
