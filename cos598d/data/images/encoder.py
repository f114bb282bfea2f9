"""From images to the inputs of one vision model, and one part of a task as pixels of that model's size."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.cache import checksum
from cos598d.data.encoder import Encoder
from cos598d.data.examples import Draw, Examples
from cos598d.terminal.files import write_json

if TYPE_CHECKING:
    import torch

PROCESSOR_FILE = "preprocessor_config.json"
_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601), as in Pillow's "L"
_BILINEAR = 2  # transformers' number for it


class ImageEncoder(Encoder):
    """Scales images to size x size pixels, and their values from 0...255 to (value / 255 - mean) / std, by channel.

    `channels` is 3 for red, green and blue, or 1 for grey: other images are converted. An image that is not square is
    stretched, as by transformers' ViTImageProcessor. transformers can read the output of `save`.
    """

    def __init__(self, size: int, channels: int, mean: Sequence[float] = (), std: Sequence[float] = ()):
        self.size, self.channels = size, channels
        self.mean, self.std = tuple(mean) or (0.5,) * channels, tuple(std) or (0.5,) * channels
        self.fingerprint = hashlib.sha256(f"{size} {channels}".encode()).hexdigest()  # mean and std apply later

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

        # Pillow's memory is read-only, which torch would warn about.
        planes = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(0, 3, 1, 2)
        sizes = (self.size, self.size)
        resized = interpolate(planes.float(), sizes, mode="bilinear", antialias=True, align_corners=False)
        return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()

    def scale(self, pixels: np.ndarray) -> "torch.Tensor":
        """uint8 (images, size, size, channels) as the model's input, float32 (images, channels, size, size)."""
        import torch

        mean, std = (np.array(of, dtype=np.float32) for of in (self.mean, self.std))
        # In numpy only: in a thread during training, torch would start another pool of threads.
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


class Images(Examples):
    """Images in the order of the data.

    pixels: uint8 (examples, size, size, channels), from `encoder.fit`.
    augments: whether they are changed at random in training; mirrors: whether that may mirror them.
    """

    is_slow = True

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        encoder: ImageEncoder,
        augments: bool = False,
        mirrors: bool = False,
    ):
        self.pixels, self.targets = pixels, {"labels": labels}
        self.lengths = np.ones(len(pixels), dtype=np.int32)  # all equal, because grouping them would gain nothing
        self._encoder, self._augments, self._mirrors = encoder, augments, mirrors

    def counts(self, indices: np.ndarray) -> dict[str, int]:
        """The number of images."""
        return {"images": len(indices)}

    def collate(self, indices: Sequence[int] | np.ndarray, draw: Draw | None = None) -> dict[str, "torch.Tensor"]:
        """`pixel_values`, float32 (batch, channels, size, size), and `labels`, int64 (batch,)."""
        import torch

        chosen = np.asarray(indices, dtype=np.int64)
        pixels = self.pixels[chosen]
        if self._augments and draw is not None:
            pixels = augment(pixels, chosen, draw, self._mirrors)
        labels = torch.from_numpy(self.labels[chosen])
        return {"pixel_values": self._encoder.scale(pixels), "labels": labels}

    def digest(self) -> str:
        return checksum({"pixels": self.pixels, **self.targets})


def augment(pixels: np.ndarray, indices: Iterable[int], draw: Draw, mirrors: bool) -> np.ndarray:
    """Shift each image by up to an eighth of its side, over black; if it `mirrors`, mirror half of them at random.

    pixels: uint8 (images, size, size, channels), of the examples `indices`; the result has the same form. An example's
    changes depend only on `draw` and its index, not on the rank that computes it.
    """
    size = pixels.shape[1]
    margin = max(1, size // 8)
    padded = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    changed = np.empty_like(pixels)
    for place, index in enumerate(indices):
        top, left, side = np.random.default_rng((*draw, int(index))).integers(0, (2 * margin + 1, 2 * margin + 1, 2))
        shifted = padded[place, top : top + size, left : left + size]
        changed[place] = shifted[:, ::-1] if mirrors and side else shifted
    return changed
