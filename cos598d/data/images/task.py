"""What all tasks have in common that find the class of an image."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from cos598d.data.cache import cached_arrays
from cos598d.data.encoder import ImageForm
from cos598d.data.examples import spread
from cos598d.data.images.encoder import ImageEncoder
from cos598d.data.images.images import Images
from cos598d.data.images.options import ImageOptions
from cos598d.data.images.source import ImageSource
from cos598d.data.task import Scores, Task

FORMAT = 1  # counted up when what is stored changes its meaning, so that old files are no longer found
PARTS = ("train", "dev")


class ImageTask(Task):
    """Images of `num_labels` classes, grey (`channels` 1) or coloured (3), of about `size` pixels a side.

    mirrors: whether an image seen in a mirror is of the same class.
    """

    head = "image_classification"
    evaluation_parts = ("dev",)
    metrics = ("acc",)
    options_kind = ImageOptions
    size: int
    channels: int
    mirrors = False

    def __init__(self, options: ImageOptions):
        self.options = options
        asked = options.image_size
        self.image_form = ImageForm(asked or self.size, self.channels, is_asked_for=asked is not None)

    @abstractmethod
    def source(self, part: str, location: Any) -> ImageSource:
        """The images of a part. Raises UserError naming the file of what cannot be read."""

    def check(self, location: Any, parts: Sequence[str] | None = None) -> None:
        for part in PARTS if parts is None else parts:
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
        """`max_seq_length` means nothing to images."""
        if part not in PARTS:
            raise ValueError(f"{self.name} has the parts {', '.join(PARTS)}, not {part!r}.")
        source = self.source(part, location)
        chosen = spread(len(source.labels), limit)

        def build() -> dict[str, np.ndarray]:
            return {"pixels": source.pixels(chosen, encoder), "labels": source.labels[chosen]}

        key = (str(FORMAT), encoder.fingerprint, self.name, part, source.digest, str(len(chosen)))
        arrays = cached_arrays("images", f"{self.name}-{part}", key, build, overwrite_cache)
        return Images(arrays["pixels"], arrays["labels"], encoder, self.options.augment, self.mirrors)

    def output_widths(self, features: Images) -> tuple[int, ...]:
        return (self.num_labels,)

    def score(self, part: str, outputs: np.ndarray, features: Images) -> Scores:
        return Scores({"acc": float((outputs.argmax(axis=1) == features.labels).mean())})
