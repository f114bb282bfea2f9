"""Files that appear whole or not at all, files that only grow, and the reading of files that anybody may have made."""

import contextlib
import errno
import fnmatch
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from cos598d.errors import UserError

Made = TypeVar("Made")

# Each number that no float can hold has one of these in it.
_MAY_BE_LARGE = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{100}")

# What `_beside` calls an unfinished file; it is left where its process was killed.
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
# Of a file that is read at once. Honest ones of ours have some megabytes at most.
MOST_BYTES = 64 << 20
MOST_VALUES = 4_000_000  # the losses of a run of so many iterations

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


def write_together(contents: Mapping[Path, str]) -> None:
    """Write files that belong together: none takes its name before all are whole on the disk, in this order."""
    files: list[GrowingFile] = []
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _refuse_devices(path)
            files.append(GrowingFile(path))
            files[-1].write(content)
            files[-1].complete()
        for file in files:
            file.publish()
    finally:
        for file in files:
            file.close()


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. NaN and infinities are refused (ValueError)."""
    write_whole(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as indented JSON. NaN and infinities are refused (ValueError)."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file. Raises ValueError as `parse_json` does, OSError as `read_plain` does."""
    return parse_json(read_plain(path).decode("utf-8"))


def open_plain(path: str | os.PathLike, mode: str = "r", follows: bool = True) -> IO[Any]:
    """Open a file for reading, as UTF-8 text or ("rb") as bytes; a folder and a pipe are refused. Raises OSError.

    Reading a pipe would wait for whoever writes to it. Unless it `follows` links, a link is refused too.
    """
    flags = os.O_RDONLY | (0 if follows else getattr(os, "O_NOFOLLOW", 0))
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
    return open(_open_regular(path, flags), mode, encoding=encoding, newline=newline)


def read_plain(path: str | os.PathLike, most: int = MOST_BYTES, follows: bool = True) -> bytes:
    """The bytes of a file, opened as by `open_plain`. Raises OSError, also where there are more than `most`."""
    with open_plain(path, "rb", follows) as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return content


def lines_of(file: IO[Any], most: int) -> Iterator[Any]:
    """The lines of a file, one that is longer in parts of `most` characters, so that no line fills the memory."""
    return iter(lambda: file.readline(most), b"" if "b" in file.mode else "")


def open_own(path: str | os.PathLike, flags: int = 0) -> int:
    """A descriptor of a file that this program may change in place: made if it is not there, else a plain file.

    Raises OSError for a link, a pipe and a file that has another name too: whoever put it there could have somebody
    else's file changed.
    """
    descriptor = _open_regular(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | flags)
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


def _open_regular(path: str | os.PathLike, flags: int) -> int:
    try:
        more = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(path, flags | more, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            error.strerror = "it is a link"
        elif error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            error.strerror = "it is no plain file"
        raise
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        reason = os.strerror(number) if stat.S_ISDIR(kind) else "it is no plain file"
        raise OSError(number, reason, str(path))
    return descriptor


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


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, has NaN or infinities (1e999), is too deep, or has
    more than MOST_VALUES values: each takes up to a hundred times the memory of its text."""
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    # To look at each number takes longer than to read it: only where one may be too large.
    parse_float = _finite if _MAY_BE_LARGE.search(text) else None
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=parse_float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


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
