"""What turns a task's raw data into the inputs of one model, whether they are texts or images."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path


class Encoder(ABC):
    """fingerprint: hex digest over everything that the inputs depend on."""

    fingerprint: str

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files that belong next to the model's weights and from which the encoder can be made again, each
        whole or not at all."""


@dataclass(frozen=True)
class ImageForm:
    """What a task's images are to whatever model reads them.

    size: pixels a side that suit them; channels: 3, or 1 for grey; is_asked_for: whether the user gave the size.
    """

    size: int
    channels: int
    is_asked_for: bool = False
