"""From image files to pixels, by fixed rules: unusual ones are converted, broken or too large ones refused."""

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np

from cos598d.errors import UsageError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".ppm", ".pgm")
MOST_PIXELS = 50_000_000  # of one image, which then takes 150 MB: a file of a few KB can claim any number
MOST_BYTES = 64 << 20  # of one file


class Refused(Exception):
    """Why an image cannot be used, as a phrase that follows a file's name."""


def check_pillow() -> None:
    """Raise UsageError if Pillow is missing, which the extra `images` installs."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UsageError(f"image files need the package Pillow ({error}). Run `pip install '.[images]'`.") from None


def decode(content: bytes) -> np.ndarray:
    """The image in a file, uint8 (height, width, 1 or 3), upright. Raises Refused.

    Of an animation the first picture is used. CMYK and palettes become red, green and blue; of 16 bits, the upper 8
    remain. Transparent parts become white. A picture with an orientation tag is rotated.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(content) > MOST_BYTES:
        raise Refused(f"is a file of more than {MOST_BYTES >> 20} MB")
    if not content:
        raise Refused("is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's warnings about sizes, since we have a limit of our own
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise Refused(f"has {width} x {height} pixels, and at most {MOST_PIXELS // 10**6} million are read")
                image.load()
                return _pixels(ImageOps.exif_transpose(image))
    except Refused:
        raise
    except Image.DecompressionBombError:
        raise Refused(f"has more pixels than the {MOST_PIXELS // 10**6} million that are read") from None
    except UnidentifiedImageError:
        raise Refused(f"is damaged, or none of {', '.join(FORMATS)}") from None
    except MemoryError:
        raise Refused("does not fit into memory") from None
    except Exception as error:  # its decoders raise any kind of error
        raise Refused(f"is not an image that can be read ({first_line(error)})") from error


def _pixels(image: "Image") -> np.ndarray:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits, which Pillow may also return as 32
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise Refused("has values of more than 16 bits")
        return (values >> 8).astype(np.uint8)[..., None]
    if image.mode == "F":
        raise Refused("has fractional values, whose scale is unknown")
    if "transparency" in image.info or image.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        coloured = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)
    image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]
