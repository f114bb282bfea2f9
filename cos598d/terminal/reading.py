"""Reading files that anybody may have made: plain ones, of a size that fits, and JSON without NaN and infinities."""

import errno
import os
from typing import Any

import msgspec

MOST_BYTES = 64 << 20  # of a file that is read at once; ours have at most some megabytes


def read_json(path: str | os.PathLike) -> Any:
    """The value in a JSON file. Raises OSError as `read_plain`, and ValueError if it is no JSON, is too deep, or has
    NaN or a number like 1e999."""
    try:
        return msgspec.json.decode(read_plain(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_plain(path: str | os.PathLike) -> bytes:
    """The bytes of a file. Raises OSError for a pipe, which may never end, and if there are more than MOST_BYTES."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return content
