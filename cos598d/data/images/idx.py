"""MNIST's own files: numbers of one byte in as many dimensions as the file's head says, plain or gzipped."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from cos598d.errors import UserError

_UNSIGNED_BYTE = 0x08
_MOST_BYTES = 1 << 30  # a head that promises more is not believed; MNIST's largest file holds 47 MB


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array in an IDX file, uint8; its format is told at http://yann.lecun.com/exdb/mnist.

    Raises UserError where it cannot be read, is of another kind or number of dimensions, or longer or shorter than its
    head says.
    """
    try:
        return parse_idx(path, dimensions)
    except ValueError as error:
        raise UserError(f"{path} cannot be read as an IDX file ({error}): fetch it again.") from error


def parse_idx(path: Path, dimensions: int) -> np.ndarray:
    """As `read_idx`, but what is wrong with the file is a ValueError in words that go on with its name."""
    try:
        with open(path, "rb") as plain:
            is_packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            with gzip.GzipFile(fileobj=plain) if is_packed else plain as file:
                head = file.read(4 + 4 * dimensions)
                if head[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]) or len(head) < 4 + 4 * dimensions:
                    raise ValueError(f"it does not begin as an IDX file of {dimensions} dimensions does")
                shape = struct.unpack(f">{dimensions}I", head[4:])
                size = math.prod(shape)
                if not 0 < size <= _MOST_BYTES:
                    raise ValueError(f"its head says {' x '.join(map(str, shape))} values")
                content = file.read(size + 1)  # not all that there may be: a few bytes can unpack to any number
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(getattr(error, "strerror", None) or error)) from error
    if len(content) != size:
        problem = "ends early" if len(content) < size else "goes on after its end"
        raise ValueError(f"it {problem}: its head says {' x '.join(map(str, shape))} values")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
