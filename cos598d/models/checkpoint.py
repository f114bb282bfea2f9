"""Weights on disk: reading other programs' files, filling a model, and saving files that plain BERT classes load."""

import pickle
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from cos598d.data.encoders import Encoder
from cos598d.errors import UserError, first_line
from cos598d.models.configs import plain_config, type_of
from cos598d.models.names import WEIGHT_FILES
from cos598d.records.conventions import MODEL, MODEL_FILES
from cos598d.terminal.files import whole_file, whole_folder, write_json

_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # the first BERT checkpoints' names for LayerNorm's parameters


class CannotSave(UserError):
    """The disk refused a model, for `reason`."""

    def __init__(self, folder: Path, reason: str):
        super().__init__(f"the model cannot be saved in {folder} ({reason}). Make room there or choose another folder.")
        self.reason = reason


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a .safetensors file or of a file that torch.save wrote, on the CPU, without unpickling.

    The tensors may be memory-mapped from the file: copy what must outlive it. LayerNorm's old names `gamma` and `beta`
    are returned as `weight` and `bias`. Raises UserError with the file's name if it is missing, damaged, or has
    something other than named tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no weights file {path}. Give a folder that holds {' or '.join(WEIGHT_FILES)}.")
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a warning about newer pickle protocols, which do work
                # Files from before torch 1.6 are not zip archives and cannot be memory-mapped.
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError) as error:
        raise UserError(
            f"{path} cannot be read as weights ({first_line(error)}): it is damaged or of another kind. Download or "
            "save it again."
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise UserError(f"{path} has something other than named tensors. Give a model's plain state dict.")
    return {_modern_name(name): tensor for name, tensor in tensors.items()}


def fill_model(
    model: torch.nn.Module, path: Path, may_be_new: Sequence[str], may_differ: Sequence[str] = ()
) -> list[str]:
    """Copy the tensors of the file `path` into `model`, a pytorch_transformers model or similar, in place.

    Names match with or without the encoder's prefix ("bert."). Tensors of other heads are skipped, and so are those of
    another shape in the modules `may_differ`. Returns the modules among `may_be_new` (dotted names) of which the file
    has no tensor; they do not change. Raises UserError, before anything is copied, for a tensor of another shape or
    dtype or with non-finite values. Also raises it for a missing tensor outside of such modules, and for a file without
    the encoder.
    """
    prefix = f"{model.base_model_prefix}."
    expected = model.state_dict()
    given: dict[str, torch.Tensor] = {}
    for name, tensor in load_weights(path).items():
        for candidate in (name, prefix + name):
            if candidate in expected:
                differs = tensor.shape != expected[candidate].shape
                if not (differs and any(_inside(part, [candidate]) for part in may_differ)):
                    given[candidate] = tensor
                break
    if not any(name.startswith(prefix) for name in given):
        raise UserError(
            f"{path} has no tensor of a {type(model).__name__}'s encoder ({prefix}*). Give weights of this type of "
            "model, or the --model_type of these weights."
        )
    for name, wanted in expected.items():
        if name in given and given[name].shape != wanted.shape:
            raise UserError(
                f"{name} has the shape {tuple(given[name].shape)} in {path}, but the configuration and the task need "
                f"{tuple(wanted.shape)}. Give weights and a config.json that belong together."
            )
    for name, tensor in given.items():
        if expected[name].is_floating_point() and not tensor.is_floating_point():
            raise UserError(
                f"{name} is of {str(tensor.dtype).removeprefix('torch.')} in {path}, but must be a floating-point "
                "tensor. Give the model's weights as they were before they were quantized."
            )
        if not all_finite(tensor):
            raise UserError(f"{name} in {path} has values that are not finite. Give intact weights.")
    new = [part for part in may_be_new if _inside(part, expected) and not _inside(part, given)]
    missing = [name for name in expected if name not in given and not any(_inside(part, [name]) for part in new)]
    if missing:
        raise UserError(
            f"{path} has no {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}. "
            "Give the complete model's weights, or the config.json that belongs to these."
        )
    for name, tensor in given.items():
        expected[name].copy_(tensor)
    return new


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no infinities or NaNs: one pass over it, and a second if its sum is not finite."""
    if tensor.dtype in (torch.float32, torch.float64) and torch.isfinite(tensor.sum()):
        return True  # a non-finite value would have made the sum non-finite
    return bool(torch.isfinite(tensor).all())


def save_model(folder: Path, model: torch.nn.Module, encoder: Encoder) -> None:
    """Write `model` to `folder` so that pytorch_transformers' `from_pretrained(folder)` (for images, transformers') and
    `find_model` load it.

    `model` is a pytorch_transformers model, or similar, or a wrapper that holds one as `.module`; the names in the file
    are the plain model's. `encoder` is the Encoder of its inputs. It writes the encoder's files, config.json and
    pytorch_model.bin, each completely or not at all. A model.safetensors of an older model in the folder is deleted,
    since loaders would prefer it. Raises UserError if the disk refuses.
    """
    folder = Path(folder)
    model = _inner(model)
    weights = {name: _own_memory(tensor) for name, tensor in model.state_dict().items()}
    try:
        save_description(folder, model, encoder)
        with whole_file(folder / "pytorch_model.bin", "wb") as handle:
            torch.save(weights, handle)
        (folder / "model.safetensors").unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        raise CannotSave(folder, _refusal(error)) from error


def save_description(folder: Path, model: torch.nn.Module, encoder: Encoder) -> None:
    """Write everything that `save_model` writes except the weights. Raises OSError if the disk refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(folder)
    config = _inner(model).config
    write_json(folder / "config.json", plain_config(type_of(config), config))


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers that hold it as `.module`."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def _refusal(error: BaseException) -> str:
    """The disk's error, which torch's writer hides inside another one."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return first_line(error)


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU. A view into a larger buffer is copied, because torch.save would write the whole buffer."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _inside(module: str, names: Iterable[str]) -> bool:
    return any(name.startswith(module + ".") for name in names)


def save_run_model(output: Path, model: torch.nn.Module, encoder: Any) -> None:
    """Save the model next to the run's published record. It replaces an earlier run's model."""
    place = output / MODEL
    try:
        with whole_folder(place, MODEL_FILES) as folder:
            save_model(folder, model, encoder)
    except (CannotSave, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        old = ", and the model there is still an earlier run's" if place.exists() else ""
        raise UserError(
            f"the model cannot be saved as {place} ({reason}). The run's other files in {output} are complete{old}. "
            "Make room there."
        ) from error


def _modern_name(name: str) -> str:
    for old, modern in _OLD_ENDINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + modern
    return name
