"""Images to the inputs of one vision model: its size, its channels, and the scale of its values."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.encoder import Encoder
from cos598d.terminal.files import write_json

if TYPE_CHECKING:
    import torch

PROCESSOR_FILE = "preprocessor_config.json"
_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601), as Pillow's "L"
_BILINEAR = 2  # as transformers numbers it


class ImageEncoder(Encoder):
    """Brings images to size x size pixels, and their values from 0...255 to (value / 255 - mean) / std, by channel.

    `channels` is 3 for red, green and blue, or 1 for grey: images of the other kind are converted. An image that is
    not square is stretched, as transformers' ViTImageProcessor does it. What `save` writes, transformers reads.
    """

    def __init__(self, size: int, channels: int, mean: Sequence[float] = (), std: Sequence[float] = ()):
        self.size, self.channels = size, channels
        self.mean, self.std = tuple(mean) or (0.5,) * channels, tuple(std) or (0.5,) * channels
        self.fingerprint = hashlib.sha256(f"{size} {channels}".encode()).hexdigest()  # scaled is what comes after

    def fit(self, pixels: np.ndarray) -> np.ndarray:
        """Images of one size, uint8 (images, height, width, 1 or 3), as uint8 (images, size, size, channels)."""
        if pixels.shape[3] < self.channels:
            pixels = np.repeat(pixels, self.channels, axis=3)
        elif pixels.shape[3] > self.channels:
            pixels = np.rint(pixels @ _GREY)[..., None].astype(np.uint8)
        if pixels.shape[1:3] == (self.size, self.size):
            return pixels
        import torch
        from torch.nn.functional import interpolate

        # Pillow's memory may not be written to, which torch would warn of.
        planes = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(0, 3, 1, 2)
        sizes = (self.size, self.size)
        resized = interpolate(planes.float(), sizes, mode="bilinear", antialias=True, align_corners=False)
        return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()

    def scale(self, pixels: np.ndarray) -> "torch.Tensor":
        """uint8 (images, size, size, channels) as the model's input, float32 (images, channels, size, size)."""
        import torch

        mean, std = (np.array(of, dtype=np.float32) for of in (self.mean, self.std))
        # By numpy alone: where a thread does this beside training, torch would start as many threads once more.
        values = (pixels.astype(np.float32) / np.float32(255) - mean) / std
        return torch.from_numpy(np.ascontiguousarray(values.transpose(0, 3, 1, 2)))

    def save(self, folder: Path) -> None:
        settings = {
            "do_resize": True,
            "size": {"height": self.size, "width": self.size},
            "resample": _BILINEAR,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "image_processor_type": "ViTImageProcessor",
        }
        write_json(folder / PROCESSOR_FILE, settings)
