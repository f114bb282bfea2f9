"""`train --config`: repeat an earlier run with the flags in its config.json."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.terminal.own_code import is_own
from cos598d.terminal.printable import printable

# Flags of the earlier run's folder, or of its resumes, which a repetition does not take.
PLACES = ("output_dir", "overwrite_output_dir", "overwrite_cache", "resume", "resume_anyway")
# Only one of each pair may be given: if you give one, the file's other is dropped.
EXCLUSIVE = {"total_train_batch_size": "per_gpu_train_batch_size", "per_gpu_train_batch_size": "total_train_batch_size"}
# Flags that may name code, which runs only if you name it yourself.
OWN = ("sync", "task_name", "logger")


@dataclass(frozen=True)
class Recorded(RunConfig):
    """What a run's config.json has: its flags, and the number of its ranks."""

    world_size: int = 0


def repeated(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of RunConfig that are `given` and, for the rest, those of an earlier run; and its "world_size".

    Raises UsageError as `read_config`, and if the file names code to run that the user does not name.
    """
    found = read_config(path)
    for name in OWN:
        if name not in given and is_own(found[name] or ""):
            raise UsageError(
                f"--config {path} is of a run whose --{name} is code in a file, {found[name]}. Add --{name} "
                f"{found[name]} to run it, or another --{name}."
            )
    left_out = {*PLACES, *(EXCLUSIVE[name] for name in given if name in EXCLUSIVE)}
    return {name: value for name, value in found.items() if name not in left_out} | dict(given)


def read_config(path: Path) -> dict[str, Any]:
    """The values in a run's config.json: of every field of RunConfig, and the number of ranks as "world_size".

    Only their types are checked here; RunConfig checks their ranges, as for flags. Raises UsageError for a file that
    cannot be read, that is no config, or that has a field which this version does not know.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        values = asdict(msgspec.convert(found, Recorded))
        if unknown := found.keys() - values:
            raise ValueError(f"this version has no {printable(', '.join(sorted(unknown)), 60)}")
        if not (values["sync"] and values["world_size"]):
            raise ValueError("it has no sync or no world_size")
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else printable(error, 100)
        raise UsageError(f"--config {path} is no config: {why}. Give the config.json of a run's folder.") from None
    return values
