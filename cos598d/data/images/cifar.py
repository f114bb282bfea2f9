"""CIFAR-10's batches, which are pickles: they are read by an unpickler that knows nothing but what they are made of."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.errors import UserError

SIDE = 32
_VALUES = 3 * SIDE * SIDE
_MOST_BYTES = 64 << 20  # a batch of 10,000 images has 31 MB
_MOST_CLASSES = 10


class _Type:
    """Stands for a numpy type. Only unsigned bytes are expected."""

    def __init__(self, name: bytes | str, *_: Any):
        if name not in (b"u1", "u1"):
            raise pickle.UnpicklingError("its values are not unsigned bytes")

    def __setstate__(self, state: Any) -> None:
        """Their order within a number, which bytes do not have."""


class _Array:
    """Stands for a numpy array; `values` is (images, 3072)."""

    values: np.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _Type) or not isinstance(content, bytes) or is_fortran:
            raise pickle.UnpicklingError("its array is not one of plain bytes")
        if len(shape) != 2 or shape[1] != _VALUES or len(content) != shape[0] * _VALUES:
            raise pickle.UnpicklingError(f"its array has the shape {shape}, not (images, {_VALUES})")
        self.values = np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _new_array(*_: Any) -> _Array:
    return _Array()


class _Unpickler(pickle.Unpickler):
    """Knows the three names that an array of bytes needs, and has something harmless of its own for each."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("numpy.core.multiarray", "_reconstruct"): _new_array,
            ("numpy._core.multiarray", "_reconstruct"): _new_array,
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Type,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs")
        return known[module, name]


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 (images, 32, 32, 3), and the numbers of their classes, int64, of one batch.

    The format is told at https://www.cs.toronto.edu/~kriz/cifar.html. Nothing in the file is called. Raises UserError
    where it cannot be read or holds anything else.
    """
    try:
        return parse_batch(path)
    except ValueError as error:
        raise UserError(f"{path} cannot be read as a batch of CIFAR-10 ({error}): fetch it again.") from error


def parse_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """As `read_batch`, but what is wrong with the file is a ValueError in words that go on with its name."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise pickle.UnpicklingError(f"it is larger than {_MOST_BYTES >> 20} MB")
        with open(path, "rb") as file:
            found = _Unpickler(file, encoding="bytes").load()
        array, labels = found[b"data"], found[b"labels"]
        if not isinstance(array, _Array) or not isinstance(labels, list) or len(labels) != len(array.values):
            raise pickle.UnpicklingError("it does not hold an array of images with a label for each")
        if not all(type(label) is int and 0 <= label < _MOST_CLASSES for label in labels):
            raise pickle.UnpicklingError(f"its labels are not numbers from 0 to {_MOST_CLASSES - 1}")
    except Exception as error:  # a pickle that is none can raise whatever there is
        why = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise ValueError(why) from error
    return array.values.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1), np.array(labels, dtype=np.int64)
