"""MNIST: handwritten digits of 28 x 28 pixels."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cos598d.data.images.idx import read_idx
from cos598d.data.images.locate import VARIABLE, candidates
from cos598d.data.images.source import ImagesInMemory
from cos598d.data.images.task import ImageTask
from cos598d.data.parts import split
from cos598d.data.task import fetch_command
from cos598d.errors import UserError

# What the two parts' files are called, and what the images and their classes are in: X-images-idx3-ubyte, ....gz.
_PARTS = {"train": "train", "dev": "t10k"}
_KINDS = {"images": 3, "labels": 1}


class MnistTask(ImageTask):
    """60,000 digits to train on and 10,000 to evaluate on (LeCun et al. 1998), in IDX files, gzipped or not.

    Where only the 10,000 are there, a fixed fifth of each class of them is evaluated on. A location is their folder.
    """

    name = "mnist"
    classes = tuple("0123456789")
    num_labels = len(classes)
    size, channels = 28, 1
    defaults = {"model_type": "vit", "model_name_or_path": "vit-tiny", "learning_rate": 1e-3}

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Path, str]:
        for folder, words in candidates(data_dir, environ, ("", "mnist", "MNIST", "MNIST/raw", "raw")):
            if _file(folder, "t10k", "images") is not None:
                return folder, words
        raise UserError(
            f"No MNIST in {data_dir or environ.get(VARIABLE) or 'any folder that was named'}: name with --data_dir or "
            f"{VARIABLE} the folder of t10k-images-idx3-ubyte and the other three files, with or without .gz, or fetch "
            f"them with {fetch_command('MNIST')}."
        )

    def source(self, part: str, location: Path) -> ImagesInMemory:
        has_both = _file(location, _PARTS["train"], "images") is not None
        stem = _PARTS[part] if has_both else _PARTS["dev"]
        found = {kind: _read(location, stem, kind) for kind in _KINDS}
        images, labels = found["images"], found["labels"]
        if len(images) != len(labels) or labels.max() >= self.num_labels:
            problem = "one is above 9" if len(images) == len(labels) else f"{len(labels)} for {len(images)} images"
            raise UserError(f"The labels of {stem} in {location} do not fit ({problem}): fetch both files again.")
        places = np.arange(len(labels)) if has_both else split(labels, part)
        return ImagesInMemory(images[places][..., None], labels[places])


def _file(folder: Path, stem: str, kind: str) -> Path | None:
    names = [f"{stem}-{kind}{mark}idx{_KINDS[kind]}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read(folder: Path, stem: str, kind: str) -> np.ndarray:
    file = _file(folder, stem, kind)
    if file is None:
        raise UserError(f"{folder} has no {stem}-{kind}-idx{_KINDS[kind]}-ubyte, with or without .gz: put it there.")
    return read_idx(file, _KINDS[kind])
