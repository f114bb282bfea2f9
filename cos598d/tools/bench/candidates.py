"""The syncs to compare, from the arguments that name them: NAME, NAME+CODEC, NAME:option=value, FILE.py:Class."""

from typing import Any, NamedTuple

from cos598d.config import SYNC_FIELDS, RunConfig
from cos598d.errors import UsageError
from cos598d.records.conventions import DDP, FLOOR
from cos598d.sync import ENGINES, SYNCS, get_sync
from cos598d.terminal.fields import flags_of

FLAGS = {name: said for name, said in flags_of(RunConfig).items() if name in SYNC_FIELDS}


class Candidate(NamedTuple):
    """A sync to measure: its label in the record and the table, its registered name or file, its options."""

    label: str
    name: str
    options: dict[str, Any]

    @property
    def steps_itself(self) -> bool:
        """Whether it takes part in the optimizer's step: it shards, or is another library's engine."""
        return self.name in ENGINES or get_sync(self.name).shards


def parse_candidate(word: str, backend: str = "gloo") -> Candidate:
    """The candidate that `word` names for this backend; its label is the word itself.

    all_reduce                    a registered sync
    my_sync.py:MySync             a class in a file
    bucketed:bucket_mb=5          with options, any number of them
    bucketed+bf16, bucketed+topk:0.05   with gradient compression, the same as :compress=bf16

    Raises UsageError for an unknown sync, option or value.
    """
    values: dict[str, Any] = {}
    parts = word.split(":")
    while len(parts) > 1 and ("=" in parts[-1] or parts[-1] in FLAGS):
        option, _, value = parts.pop().partition("=")
        if option not in FLAGS:
            raise UsageError(f"--sync {word}: unknown option {option!r}. Choose from {', '.join(FLAGS)}.")
        kind = FLAGS[option].kind
        try:
            values[option] = kind(value) if kind is not bool else {"": True}[value]
        except (ValueError, KeyError):
            wanted = {bool: f"{option} without a value", int: "a whole number"}.get(kind, "a number")
            raise UsageError(f"--sync {word}: {option} {value!r} is not valid. Give {wanted}.") from None
    name = ":".join(parts)
    before, _, codec = name.rpartition("+")
    if before and codec.partition(":")[0].isidentifier():  # otherwise the "+" belongs to a file's path
        if "compress" in values:
            raise UsageError(f"--sync {word} has two compressions. Give one.")
        name, values["compress"] = before, codec
    get_sync(name)
    config = RunConfig(sync=name, backend=backend, **values)
    config.check(world_size=1)
    return Candidate(word, name, config.sync_options())


def parse_candidates(words: str | None, backend: str = "gloo") -> list[Candidate]:
    """The candidates in `words`, separated by commas, each once. None: every built-in sync that averages gradients."""
    averaging = [name for name in SYNCS if not get_sync(name).shards]
    named = averaging if words is None else [word.strip() for word in words.split(",") if word.strip()]
    if not named:
        raise UsageError(f"--sync {words!r} names no sync. Give one or more, separated by commas.")
    return [parse_candidate(word, backend) for word in dict.fromkeys(named)]


def references(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates, followed by the missing baselines with which all are compared."""
    labels = [candidate.label for candidate in candidates]
    return candidates + [parse_candidate(label) for label in (FLOOR, DDP) if label not in labels]
