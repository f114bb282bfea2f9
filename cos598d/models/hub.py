"""A pretrained model's files from the model hub or its cache. Without a network, a sentence within bounded time."""

import re
import threading
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import huggingface_hub.utils
from huggingface_hub import constants, errors

from cos598d.errors import HubUnreachable, UserError, first_line

REACH_SECONDS = 10.0  # a hub that has not answered a first question by then counts as unreachable
WAYS_OUT = (
    "Give --model_name_or_path a local folder, minilm, tiny or bert-base (vit-tiny for images), or set HF_HOME to a "
    "filled cache of the hub."
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w./-]*)?", re.ASCII)

huggingface_hub.logging.set_verbosity_error()  # this module reports what goes wrong


class _NoBar(huggingface_hub.utils.tqdm):
    """No progress bar, for the small files next to the weights."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "disable": True})


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a model's name on the hub: NAME or OWNER/NAME, with or without @REVISION."""
    return bool(_NAME.fullmatch(name)) and "--" not in name.partition("@")[0] and ".." not in name


def hub_folder(
    name: str, needed: Sequence[tuple[str, ...]], optional: Sequence[str] = (), cache_dir: str | None = None
) -> Path:
    """The local folder with files of the model `name`, downloaded if the cache lacks them.

    `name` may have a revision (NAME@REVISION: a branch, a tag or a commit's full hash). The default is the main branch
    at the time when the cache is filled. The folder's name is the commit's hash. `needed` lists groups of file names:
    of each group, the first that exists is fetched. `optional` files are fetched if the model has them. Only these
    files are downloaded, all of one revision. If the cache has all of them, the network is not used, so ranks that
    start at different times get the same revision. Processes that ask at the same time download only once:
    huggingface_hub locks each file.

    Raises HubUnreachable within about REACH_SECONDS (at once if HF_HUB_OFFLINE forbids the network). Raises UserError
    if the hub has no such model or file, or if the download is interrupted.
    """
    wanted = [*needed, *((file,) for file in optional)]
    folder = _cached_folder(name, wanted, cache_dir)
    if folder:
        return folder
    # If the cache lacks only an optional file, and the hub cannot be asked for it, the cache is enough.
    enough = _cached_folder(name, needed, cache_dir)
    try:
        _ask(name, needed[0][0])
    except HubUnreachable:
        if enough:
            return enough
        raise
    return _download(name, wanted, len(needed), cache_dir)


def _split(name: str) -> tuple[str, str | None]:
    """A model's name and its revision; None for the main branch."""
    model, _, revision = name.partition("@")
    return model, revision or None


def _cached_folder(name: str, groups: Sequence[tuple[str, ...]], cache_dir: str | None) -> Path | None:
    """The snapshot in the cache if it covers every group: by a file, or by a note that the hub has none."""
    folder = None
    model, revision = _split(name)
    for group in groups:
        # A path, None if nothing is known, or an object that means that the hub has no such file.
        answers = [
            huggingface_hub.try_to_load_from_cache(model, file, cache_dir=cache_dir, revision=revision)
            for file in group
        ]
        path = next((answer for answer in answers if isinstance(answer, str)), None)
        if path is not None:
            folder = Path(path).parent
        elif None in answers:
            return None
    return folder


def _ask(name: str, file: str) -> None:
    """Ask the hub for one file's description. Raises HubUnreachable after REACH_SECONDS, and UserError on a refusal.

    huggingface_hub's own download retries an unreachable hub for too long. Name resolution, proxies and several
    addresses each have their own timeouts. So the question runs in its own thread, and the clock decides.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable(
            f"{name} is not a folder here, and HF_HUB_OFFLINE is set while the hub's cache lacks files of it. "
            f"Unset HF_HUB_OFFLINE. {WAYS_OUT}"
        )
    model, revision = _split(name)
    caught: list[Exception] = []

    def question() -> None:
        try:
            url = huggingface_hub.hf_hub_url(model, file, revision=revision)
            huggingface_hub.get_hf_file_metadata(url, timeout=REACH_SECONDS / 2)
        except Exception as error:  # noqa: BLE001 - the thread that waits tells what it means
            caught.append(error)

    thread = threading.Thread(target=question, daemon=True, name="question to the hub")
    thread.start()
    thread.join(REACH_SECONDS)
    if not thread.is_alive() and not caught:
        return
    error = caught[0] if caught else TimeoutError(f"no answer within {REACH_SECONDS:.0f} s")
    if isinstance(error, errors.EntryNotFoundError):
        return  # the model exists; the download reports a missing file
    raise _refusal(name, error) or HubUnreachable(
        f"{name} is not a folder here, and the model hub at {constants.ENDPOINT} cannot be reached ({_reason(error)}). "
        f"{WAYS_OUT}"
    ) from error


def _download(name: str, groups: Sequence[tuple[str, ...]], needed: int, cache_dir: str | None) -> Path:
    """Fetch the first existing file of each group. Only the first `needed` groups must have one."""
    folder: Path | None = None
    model, wanted = _split(name)
    for index, group in enumerate(groups):
        for file in group:
            bar = None if file.endswith((".safetensors", ".bin")) else _NoBar
            # The first download follows the branch or tag; the others use the commit that it found.
            revision = folder.name if folder else wanted
            try:
                path = huggingface_hub.hf_hub_download(
                    model, file, revision=revision, cache_dir=cache_dir, tqdm_class=bar
                )
            except errors.RemoteEntryNotFoundError:
                continue
            except Exception as error:  # whatever the network and the disk do, the user needs one sentence
                raise _refusal(name, error) or UserError(
                    f"the download of {file} of {name} from the model hub broke off ({_reason(error)}). "
                    f"Start again. {WAYS_OUT}"
                ) from error
            folder = Path(path).parent
            break
        else:
            if index < needed:
                raise UserError(f"the hub's model {name} has no {' or '.join(group)}. Choose another model. {WAYS_OUT}")
    if folder is None:
        raise ValueError("no group of files is needed: there is nothing to download")
    return folder


def _refusal(name: str, error: BaseException) -> UserError | None:
    """The error for a hub that answered with a refusal."""
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"the hub's model {name} is gated. Ask for access there and set HF_TOKEN. {WAYS_OUT}")
    if isinstance(error, errors.RevisionNotFoundError) and "@" in name:
        model, revision = _split(name)
        return UserError(
            f"the hub's model {model} has no revision {revision}. Give a branch, a tag or a commit's full hash. "
            f"{WAYS_OUT}"
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)):
        return UserError(f"{name} is neither a folder here nor a model that the hub shows you. {WAYS_OUT}")
    return None


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause of `error`, shortened for a sentence."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
