"""Files that appear complete or not at all, files that only grow, and folders in which only our files are deleted."""

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

# The name of an unfinished file, as `_beside` makes it; it stays if its process was killed.
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")

_unfinished: set[str] = set()


class Staged:
    """Files that belong together: each is written under a temporary name, and gets its own in `publish`.

    Use it as a context. When it ends, files that have not been published are removed, and older files stay unchanged.
    Every OSError names the file that the user knows.
    """

    def __init__(self) -> None:
        self._files: list[tuple[Path, str]] = []  # and their temporary names

    def open(self, path: Path, mode: str = "w") -> IO[Any]:
        """Open a file for writing, as UTF-8 text ("w") or bytes ("wb"), and create its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with names_errors(path):
            descriptor, beside = _beside(path, _create)
            self._files.append((path, beside))
            encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
            return os.fdopen(descriptor, mode, encoding=encoding, newline=newline)

    def write(self, path: Path, content: str) -> None:
        """Write a file's whole content to the disk. A full disk raises here, and `publish` only renames."""
        with names_errors(path), self.open(path) as handle:
            handle.write(content)
            handle.flush()
            sync_to_disk(handle.fileno())  # over a network, or with a quota, a full disk raises only here

    def publish(self) -> None:
        """Give the files their names, in the order in which they were opened."""
        while self._files:
            path, beside = self._files[0]
            with names_errors(path):
                os.replace(beside, path)
            _unfinished.discard(beside)
            del self._files[0]

    def close(self) -> None:
        """Remove the files that have not taken their names."""
        for _, beside in self._files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            _unfinished.discard(beside)
        self._files = []

    def __enter__(self) -> "Staged":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def whole_file(path: str | os.PathLike, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that gets the name `path` only when the block ends well.

    `mode` is "w" (UTF-8 text) or "wb". If the block raises, nothing is left, and an older file at `path` stays
    unchanged. An OSError without a file name gets the name `path`.
    """
    _refuse_devices(Path(path))
    with names_errors(Path(path)), Staged() as staged:
        with staged.open(Path(path), mode) as handle:
            yield handle
        staged.publish()


def write_together(contents: Mapping[Path, str]) -> None:
    """Write files that belong together, in this order. None gets its name before all are complete on the disk."""
    with Staged() as staged:
        for path, content in contents.items():
            _refuse_devices(path)
            staged.write(path, content)
        staged.publish()


@contextlib.contextmanager
def whole_folder(path: Path, ours: Collection[str] | None = None) -> Iterator[Path]:
    """Fill a folder that gets the name `path`, replacing an older one, only when the block ends well.

    With `ours`, only these files of the older folder are deleted. Everything else in it moves into the new folder.
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
        with contextlib.suppress(OSError):  # not if somebody else's files are left in it
            old.rmdir()
        _unfinished.discard(place)


@contextlib.contextmanager
def names_errors(path: Path) -> Iterator[None]:
    """In OSErrors of this context, name `path` if they name no file, or an unfinished one."""
    try:
        yield
    except OSError as error:
        if error.filename is None or _PARTIAL.fullmatch(os.path.basename(str(error.filename))):
            error.filename, error.filename2 = str(path), None
        raise


def sync_to_disk(descriptor: int) -> None:
    """Wait until an open file, or the names in an open folder, would survive a crash, if that is detectable."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def sync_folder(path: str | os.PathLike) -> None:
    """As `sync_to_disk`, for the names in the folder `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_to_disk(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unfinished(path: str | os.PathLike) -> Iterator[None]:
    """Delete `path`, a file or a folder, if this process is ended at once before the block ends."""
    _unfinished.add(str(path))
    try:
        yield
    finally:
        _unfinished.discard(str(path))


def _create(name: str) -> int:
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)


def _beside(path: Path, make: Callable[[str], Made]) -> tuple[Made, str]:
    """Call `make` with a free temporary name next to `path`. Return its result and the name."""
    while True:
        name = str(path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial"))
        try:
            made = make(name)
        except FileExistsError:
            continue
        _unfinished.add(name)
        return made, name


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` to `path`, completely or not at all."""
    with whole_file(path, "w" if isinstance(content, str) else "wb") as handle:
        handle.write(content)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, completely or not at all. Raises ValueError for NaN and infinities."""
    write_whole(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as indented JSON. Raises ValueError for NaN and infinities."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def open_own(path: str | os.PathLike, flags: int = 0) -> int:
    """A descriptor of a file that this program may change in place: a new file, or an existing plain one.

    Raises OSError for a link, a pipe and a file that has another name too. Otherwise whoever put it there could make us
    change somebody else's file.
    """
    descriptor = open_regular(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | flags)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "it is a hard link to another file", str(path))
    return descriptor


def own_folder(path: Path) -> None:
    """Create the folder `path`, or find it. Raises OSError if it is a link, since its target is not ours."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name matches one of these patterns, as in a shell: * matches anything."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def remove_known(folder: Path, ours: Collection[str]) -> None:
    """Delete the files in `folder` that match `ours` (see `is_named`) or are unfinished; then an empty `folder`.

    Links are deleted, never followed. A `folder` that is a link, or does not exist, stays as it is. Raises OSError.
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
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))


def remove_unfinished() -> None:
    """Delete this process's unfinished files and folders, just before it ends at once.

    A folder is renamed first. Otherwise a thread could just now give its final name to a half-deleted folder.
    """
    for beside in map(Path, list(_unfinished)):
        with contextlib.suppress(OSError):
            if beside.is_dir():
                shutil.rmtree(beside.rename(beside.with_suffix(".removed")))
            else:
                beside.unlink()


def cache_folder() -> Path:
    """The folder for disposable files: COS598D_CACHE, else XDG_CACHE_HOME/cos598d, else ~/.cache/cos598d."""
    chosen = os.environ.get("COS598D_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cos598d"
    except RuntimeError:  # no HOME, and a user unknown to the system, as in some containers
        raise UserError("this user has no home folder. Set COS598D_CACHE to a folder for caches.") from None
