"""Tasks of images: scikit-learn's digits, CIFAR-10, and a folder of your own."""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data.encoders import ImageEncoder, ImageForm
from cos598d.data.examples import Images, split, spread
from cos598d.data.task import NAMES, Task, fetch_command, place_of
from cos598d.errors import UsageError, UserError, first_line

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".ppm", ".pgm")
VARIABLE = "IMAGE_DIR"


class ImageTask(Task):
    """Images of about `size` pixels per side, grey (`channels` 1) or coloured (3).

    `mirrors`: whether a mirrored image still has the same class. --augment shifts, and mirrors, training images.
    """

    head = "image_classification"
    defaults: Mapping[str, Any] = {"model_name_or_path": "vit-tiny", "learning_rate": 1e-3}
    size: int
    channels: int
    mirrors = False

    def __init__(self, image_size: int | None = None, augment: bool = False):
        self.image_form = ImageForm(image_size or self.size, self.channels, is_asked_for=image_size is not None)
        self._augments = augment

    @abstractmethod
    def read(self, part: str, encoder: ImageEncoder, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
        """The pixels of a part, or of `limit` of its images, from `encoder.fit`, and the numbers of their classes."""

    def find(self, data_dir: str | None) -> str:
        place = place_of(data_dir, VARIABLE, os.environ)
        if place is None:
            raise UserError(f"No images of {self.name}. Set --data_dir or {VARIABLE} to their folder.")
        self._place = place
        return str(place)

    def load(self, part: str, encoder: Any, most: int = 0, limit: int | None = None) -> Images:
        """`most` has no effect on images."""
        pixels, labels = self.read(part, encoder, limit)
        return Images(pixels, labels, encoder, self._augments, self.mirrors)


class DigitsTask(ImageTask):
    """1,797 digits of 8 x 8 pixels, from scikit-learn: the test part of UCI's Optical Recognition of Handwritten Digits
    (Alpaydin and Kaynak 1998). A fixed fifth of each class is evaluated on."""

    name, classes, size, channels = "digits", tuple("0123456789"), 8, 1
    defaults = {**ImageTask.defaults, "num_train_epochs": 15.0}

    def find(self, data_dir: str | None) -> str:
        if data_dir:
            raise UserError(f"The digits are scikit-learn's own, not in {data_dir}. Leave --data_dir out.")
        return "scikit-learn's digits"

    def read(self, part: str, encoder: ImageEncoder, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        places = split(digits.target, part)
        places = places[spread(len(places), limit)]
        pixels = np.rint(digits.images[places] * (255 / 16)).astype(np.uint8)[..., None]
        return encoder.fit(pixels), digits.target[places]


class Cifar10Task(ImageTask):
    """60,000 photographs of 32 x 32 pixels (Krizhevsky 2009), in the publishers' binary version.

    Each image is its class and then 3,072 bytes: 1,024 for red, for green and for blue.
    """

    name, size, channels, mirrors = "cifar10", 32, 3, True
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def read(self, part: str, encoder: ImageEncoder, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
        names = [f"data_batch_{number}.bin" for number in range(1, 6)] if part == "train" else ["test_batch.bin"]
        there = {file.name: file for file in self._place.rglob("*.bin")}
        try:
            images = np.concatenate([np.fromfile(there[name], np.uint8) for name in names]).reshape(-1, 3073)
        except (KeyError, ValueError) as error:
            fetch = fetch_command("CIFAR10")
            raise UserError(
                f"{self._place} is not CIFAR-10's binary version ({error}). Fetch it with {fetch}."
            ) from error
        chosen = images[spread(len(images), limit)]
        return encoder.fit(chosen[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), chosen[:, 0]


class ImageFolderTask(ImageTask):
    """Your own: CLASS/IMAGE, or train/CLASS/IMAGE next to dev/CLASS/IMAGE (or val, valid, validation, test).

    Without parts a fixed fifth of each class is evaluated on. Classes are numbered in order of their names.
    """

    name, size, channels, mirrors = "image_folder", 64, 3, True

    @property
    def tells_classes(self) -> bool:
        return True

    def find(self, data_dir: str | None) -> str:
        found = super().find(data_dir)
        folders = {one.name.lower(): one for one in sorted(self._place.glob("*")) if one.is_dir()}
        named = {part: [folders[name] for name in NAMES[part] if name in folders] for part in self.parts}
        self._roots = {part: found[0] for part, found in named.items()} if all(named.values()) else {}
        root = self._roots.get("train") or self._place
        self.classes = tuple(sorted(one.name for one in root.glob("*") if one.is_dir() and one.name[0] != "."))
        if len(self.classes) < 2:
            raise UserError(f"{root} has {len(self.classes)} folders of images. Give one for each class, two or more.")
        return found

    def read(self, part: str, encoder: ImageEncoder, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
        root = self._roots.get(part) or self._place
        found = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((root / name).rglob("*"))
            if file.suffix.lower() in SUFFIXES
        ]
        labels = np.array([number for _, number in found], dtype=np.int64)
        places = np.arange(len(found)) if self._roots else split(labels, part)
        places = places[spread(len(places), limit)]
        if not len(places):
            raise UserError(f"{root} has no images for {part}. Give some that end in {', '.join(SUFFIXES)}.")
        return decode([found[place][0] for place in places], encoder), labels[places]


def decode(files: Sequence[Path], encoder: ImageEncoder) -> np.ndarray:
    """Image files as an encoder's pixels, uint8 (files, size, size, channels). Raises UserError."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(f"image files need the package Pillow ({error}). Run `pip install '.[images]'`.") from None

    def decoded(file: Path) -> np.ndarray:
        try:
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB" if encoder.channels == 3 else "L"))
        except Exception as error:  # Pillow's decoders raise any kind of error
            raise UserError(f"{file} is not an image that can be read ({first_line(error)}). Fix it.") from error
        return encoder.fit(pixels.reshape(1, *pixels.shape[:2], encoder.channels))[0]

    with ThreadPoolExecutor() as pool:  # Pillow decodes without Python's lock
        return np.stack(list(pool.map(decoded, files)))
