"""MNIST: handwritten digits of 28 x 28 pixels, in IDX files."""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cos598d.data.examples import split
from cos598d.data.images.task import VARIABLE, ImagesInMemory, ImageTask, candidates
from cos598d.data.task import fetch_command
from cos598d.errors import UserError

# The prefix of each part's files, and the format number of images and of labels: X-images-idx3-ubyte, ....gz.
_PARTS = {"train": "train", "dev": "t10k"}
_KINDS = {"images": 3, "labels": 1}
_UNSIGNED_BYTE = 0x08
_MOST_BYTES = 1 << 30  # a header that claims more is wrong; MNIST's largest file has 47 MB


class MnistTask(ImageTask):
    """60,000 digits to train on and 10,000 to evaluate on (LeCun et al. 1998), in IDX files, gzipped or not.

    If only the 10,000 exist, a fixed fifth of each of their classes is evaluated on. A location is their folder.
    """

    name = "mnist"
    classes = tuple("0123456789")
    num_labels = len(classes)
    size, channels = 28, 1

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Path, str]:
        for folder, words in candidates(data_dir, environ, ("", "mnist", "MNIST", "MNIST/raw", "raw")):
            if _file(folder, "t10k", "images") is not None:
                return folder, words
        raise UserError(
            f"No MNIST in {data_dir or environ.get(VARIABLE) or 'any folder that was named'}. Set --data_dir or "
            f"{VARIABLE} to the folder of t10k-images-idx3-ubyte and the other three files, with or without .gz, or "
            f"fetch them with {fetch_command('MNIST')}."
        )

    def source(self, part: str, location: Path) -> ImagesInMemory:
        has_both = _file(location, _PARTS["train"], "images") is not None
        stem = _PARTS[part] if has_both else _PARTS["dev"]
        images, labels = (_read(location, stem, kind) for kind in _KINDS)
        if len(images) != len(labels) or labels.max() >= self.num_labels:
            problem = "one is above 9" if len(images) == len(labels) else f"{len(labels)} for {len(images)} images"
            raise UserError(f"The labels of {stem} in {location} do not fit ({problem}). Fetch both files again.")
        places = np.arange(len(labels)) if has_both else split(labels, part)
        return ImagesInMemory(images[places][..., None], labels[places])


def _file(folder: Path, stem: str, kind: str) -> Path | None:
    names = [f"{stem}-{kind}{mark}idx{_KINDS[kind]}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read(folder: Path, stem: str, kind: str) -> np.ndarray:
    file = _file(folder, stem, kind)
    if file is None:
        raise UserError(f"{folder} has no {stem}-{kind}-idx{_KINDS[kind]}-ubyte, with or without .gz. Put it there.")
    try:
        return parse_idx(file, _KINDS[kind])
    except ValueError as error:
        raise UserError(f"{file} cannot be read as an IDX file ({error}). Fetch it again.") from error


def parse_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array in an IDX file, uint8, plain or gzipped. http://yann.lecun.com/exdb/mnist describes its format.

    Raises ValueError if it cannot be read, has another kind or number of dimensions, or another length than its header
    claims. The message is a phrase that follows the file's name.
    """
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
                    raise ValueError(f"its header gives {' x '.join(map(str, shape))} values")
                content = file.read(size + 1)  # not everything: a few bytes can unpack to any number
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(getattr(error, "strerror", None) or error)) from error
    if len(content) != size:
        problem = "ends early" if len(content) < size else "continues after its end"
        raise ValueError(f"it {problem}: its header gives {' x '.join(map(str, shape))} values")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
