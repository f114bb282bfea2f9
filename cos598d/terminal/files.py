"""Files that appear whole or not at all, files that only grow, and folders of which only our files are deleted."""

import contextlib
import errno
import fnmatch
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from cos598d.errors import UserError
from cos598d.terminal.reading import open_regular

Made = TypeVar("Made")

# What `_beside` calls an unfinished file; it is left where its process was killed.
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")

_unfinished: set[str] = set()


@contextlib.contextmanager
def whole_file(path: str | os.PathLike, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that takes the name `path` only when the block ends well.

    `mode` is "w" (UTF-8 text) or "wb". If the block raises, nothing is left behind, and an older file at `path` stays
    as it is. An OSError that names no file, or the unfinished one, then names `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = ""
    try:
        _refuse_devices(path)
        descriptor, beside = _beside(path, _create)
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
        with os.fdopen(descriptor, mode, encoding=encoding, newline=newline) as handle:
            yield handle
        os.replace(beside, path)
    except BaseException as error:
        if beside:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
        is_beside = isinstance(error, OSError) and _PARTIAL.fullmatch(os.path.basename(str(error.filename)))
        if isinstance(error, OSError) and (error.filename is None or is_beside):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        _unfinished.discard(beside)


@contextlib.contextmanager
def whole_folder(path: Path, ours: Collection[str] | None = None) -> Iterator[Path]:
    """Fill a folder that takes the name `path`, in place of an older one, only when the block ends well.

    With `ours`, only the files of these names go with the older one: everything else in it moves into the new folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _, place = _beside(path, os.mkdir)
    beside, old = Path(place), Path(place).with_suffix(".old")
    try:
        yield beside
        if path.is_dir() and not path.is_symlink():
            path.rename(old)
        try:
            beside.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        if ours is not None:
            remove_known(old, ours)
            for foreign in list(old.iterdir()) if old.exists() else ():
                if not os.path.lexists(path / foreign.name):
                    foreign.rename(path / foreign.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if ours is None:
            shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):  # not where something of somebody else's is left
            old.rmdir()
        _unfinished.discard(place)


class GrowingFile:
    """A text file that grows during a run and takes the name `path` when it is whole, without being copied.

    Until `complete` it has no name, where the file system allows that: it vanishes with the process, however that ends.
    After `complete`, and on other file systems from the start, it has a temporary name beside `path`. Every OSError
    names `path`, which is what the user knows.
    """

    def __init__(self, path: Path):
        self.path = path
        self._beside: str | None = None
        self._is_complete = False
        with names_errors(self.path):
            try:
                descriptor = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
                if not os.path.exists(_by_descriptor(descriptor)):  # a container that does not show /proc
                    os.close(descriptor)
                    raise OSError(errno.EOPNOTSUPP, "it could not be named later")
            except (AttributeError, OSError) as error:  # another system than Linux, or NFS and the like
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
                    raise
                descriptor, self._beside = _beside(path, _create)
            self._handle = os.fdopen(descriptor, "w", encoding="utf-8", newline="\n")

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been written yet."""
        return self._handle.tell() == 0

    def write(self, text: str) -> None:
        """Add to its end."""
        with names_errors(self.path):
            self._handle.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Add to its end."""
        with names_errors(self.path):
            self._handle.writelines(lines)

    def complete(self) -> None:
        """Write all of it to the disk under a temporary name: a full disk raises here, `publish` only renames."""
        with names_errors(self.path):
            self._handle.flush()
            sync_to_disk(self._handle.fileno())  # over a network, or with a quota, a full disk raises only here
            self._is_complete = True
            if self._beside is None:
                source = _by_descriptor(self._handle.fileno())
                # Only with a folder's descriptor does Python follow the link to the file that has no name.
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    _, self._beside = _beside(
                        self.path, lambda name: os.link(source, name, src_dir_fd=folder, follow_symlinks=True)
                    )
                finally:
                    os.close(folder)

    def publish(self) -> None:
        """Take the name, in place of an older file. Nothing can be written after this."""
        if not self._is_complete:
            self.complete()
        assert self._beside is not None  # `complete` has named it
        with names_errors(self.path):
            self._handle.flush()
            os.replace(self._beside, self.path)
        self._forget(self._beside)

    def close(self) -> None:
        """Close it. Without `publish` nothing is left."""
        with contextlib.suppress(OSError):  # what is thrown away may not fit on the disk
            self._handle.close()
        if self._beside is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._beside)
            self._forget(self._beside)

    def _forget(self, beside: str) -> None:
        _unfinished.discard(beside)
        self._beside = None


@contextlib.contextmanager
def names_errors(path: Path) -> Iterator[None]:
    """Let an OSError in this context name `path`, whatever file beside it failed."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def sync_to_disk(descriptor: int) -> None:
    """Wait until an open file, or the names in an open folder, would survive a crash, if the file system can tell."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def sync_folder(path: str | os.PathLike) -> None:
    """As `sync_to_disk`, the names of what is in the folder `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_to_disk(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unfinished(path: str | os.PathLike) -> Iterator[None]:
    """Have `path`, a file or a folder, deleted if this process ends at once before the block does."""
    _unfinished.add(str(path))
    try:
        yield
    finally:
        _unfinished.discard(str(path))


def _by_descriptor(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _create(name: str) -> int:
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)


def _beside(path: Path, make: Callable[[str], Made]) -> tuple[Made, str]:
    """What `make` returns for a free temporary name beside `path`, and that name."""
    while True:
        name = str(path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial"))
        try:
            made = make(name)
        except FileExistsError:
            continue
        _unfinished.add(name)
        return made, name


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` to `path` whole or not at all."""
    with whole_file(path, "w" if isinstance(content, str) else "wb") as handle:
        handle.write(content)


class Staged:
    """Files that belong together: none takes its name before all are whole on the disk. Use as a context."""

    def __init__(self) -> None:
        self._files: list[GrowingFile] = []

    def write(self, path: Path, content: str) -> None:
        """Bring `content` to the disk, yet unnamed. Raises OSError, which names the file."""
        self._files.append(GrowingFile(path))
        self._files[-1].write(content)
        self._files[-1].complete()

    def publish(self) -> None:
        """Give them their names, in the order in which they came."""
        for file in self._files:
            file.publish()

    def __enter__(self) -> "Staged":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close them; those without a name vanish."""
        for file in self._files:
            file.close()


def write_together(contents: Mapping[Path, str]) -> None:
    """Write files that belong together, in this order, and make the folders that they need."""
    with Staged() as staged:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _refuse_devices(path)
            staged.write(path, content)
        staged.publish()


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinities are refused (ValueError)."""
    write_whole(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as indented JSON. NaN and infinities are refused (ValueError)."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def open_own(path: str | os.PathLike, flags: int = 0) -> int:
    """A descriptor of a file that this program may change in place: made if it is not there, else a plain file.

    Raises OSError for a link, a pipe and a file that has another name too: whoever put it there could have somebody
    else's file changed.
    """
    descriptor = open_regular(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | flags)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "it is a hard link to another file", str(path))
    return descriptor


def own_folder(path: Path) -> None:
    """Make the folder `path`, or find it there. Raises OSError where it is a link: what it leads to is not ours."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name is one of these patterns, as a shell's: * stands for anything."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def remove_known(folder: Path, ours: Collection[str]) -> None:
    """Delete the files in `folder` with names as in `ours` (see `is_named`) and those that were never finished, and
    the folder if that empties it.

    Links are deleted, never followed. A `folder` that is a link, or not there, stays as it is. Raises OSError.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another rank may do the same
        for place in list(folder.iterdir()):
            is_ours = is_named(place.name, ours) or _PARTIAL.fullmatch(place.name)
            if is_ours and (place.is_symlink() or not place.is_dir()):
                place.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _refuse_devices(path: Path) -> None:
    """Raise OSError for what must not be replaced by a file: a device such as /dev/null, a pipe, a folder."""
    try:
        kind = path.stat().st_mode
    except OSError:
        return
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))


def remove_unfinished() -> None:
    """Delete this process's unfinished files and folders, when it is about to end at once.

    A folder gets another name first: a thread that gives it its own just now would give it to what is half deleted.
    """
    for beside in map(Path, list(_unfinished)):
        with contextlib.suppress(OSError):
            if beside.is_dir():
                shutil.rmtree(beside.rename(beside.with_suffix(".removed")))
            else:
                beside.unlink()


def cache_folder() -> Path:
    """The folder for what can be made again: COS598D_CACHE, else XDG_CACHE_HOME/cos598d, else ~/.cache/cos598d."""
    chosen = os.environ.get("COS598D_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cos598d"
    except RuntimeError:  # no HOME, and a user that the system does not know, as in some containers
        raise UserError(
            "this user has no home folder: set COS598D_CACHE to a folder for what can be made again."
        ) from None
