"""What a task's images are to whatever model reads them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageForm:
    """size: pixels a side that suit them; channels: 3, or 1 for grey; is_asked_for: whether the user gave the size."""

    size: int
    channels: int
    is_asked_for: bool = False
