"""Reading files that anybody may have made: never a pipe, never more than fits, never a non-finite number."""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from typing import IO, Any

# For a file that is read at once. Ours have at most some megabytes.
MOST_BYTES = 64 << 20
MOST_VALUES = 4_000_000  # the losses of a run with this many iterations
# Every number too large for a float matches this.
_MAY_BE_LARGE = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{100}")


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file. Raises ValueError as `parse_json` does, OSError as `read_plain` does."""
    return parse_json(read_plain(path).decode("utf-8"))


def read_plain(path: str | os.PathLike, most: int = MOST_BYTES, follows: bool = True) -> bytes:
    """The bytes of a file, opened as by `open_plain`. Raises OSError, also if there are more than `most`."""
    with open_plain(path, "rb", follows) as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return content


def open_plain(path: str | os.PathLike, mode: str = "r", follows: bool = True) -> IO[Any]:
    """Open a file for reading, as UTF-8 text or ("rb") as bytes. Raises OSError, also for a folder and a pipe.

    Reading a pipe would wait for its writer. Unless it `follows` links, a link raises too.
    """
    flags = os.O_RDONLY | (0 if follows else getattr(os, "O_NOFOLLOW", 0))
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "\n")
    return open(open_regular(path, flags), mode, encoding=encoding, newline=newline)


def open_regular(path: str | os.PathLike, flags: int) -> int:
    """A descriptor of a plain file. Raises OSError for a folder, a pipe and everything else."""
    try:
        more = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(path, flags | more, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            error.strerror = "it is a link"
        elif error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            error.strerror = "it is not a plain file"
        raise
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        reason = os.strerror(number) if stat.S_ISDIR(kind) else "it is not a plain file"
        raise OSError(number, reason, str(path))
    return descriptor


def lines_of(file: IO[Any], most: int) -> Iterator[Any]:
    """The lines of a file. A longer line is split into parts of `most` characters, so that none fills the memory."""
    return iter(lambda: file.readline(most), b"" if "b" in file.mode else "")


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, has NaN or infinities (1e999), is too deep, or has
    more than MOST_VALUES values: each takes up to a hundred times the memory of its text."""
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    # Checking each number takes longer than reading it, so only if one may be too large.
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
