"""`train --config`: repeat an earlier run with the flags in its config.json."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cos598d.commands.flags import to_words
from cos598d.commands.run_flags import RankFlags, identity_from
from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.terminal.own_code import is_own
from cos598d.terminal.printable import printable

# Flags of the earlier run's folder, or of its resumes, which a repetition does not take.
PLACES = ("output_dir", "overwrite_output_dir", "overwrite_cache", "resume", "resume_anyway")
# Only one of each pair may be given: if you give one, the file's other is dropped.
EXCLUSIVE = {"total_train_batch_size": "per_gpu_train_batch_size", "per_gpu_train_batch_size": "total_train_batch_size"}
# Flags that may name code, which runs only if you name it yourself.
OWN = {"sync": "sync", "task_name": "task"}
WORLD_SIZE = "world_size"


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the flag to `parser`."""
    section = parser.add_argument_group("repeat a run")
    section.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="repeat the run with this config.json: the same flags and --world_size, except for those that you give",
    )


@dataclass(frozen=True)
class EarlierRun:
    """The run that --config names: its file, and the values in it; neither if the flag is not given."""

    path: Path | None
    found: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path | None) -> "EarlierRun":
        """The run whose config.json this is. Raises UsageError as `read_config`."""
        return cls(path, {} if path is None else read_config(path))

    def values(self, lesson: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """RunConfig's values: the task script's, the user's and, if neither has one, the file's.

        Raises UsageError if the file is of another task script, or names code to run that the user does not name.
        """
        if self.path is None:
            return {**lesson, **given}
        for name, value in lesson.items():
            if self.found[name] != value:
                raise UsageError(
                    f"--config {self.path} is of a run with --{name} {self.found[name]}, but this script has {value}. "
                    f"Repeat it with `cos598d train --config {self.path}`."
                )
        for name, what in OWN.items():
            if name not in given and is_own(self.found[name] or ""):
                raise UsageError(
                    f"--config {self.path} is of a run whose {what} is code in a file, {self.found[name]}. Add "
                    f"--{name} {self.found[name]} to run it, or another --{name}."
                )
        left_out = {*PLACES, WORLD_SIZE, *(EXCLUSIVE[name] for name in given if name in EXCLUSIVE)}
        return {name: value for name, value in self.found.items() if name not in left_out} | dict(given)

    def ranks(self, flags: RankFlags) -> RankFlags:
        """The `flags`, with the run's number of ranks if neither the user nor a launcher gives one."""
        if self.path is None or flags.world_size is not None:
            return flags
        if flags.local_rank in (None, -1):
            identity = identity_from(flags)
            if identity is None or identity.source != "alone":
                return flags
        return replace(flags, world_size=self.found[WORLD_SIZE])

    def words(self, given: Mapping[str, Any], world_size: int) -> str:
        """One line for the user: which run is repeated, and which of the `given` flags differ from it."""
        others = {name: value for name, value in given.items() if name not in PLACES and self.found[name] != value}
        words = to_words(others, RunConfig)
        if self.found[WORLD_SIZE] != world_size:
            words += [f"--{WORLD_SIZE}", str(world_size)]
        return printable(f"repeats {self.path}" + (f", except for {' '.join(words)}" if words else ""))


@dataclass(frozen=True)
class Recorded(RunConfig):
    """What a run's config.json has: its flags, and the number of its ranks."""

    world_size: int = 0


def read_config(path: Path) -> dict[str, Any]:
    """The values in a run's config.json: of every field of RunConfig, and the number of ranks as "world_size".

    Only their types are checked here; RunConfig checks their ranges, as for flags. Raises UsageError for a file that
    cannot be read, that is no config, or that has a field which this version does not know.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        values = asdict(msgspec.convert(found, Recorded))
    except OSError as error:
        raise _no_config(path, f"cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_config(path, f"is no config: {printable(error, 100)}") from None
    for name in (name for name in found if name not in values):
        raise _no_config(path, f"has the field {printable(name, 60)!r}, which this version does not have")
    for name in (name for name in ("sync", WORLD_SIZE) if not found.get(name)):
        raise _no_config(path, f"has no {name}")
    return values


def _no_config(path: Path, what: str) -> UsageError:
    return UsageError(f"--config {path} {what}. Give the config.json of a run's folder.")
