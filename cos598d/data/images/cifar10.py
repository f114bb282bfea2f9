"""CIFAR-10: photographs of 32 x 32 pixels, of ten kinds of things and animals."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cos598d.data.images.cifar import read_batch
from cos598d.data.images.folder import FoundImages, ImageFolderTask, find_classes
from cos598d.data.images.locate import VARIABLE, candidates
from cos598d.data.images.places import open_place
from cos598d.data.images.source import ImagesInMemory, ImageSource
from cos598d.data.task import fetch_command
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "dev": ["test_batch"]}


class Cifar10Task(ImageFolderTask):
    """50,000 photographs to train on and 10,000 to evaluate on (Krizhevsky 2009), in the python version's batches; or
    any part of them as JPEGs, a folder for each class, in a folder or a zip archive.

    A location is the batches' folder, or what a folder or archive of images holds.
    """

    name = "cifar10"
    size, channels = 32, 3
    classes = CLASSES

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Path | FoundImages, str]:
        self.num_labels = len(CLASSES)
        names = ["", "cifar-10-batches-py", "cifar10", "CIFAR10", "CIFAR10/cifar-10-batches-py"]
        named = data_dir or environ.get(VARIABLE)
        if named and Path(named).is_dir():
            names += sorted(one.name for one in Path(named).glob("[cC][iI][fF][aA][rR]*.zip"))
        for path, words in candidates(data_dir, environ, names):
            if (path / _BATCHES["dev"][0]).is_file():
                return path, words
            if path.is_file() or {one.name for one in path.glob("*")} & {"train", *CLASSES}:
                return self._found(path), words
        raise UserError(
            f"{named or 'Nothing that was named'} holds no images of CIFAR-10: name with --data_dir or {VARIABLE} the "
            "folder cifar-10-batches-py, or a folder or a zip archive of images with one folder for each class; or "
            f"fetch it with {fetch_command('CIFAR10')}."
        )

    def source(self, part: str, location: Path | FoundImages) -> ImageSource:
        if isinstance(location, FoundImages):
            return super().source(part, location)
        batches = [read_batch(_there(location / name)) for name in _BATCHES[part]]
        images, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
        return ImagesInMemory(images, labels)

    def _found(self, path: Path) -> FoundImages:
        found = find_classes(open_place(path))
        if unknown := set(found.classes) - set(CLASSES):
            raise UserError(
                f"{path} has a class {printable(min(unknown), 100)}, which CIFAR-10 has not: give its images, or "
                "--task_name image_folder."
            )
        return FoundImages(found.place, CLASSES, found.parts)


def _there(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"{file} is missing: put it there, or fetch it with {fetch_command('CIFAR10')}.")
    return file
