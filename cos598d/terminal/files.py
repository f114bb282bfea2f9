"""Files and folders that appear complete or not at all: they are written under another name, and renamed at the end."""

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cos598d.errors import UserError


@contextlib.contextmanager
def whole_file(path: str | os.PathLike, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file for writing that gets the name `path` only when the block ends well.

    `mode` is "w" (UTF-8 text) or "wb". If the block raises, nothing is left, and an older file stays unchanged. An
    OSError names `path`, also for a device or a folder, which no file may replace.
    """
    path = Path(path)
    beside = _beside(path)
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, mode, encoding=encoding, newline=newline) as file:
            yield file
        os.replace(beside, path)
    except OSError as error:
        if error.filename in (None, str(beside)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that gets the name `path`, in place of an older one, only when the block ends well."""
    beside = _beside(path)
    beside.mkdir(parents=True)
    try:
        yield beside
        if path.exists():
            shutil.rmtree(path)
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` to `path`, completely or not at all."""
    with whole_file(path, "w" if isinstance(content, str) else "wb") as file:
        file.write(content)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, completely or not at all. Raises ValueError for NaN and infinities."""
    write_whole(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as indented JSON. Raises ValueError for NaN and infinities."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def cache_folder() -> Path:
    """The folder for disposable files: COS598D_CACHE, else XDG_CACHE_HOME/cos598d, else ~/.cache/cos598d."""
    chosen = os.environ.get("COS598D_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cos598d"
    except RuntimeError:  # no HOME, and a user unknown to the system, as in some containers
        raise UserError("this user has no home folder. Set COS598D_CACHE to a folder for caches.") from None
