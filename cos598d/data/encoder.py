"""The encoder that turns a task's raw data, texts or images, into the inputs of one model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


class Encoder(ABC):
    """fingerprint: hex digest of everything that the inputs depend on."""

    fingerprint: str

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files from which the encoder can be made again, each completely or not at all."""


@dataclass(frozen=True)
class ImageForm:
    """The properties of a task's images that matter to a model.

    size: a suitable width and height in pixels; channels: 3, or 1 for grey; is_asked_for: the user gave the size.
    """

    size: int
    channels: int
    is_asked_for: bool = False
