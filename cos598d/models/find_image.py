"""The meaning of a vision model's name: a random shape for the task's images, a folder, or a name on the hub."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.data.encoder import ImageForm
from cos598d.data.images.encoder import PROCESSOR_FILE, ImageEncoder
from cos598d.errors import UserError
from cos598d.models.architectures import new_config, read_config
from cos598d.models.checkpoint import WEIGHT_FILES
from cos598d.models.find import VIT_SHAPES, find_folder, find_weights
from cos598d.models.vit_config import MOST_PATCHES, TINY, ViTConfig, patch_of
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_json

DEFAULT_FORM = ImageForm(224, 3)


@dataclass(frozen=True)
class FoundVit:
    """What a name means: configuration, weights file (None: random), encoder, description, and a configuration file
    that is not next to the weights."""

    config: Any
    weights: Path | None
    encoder: ImageEncoder
    description: str
    config_file: Path | None


def find_vit(
    name: str, model_type: str, config_name: str | None, cache_dir: str | None, form: ImageForm | None
) -> FoundVit:
    """Find the model `name` for images of this `form` (None: 224 x 224, coloured). Raises UserError.

    A random shape takes images unchanged: `vit-tiny` in patches that suit their size, `vit-base` in patches of 16
    pixels. A model with weights has a size of its own, to which images are scaled.
    """
    if name in VIT_SHAPES and not config_name:
        config = _shape(name, form or DEFAULT_FORM)
        encoder = ImageEncoder(config.image_size, config.num_channels)
        return FoundVit(config, None, encoder, f"{VIT_SHAPES[name]}, random weights", None)
    config_file, weights, folder = None, None, None
    if name in VIT_SHAPES:
        description = f"{model_type} of {config_name}'s shape, random weights"
    else:
        needed: list[tuple[str, ...]] = [] if config_name else [("config.json",)]
        folder, description = find_folder(name, model_type, [*needed, WEIGHT_FILES], cache_dir, [PROCESSOR_FILE])
        weights = find_weights(folder, name)
    if config_name:
        config, config_file = _named_config(config_name, model_type, cache_dir, form)
    else:
        assert folder is not None  # otherwise it is a shape, which needs no file
        config = read_config(folder / "config.json", model_type)
    if form and form.is_asked_for and form.size != config.image_size:
        raise UserError(
            f"--image_size {form.size}: the model {name} reads images of {config.image_size} x {config.image_size} "
            "pixels. Leave --image_size out, and images are scaled to that."
        )
    return FoundVit(config, weights, _read_encoder(folder, config), description, config_file)


def _shape(name: str, form: ImageForm) -> ViTConfig:
    patch = patch_of(form.size) if name == "vit-tiny" else ViTConfig.patch_size
    if not 1 <= form.size // patch <= MOST_PATCHES or form.size % patch:
        raise UserError(
            f"{name} needs images of at most {MOST_PATCHES} patches of {patch} pixels per side, and {form.size} "
            "pixels are not. Give --image_size a multiple of 16, or of 4 or 8 for vit-tiny."
        )
    sizes = TINY if name == "vit-tiny" else {}
    images = {"image_size": form.size, "patch_size": patch, "num_channels": form.channels}
    return new_config("vit", 0, {**sizes, **images})


def _named_config(
    name: str, model_type: str, cache_dir: str | None, form: ImageForm | None
) -> tuple[ViTConfig, Path | None]:
    """The configuration that --config_name means (a shape's, a file's, a folder's or the hub's), and its file."""
    if name in VIT_SHAPES:
        return _shape(name, form or DEFAULT_FORM), None
    path = Path(name).expanduser()
    if not path.is_file():
        path = find_folder(name, model_type, [("config.json",)], cache_dir)[0] / "config.json"
    return read_config(path, model_type), path


def _read_encoder(folder: Path | None, config: ViTConfig) -> ImageEncoder:
    """The encoder of the model's training, from its preprocessor_config.json; without one, values of -1...1.

    Raises UserError for a number of channels that no image has, and for impossible values in the file.
    """
    channels = config.num_channels
    if channels not in (1, 3):
        raise UserError(f"the model reads images of {channels} channels. Choose one for 3 (coloured) or 1 (grey).")
    path = folder / PROCESSOR_FILE if folder else None
    if path is None or not path.is_file():
        return ImageEncoder(config.image_size, channels)
    try:
        values = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). Give the file that belongs to the model.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} has no JSON object. Give the file that belongs to the model.")
    if values.get("do_normalize") is False:
        return ImageEncoder(config.image_size, channels, (0.0,) * channels, (1.0,) * channels)
    scales = []
    for key, least in (("image_mean", -math.inf), ("image_std", 0.0)):
        value = values.get(key, [0.5] * channels)
        if not isinstance(value, list) or len(value) != channels or not all(_is_above(one, least) for one in value):
            raise UserError(
                f"{path} gives {printable(repr(value), 60)} for {key}, where {channels} numbers"
                f"{' above 0' if key == 'image_std' else ''} are expected. Give the file that belongs to the model."
            )
        scales.append(value)
    return ImageEncoder(config.image_size, channels, *scales)


def _is_above(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > least
