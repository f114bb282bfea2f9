"""CIFAR-10: photographs of 32 x 32 pixels, of ten kinds of things and animals.

Its published batches are pickles. They are read by an unpickler that knows only what an array of bytes needs, so that
nothing in a file is called.
"""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data.images.files import open_store
from cos598d.data.images.folder import FoundImages, ImageFolderTask, find_classes
from cos598d.data.images.task import VARIABLE, ImagesInMemory, ImageSource, candidates
from cos598d.data.task import fetch_command
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "dev": ["test_batch"]}
_SIDE = 32
_VALUES = 3 * _SIDE * _SIDE
_MOST_BYTES = 64 << 20  # a batch of 10,000 images has 31 MB


class Cifar10Task(ImageFolderTask):
    """50,000 photographs to train on and 10,000 to evaluate on (Krizhevsky 2009), in the python version's batches. Any
    part of them as JPEGs also works, a folder for each class, in a folder or a zip archive.

    A location is the batches' folder, or the contents of a folder or archive of images.
    """

    name = "cifar10"
    size, channels = _SIDE, 3
    classes = _CLASSES

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Path | FoundImages, str]:
        self.num_labels = len(_CLASSES)
        names = ["", "cifar-10-batches-py", "cifar10", "CIFAR10", "CIFAR10/cifar-10-batches-py"]
        named = data_dir or environ.get(VARIABLE)
        if named and Path(named).is_dir():
            names += sorted(one.name for one in Path(named).glob("[cC][iI][fF][aA][rR]*.zip"))
        for path, words in candidates(data_dir, environ, names):
            if (path / _BATCHES["dev"][0]).is_file():
                return path, words
            if path.is_file() or {one.name for one in path.glob("*")} & {"train", *_CLASSES}:
                found = find_classes(open_store(path))
                if unknown := set(found.classes) - set(_CLASSES):
                    raise UserError(
                        f"{path} has a class {printable(min(unknown), 100)}, which is not in CIFAR-10. Give its "
                        "images, or --task_name image_folder."
                    )
                return FoundImages(found.store, _CLASSES, found.parts), words
        raise UserError(
            f"No images of CIFAR-10 in {named or 'any folder that was named'}. Set --data_dir or {VARIABLE} to the "
            "folder cifar-10-batches-py, or to a folder or a zip archive of images with one folder for each class; or "
            f"fetch it with {fetch_command('CIFAR10')}."
        )

    def source(self, part: str, location: Path | FoundImages) -> ImageSource:
        if isinstance(location, FoundImages):
            return super().source(part, location)
        batches = [_read(location / name) for name in _BATCHES[part]]
        images, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
        return ImagesInMemory(images, labels)


def _read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    if not file.is_file():
        raise UserError(f"{file} is missing. Put it there, or fetch it with {fetch_command('CIFAR10')}.")
    try:
        return parse_batch(file)
    except ValueError as error:
        raise UserError(f"{file} cannot be read as a batch of CIFAR-10 ({error}). Fetch it again.") from error


def parse_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 (images, 32, 32, 3), and the numbers of their classes, int64, of one batch.

    https://www.cs.toronto.edu/~kriz/cifar.html describes the format. Raises ValueError, with a phrase that follows the
    file's name, if it cannot be read or has anything else.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise pickle.UnpicklingError(f"it is larger than {_MOST_BYTES >> 20} MB")
        with open(path, "rb") as file:
            found = _Unpickler(file, encoding="bytes").load()
        array, labels = found[b"data"], found[b"labels"]
        if not isinstance(array, _Array) or not isinstance(labels, list) or len(labels) != len(array.values):
            raise pickle.UnpicklingError("it has no array of images with a label for each")
        if not all(type(label) is int and 0 <= label < len(_CLASSES) for label in labels):
            raise pickle.UnpicklingError(f"its labels are not numbers from 0 to {len(_CLASSES) - 1}")
    except Exception as error:  # an invalid pickle can raise anything
        why = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise ValueError(why) from error
    return array.values.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1), np.array(labels, dtype=np.int64)


class _Type:
    """Replaces a numpy dtype. Only unsigned bytes are expected."""

    def __init__(self, name: bytes | str, *_: Any):
        if name not in (b"u1", "u1"):
            raise pickle.UnpicklingError("its values are not unsigned bytes")

    def __setstate__(self, state: Any) -> None:
        """Ignore the byte order, which bytes do not have."""


class _Array:
    """Replaces a numpy array; `values` is (images, 3072)."""

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
    """Allows the three names that an array of bytes needs, with a harmless class of ours for each."""

    _KNOWN = {
        ("numpy.core.multiarray", "_reconstruct"): _new_array,
        ("numpy._core.multiarray", "_reconstruct"): _new_array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Type,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs")
        return self._KNOWN[module, name]
