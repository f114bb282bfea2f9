"""Reading files that anybody may have made: plain ones, of a size that fits, and JSON without NaN and infinities."""

import errno
import os
from collections.abc import Iterator
from typing import IO, Any

import msgspec

MOST_BYTES = 64 << 20  # of a file that is read at once; ours have at most some megabytes


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file. Raises OSError as `read_plain`, and ValueError if it is no JSON."""
    return parse_json(read_plain(path))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is none, is too deep, or has NaN or a number like 1e999."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_plain(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file. Raises OSError as `open_plain`, and if there are more than `most`."""
    with open_plain(path, "rb") as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return content


def open_plain(path: str | os.PathLike, mode: str = "r") -> IO[Any]:
    """Open a file for reading, as UTF-8 text or ("rb") as bytes. Raises OSError for a pipe, which may never end."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return open(path, mode) if "b" in mode else open(path, mode, encoding="utf-8", newline="\n")


def lines_of(file: IO[Any], most: int) -> Iterator[Any]:
    """The lines of a file. A longer line is split into parts of `most` characters, so that none fills the memory."""
    return iter(lambda: file.readline(most), b"" if "b" in file.mode else "")
