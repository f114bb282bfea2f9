"""What turns a task's raw data into the inputs of one model, whether they are texts or images."""

from abc import ABC, abstractmethod
from pathlib import Path


class Encoder(ABC):
    """fingerprint: hex digest over everything that the inputs depend on."""

    fingerprint: str

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files that belong beside the model's weights and from which the encoder can be made again, each
        whole or not at all."""
