"""The syncs to compare, from the arguments that name them: NAME, NAME+CODEC, NAME:option=value, FILE.py:Class."""

from dataclasses import replace
from typing import Any, NamedTuple

from cos598d.config import SYNC_FIELDS, RunConfig
from cos598d.errors import UsageError
from cos598d.records.conventions import DDP, FLOOR, SPARSE_FLOOR
from cos598d.strategies import known_names
from cos598d.sync import SYNCS, unknown
from cos598d.sync.options import SyncOptions
from cos598d.terminal.own_code import is_own

# The options that are switches.
SWITCHES = tuple(name for name in SYNC_FIELDS if isinstance(getattr(RunConfig, name), bool))
CAPACITIES_MB = (0.5, 1, 2, 5, 10, 25, 50, 100)


class Candidate(NamedTuple):
    """A sync to measure: its label in the record and the table, its registered name or file, its options."""

    label: str
    name: str
    options: SyncOptions

    @property
    def has_sparse_embeddings(self) -> bool:
        """Whether its replica's large embeddings have sparse gradients."""
        return self.label == SPARSE_FLOOR


def parse_candidate(word: str, backend: str = "gloo") -> Candidate:
    """The candidate that `word` names for this backend; its label is the word itself.

    all_reduce                    a registered sync
    my_sync.py:MySync             a class in a file
    bucketed:bucket_mb=5          with options, any number of them
    ddp:bucket_view               a switch, turned on
    bucketed+bf16, ring+topk:0.05   with gradient compression, the same as :compress=bf16
    none:sparse_embeddings          the floor whose large embeddings have sparse gradients

    Raises UsageError for an unknown sync, option or value.
    """
    name, values = (FLOOR, {}) if word == SPARSE_FLOOR else read_candidate(word)
    if name not in known_names() and not is_own(name):
        raise unknown("--sync", name, known_names())
    config = RunConfig(sync=name, backend=backend, **values)
    config.check(world_size=1)
    options = config.sync_options()
    return Candidate(word, name, replace(options, first_bucket_mb=min(options.first_bucket_mb, options.bucket_mb)))


def read_candidate(word: str) -> tuple[str, dict[str, Any]]:
    """The name, or FILE.py:Class, and the options in a `word` for `parse_candidate`. The name is not looked up.

    Raises UsageError for an unknown option or value.
    """
    values: dict[str, Any] = {}
    parts = word.split(":")
    while len(parts) > 1 and ("=" in parts[-1] or parts[-1] in SWITCHES):
        option, _, value = parts.pop().partition("=")
        if option in SWITCHES:
            if value:
                raise UsageError(f"--sync {word}: {option} takes no value. Write {':'.join([*parts, option])}.")
            values[option] = True
            continue
        if option not in SYNC_FIELDS:
            raise UsageError(f"--sync {word}: unknown option {option!r}. Choose from {', '.join(SYNC_FIELDS)}.")
        values[option] = _value(word, option, value)
    name = ":".join(parts)
    before, _, codec = name.rpartition("+")
    if before and codec.partition(":")[0].isidentifier():  # otherwise the "+" belongs to a file's path
        if "compress" in values:
            raise UsageError(f"--sync {word} has two compressions. Give one.")
        name, values["compress"] = before, codec
    return name, values


def parse_candidates(words: str | None, backend: str = "gloo") -> list[Candidate]:
    """The candidates in `words`, separated by commas, each once. None: every registered sync."""
    named = list(SYNCS) if words is None else [word.strip() for word in words.split(",") if word.strip()]
    if not named:
        raise UsageError(f"--sync {words!r} names no sync. Give one or more, separated by commas.")
    return [parse_candidate(word, backend) for word in dict.fromkeys(named)]


def references(candidates: list[Candidate], with_step: bool = False) -> list[Candidate]:
    """The candidates, followed by the missing baselines with which all are compared.

    With whole steps, the floor with sparse embeddings is one of them: a sync that steps by itself may save that work.
    """
    labels = [candidate.label for candidate in candidates]
    all_references = (FLOOR, SPARSE_FLOOR, DDP) if with_step else (FLOOR, DDP)
    return candidates + [parse_candidate(label) for label in all_references if label not in labels]


def sweep_candidates() -> list[Candidate]:
    """`bucketed` with each capacity of the sweep."""
    return [parse_candidate(f"bucketed:bucket_mb={capacity:g}") for capacity in CAPACITIES_MB]


def _value(word: str, option: str, text: str) -> float | int | str:
    default = getattr(RunConfig, option)
    if default is None:
        return text
    try:
        return type(default)(text)
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise UsageError(f"--sync {word}: {option} {text!r} is not valid. Give a {kind}.") from None
