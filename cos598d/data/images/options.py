"""The flags that only tasks with images have."""

from dataclasses import dataclass

from cos598d.fields import flag

GROUP = "images"  # where --help lists them


@dataclass(frozen=True)
class ImageOptions:
    """How images are brought to the model."""

    image_size: int | None = flag(
        None,
        "pixels a side of the images for vit-tiny and vit-base (default: as suits the task; other models have a size)",
        group=GROUP,
        least=4,
    )
    augment: bool = flag(
        False,
        "in training shift each image at random by up to an eighth of its side, and mirror half of them where right "
        "and left are alike",
        group=GROUP,
    )
