"""Weights on disk: reading other programs' files, filling a model, and saving files that plain BERT classes load."""

import pickle
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from cos598d.data.encoders import Encoder
from cos598d.errors import UserError, first_line
from cos598d.models.configs import plain_config
from cos598d.records.conventions import MODEL
from cos598d.terminal.files import whole_file, whole_folder, write_json

_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}  # the first BERT checkpoints' names for LayerNorm's parameters


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a .safetensors file or of a file that torch.save wrote, on the CPU, without unpickling.

    The tensors may be memory-mapped from the file: copy what must outlive it. LayerNorm's old names `gamma` and `beta`
    are returned as `weight` and `bias`. Raises UserError for a missing, damaged or other file.
    """
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a warning about newer pickle protocols, which do work
                # Files from before torch 1.6 are not zip archives and cannot be memory-mapped.
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
            raise ValueError("it has something other than named tensors")
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError) as error:
        reason = first_line(error)
        raise UserError(f"{path} cannot be read as weights ({reason}). Download or save it again.") from error
    return {_modern_name(name): tensor for name, tensor in tensors.items()}


def fill_model(model: nn.Module, path: Path, may_be_new: Sequence[str], may_differ: Sequence[str] = ()) -> list[str]:
    """Copy the tensors of the file `path` into `model`, in place.

    Names match with or without the encoder's prefix ("bert."). Tensors of other heads are skipped, and so are those of
    another shape in the modules `may_differ`. Returns the modules among `may_be_new` (dotted names) of which the file
    has no tensor; they do not change. Raises UserError, before anything is copied, for a tensor that is missing, has
    another shape, is no floating-point tensor, or has non-finite values.
    """
    expected = model.state_dict()
    given: dict[str, torch.Tensor] = {}
    for name, tensor in load_weights(path).items():
        known = next((one for one in (name, f"{model.base_model_prefix}.{name}") if one in expected), None)
        if known is not None and (tensor.shape == expected[known].shape or not _is_in(known, may_differ)):
            given[known] = tensor
    new = [part for part in may_be_new if not any(_is_in(name, [part]) for name in given)]
    for name, wanted in expected.items():
        found = given.get(name)
        if found is None:
            problem = "" if _is_in(name, new) else "is missing"
        elif found.shape != wanted.shape:
            problem = f"has the shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
        elif not found.is_floating_point():
            problem = f"is of {str(found.dtype).removeprefix('torch.')}, not a floating-point tensor"
        else:
            problem = "" if torch.isfinite(found).all() else "has values that are not finite"
        if problem:
            raise UserError(
                f"{name} {problem} in {path}. Give a model's intact weights and the config.json beside them."
            )
    for name, tensor in given.items():
        expected[name].copy_(tensor)
    return [part for part in new if any(_is_in(name, [part]) for name in expected)]


def save_model(folder: Path, model: nn.Module, encoder: Encoder) -> None:
    """Write `model` to `folder` so that pytorch_transformers' `from_pretrained(folder)`, transformers' and `find_model`
    load it. Raises OSError or RuntimeError if the disk refuses."""
    save_description(folder, model, encoder)
    weights = {name: _own_memory(tensor) for name, tensor in model.state_dict().items()}
    with whole_file(folder / "pytorch_model.bin", "wb") as handle:
        torch.save(weights, handle)
    (folder / "model.safetensors").unlink(missing_ok=True)  # of an older model, which loaders would prefer


def save_description(folder: Path, model: nn.Module, encoder: Encoder) -> None:
    """Write everything that `save_model` writes except the weights. Raises OSError if the disk refuses."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(folder)
    write_json(folder / "config.json", plain_config(model.config))


def save_run_model(output: Path, model: nn.Module, encoder: Encoder) -> None:
    """Save the model next to the run's published record. It replaces an earlier run's model."""
    place = output / MODEL
    try:
        with whole_folder(place) as folder:
            save_model(folder, model, encoder)
    except (OSError, RuntimeError) as error:  # torch's writer hides a full disk in a RuntimeError
        hidden = error.__cause__ or error.__context__
        reason = next((one.strerror for one in (error, hidden) if isinstance(one, OSError) and one.strerror), error)
        old = ", and the model there is still an earlier run's" if place.exists() else ""
        raise UserError(
            f"the model cannot be saved as {place} ({reason}). The run's other files in {output} are complete{old}. "
            "Make room there."
        ) from error


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU. A view into a larger buffer is copied, because torch.save would write the whole buffer."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{module}." for module in modules))


def _modern_name(name: str) -> str:
    old = next((ending for ending in _OLD_ENDINGS if name.endswith(ending)), "")
    return name.removesuffix(old) + _OLD_ENDINGS.get(old, "")
