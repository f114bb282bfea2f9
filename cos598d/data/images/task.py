"""The common base of all tasks that classify images: their flags, where they look, and how they load."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.data.cache import cached_arrays, checksum
from cos598d.data.encoder import ImageForm
from cos598d.data.examples import spread
from cos598d.data.images.encoder import ImageEncoder, Images
from cos598d.data.task import Task
from cos598d.errors import UserError
from cos598d.terminal.fields import flag

GROUP = "images"  # their heading in --help
VARIABLE = "IMAGE_DIR"
_FORMAT = 1  # increased when the meaning of cached data changes, so that old files are no longer found
_PARTS = ("train", "dev")
_BLOCK = 256  # images that are scaled to the model's size at a time


@dataclass(frozen=True)
class ImageOptions:
    """How images are brought to the model: the flags that only tasks with images have."""

    image_size: int | None = flag(
        None,
        "width and height in pixels, for vit-tiny and vit-base (default: depends on the task; other models fix it)",
        group=GROUP,
        least=4,
    )
    augment: bool = flag(
        False,
        "augment training images: shift each by up to an eighth of its side, and mirror half of them if right "
        "and left are alike",
        group=GROUP,
    )


class ImageSource(ABC):
    """A part's images before they are scaled to a model's size.

    labels: int64 (images,), the class number of each. digest: of the images and their classes.
    """

    labels: np.ndarray
    digest: str

    @abstractmethod
    def pixels(self, places: np.ndarray, encoder: ImageEncoder) -> np.ndarray:
        """The images at `places`, scaled by `encoder.fit`. Raises UserError for one that is refused."""


class ImagesInMemory(ImageSource):
    """Images of one size, uint8 (images, height, width, channels)."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.labels, self._images = labels.astype(np.int64), images
        self.digest = checksum({"images": images, "labels": self.labels})

    def pixels(self, places: np.ndarray, encoder: ImageEncoder) -> np.ndarray:
        blocks = [places[start : start + _BLOCK] for start in range(0, len(places), _BLOCK)]
        return np.concatenate([encoder.fit(self._images[block]) for block in blocks])


class ImageTask(Task):
    """Images of `num_labels` classes, grey (`channels` 1) or coloured (3), of about `size` pixels per side.

    mirrors: whether a mirrored image still has the same class.
    """

    head = "image_classification"
    evaluation_parts = ("dev",)
    options_kind = ImageOptions
    defaults: Mapping[str, Any] = {"model_type": "vit", "model_name_or_path": "vit-tiny", "learning_rate": 1e-3}
    size: int
    channels: int
    mirrors = False

    def __init__(self, options: ImageOptions):
        self.options = options
        asked = options.image_size
        self.image_form = ImageForm(asked or self.size, self.channels, is_asked_for=asked is not None)

    @abstractmethod
    def source(self, part: str, location: Any) -> ImageSource:
        """The images of a part. Raises UserError with the file that cannot be read."""

    def check(self, location: Any, parts: Sequence[str] | None = None) -> None:
        for part in _PARTS if parts is None else parts:
            self.source(part, location)

    def load(
        self,
        part: str,
        location: Any,
        encoder: ImageEncoder,
        max_seq_length: int = 0,
        overwrite_cache: bool = False,
        limit: int | None = None,
    ) -> Images:
        """`max_seq_length` has no effect on images."""
        if part not in _PARTS:
            raise ValueError(f"{self.name} has the parts {', '.join(_PARTS)}, not {part!r}.")
        source = self.source(part, location)
        chosen = spread(len(source.labels), limit)

        def build() -> dict[str, np.ndarray]:
            return {"pixels": source.pixels(chosen, encoder), "labels": source.labels[chosen]}

        key = (str(_FORMAT), encoder.fingerprint, self.name, part, source.digest, str(len(chosen)))
        arrays = cached_arrays("images", f"{self.name}-{part}", key, build, overwrite_cache)
        return Images(arrays["pixels"], arrays["labels"], encoder, self.options.augment, self.mirrors)


def candidates(data_dir: str | None, environ: Mapping[str, str], names: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """The paths where a task's data may be, with a phrase for each: --data_dir, else IMAGE_DIR, and its entries with
    these `names`; "" is the folder itself. Raises UserError if a named path does not exist."""
    named = data_dir or environ.get(VARIABLE)
    if not named:
        return
    place = Path(named)
    if not place.exists():
        raise UserError(f"There is no {named} ({'--data_dir' if data_dir else VARIABLE}). Give the images' folder.")
    for name in names:
        said = named if data_dir else VARIABLE
        yield place / name, f"{said}/{name}" if name else said
