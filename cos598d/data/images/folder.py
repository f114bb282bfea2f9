"""Your own images: a folder, or a zip archive, with one folder for each class."""

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cos598d.data.examples import split
from cos598d.data.images.files import ImageFiles, ImageStore, open_store
from cos598d.data.images.task import VARIABLE, ImageOptions, ImageSource, ImageTask, candidates
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

TRAIN = ("train", "training")
DEV = ("dev", "val", "valid", "validation", "test")  # the first one that exists is evaluated on
MOST_CLASSES = 100_000


@dataclass(frozen=True)
class FoundImages:
    """The contents of a store: the classes in order of their names, and each part's files by class.

    parts: only "all" if the images are not divided into parts, else "train" and "dev".
    """

    store: ImageStore
    classes: tuple[str, ...]
    parts: Mapping[str, Mapping[str, list[str]]]


class ImageFolderTask(ImageTask):
    """CLASS/IMAGE, or train/CLASS/IMAGE next to val/CLASS/IMAGE (or dev, valid, validation, test), at any depth.

    Without parts, a fixed fifth of each class is evaluated on. Classes are numbered in order of their names.
    """

    name = "image_folder"
    size, channels = 64, 3
    mirrors = True

    def __init__(self, options: ImageOptions):
        super().__init__(options)
        self.num_labels = 0  # until the images are located

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Any, str]:
        for path, words in candidates(data_dir, environ, ("",)):
            found = find_classes(open_store(path))
            self.classes, self.num_labels = found.classes, len(found.classes)
            return found, words
        raise UserError(
            f"No images. Set --data_dir or {VARIABLE} to a folder, or a zip archive, that has one folder of images for "
            "each class."
        )

    def source(self, part: str, location: Any) -> ImageSource:
        divided = location.parts.get(part)
        by_class = location.parts["all"] if divided is None else divided
        numbers = {name: number for number, name in enumerate(location.classes)}
        pairs = [(file, numbers[name]) for name, files in sorted(by_class.items()) for file in files]
        labels = np.array([number for _, number in pairs], dtype=np.int64)
        places = split(labels, part) if divided is None else np.arange(len(pairs))
        return ImageFiles(location.store, [pairs[place][0] for place in places], labels[places], f"{self.name} {part}")


def find_classes(store: ImageStore) -> FoundImages:
    """The classes and parts given by the folders of `store`. Raises UserError for none, or for a contradiction."""
    files = store.files
    inside = _common_folders(files)
    by_part: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    tops = {file[len(inside) :].split("/")[0].lower() for file in files}
    has_parts = any(name in tops for name in TRAIN) and any(name in tops for name in DEV)
    dev = next((name for name in DEV if name in tops), "")
    for file in files:
        *folders, _ = file[len(inside) :].split("/")
        top = folders[0].lower() if folders else ""
        if has_parts and top not in (*TRAIN, dev):
            continue  # a second part to evaluate on
        part = ("train" if top in TRAIN else "dev") if has_parts else "all"
        classes = folders[1:] if has_parts else folders
        if not classes:
            raise UserError(
                f"{printable(store.name, 200)}: {printable(file, 100)} is in no class's folder. Put every image "
                "into a folder with its class's name."
            )
        by_part[part][classes[0]].append(file)
    classes_of = {part: set(found) for part, found in by_part.items()}
    names = sorted(set().union(*classes_of.values())) if classes_of else []
    if not 2 <= len(names) <= MOST_CLASSES:
        counted = f"one class ({printable(names[0], 100)})" if len(names) == 1 else f"{len(names) or 'no'} classes"
        raise UserError(
            f"{printable(store.name, 200)} has images of {counted}. Give a folder with one folder of images for each "
            "of two classes or more."
        )
    if has_parts and (only := sorted(classes_of.get("dev", set()) - classes_of.get("train", set()))):
        raise UserError(
            f"{printable(store.name, 200)}: the class {printable(only[0], 100)} has images to evaluate on and none to "
            "train on. Put some there."
        )
    return FoundImages(store, tuple(names), {part: dict(found) for part, found in by_part.items()})


def _common_folders(files: list[str]) -> str:
    """The folders that contain all files and are not the classes: "cifar10/" for cifar10/train/cat/1.

    A folder is skipped while it contains everything and has folders, not images, in it.
    """
    inside = ""
    while files:
        tops = {file[len(inside) :].partition("/")[0] for file in files}
        depths = {file[len(inside) :].count("/") for file in files}
        if len(tops) != 1 or min(depths) < 2:
            break
        inside += next(iter(tops)) + "/"
    return inside
