"""Files that appear whole or not at all: written beside their name, then renamed."""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from cos598d.errors import UserError

Made = TypeVar("Made")

# Each number that no float can hold has one of these in it.
_MAY_BE_LARGE = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{100}")

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
        descriptor, beside = _beside(path, _create)
        encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
        with os.fdopen(descriptor, mode, encoding=encoding, newline=newline) as handle:
            yield handle
        os.replace(beside, path)
    except BaseException as error:
        if beside:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
        if isinstance(error, OSError) and error.filename in (None, beside):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        _unfinished.discard(beside)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that takes the name `path`, in place of an older one, only when the block ends well."""
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
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
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
        with self._named():
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
        with self._named():
            self._handle.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Add to its end."""
        with self._named():
            self._handle.writelines(lines)

    def complete(self) -> None:
        """Write all of it to the disk under a temporary name: a full disk raises here, `publish` only renames."""
        with self._named():
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
        with self._named():
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
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path), None
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
    """The value in a JSON file. Raises ValueError as `parse_json` does, OSError as `open` does."""
    return parse_json(Path(path).read_text(encoding="utf-8"))


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, has NaN or infinities (1e999), or is too deep."""
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
