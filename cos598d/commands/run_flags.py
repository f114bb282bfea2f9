"""The flags of a run: RunConfig's fields, those of a rank, and the course's own word for one of them."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cos598d.commands.flags import add_flags, given_flags
from cos598d.commands.flags import to_words as to_plain_words
from cos598d.commands.rank_flags import RankFlags, StarterFlags
from cos598d.config import TRAINING, RunConfig
from cos598d.errors import UsageError
from cos598d.fields import flag


@dataclass(frozen=True)
class CourseFlags:
    """Other words for what RunConfig's flags say, as the course's scripts have them."""

    fp16: bool = flag(False, "the same as --precision fp16", group=TRAINING)


def add_run_options(parser: argparse.ArgumentParser, but: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `defaults` are a lesson's own, shown in the help; a flag that is not given stays None in the result.
    """
    add_flags(parser, RankFlags, StarterFlags, RunConfig, CourseFlags, shown=defaults, but=but)


def run_values(options: argparse.Namespace) -> dict[str, Any]:
    """What the user gave, under RunConfig's names; what was not given is not in it. Raises UsageError."""
    values = given_flags(options, RunConfig)
    if getattr(options, "fp16", None):
        if values.get("precision", "fp16") != "fp16":
            raise UsageError(f"--fp16 contradicts --precision {values['precision']}. Give only one.")
        values["precision"] = "fp16"
    return values


def to_words(values: Mapping[str, Any]) -> list[str]:
    """The flags that give `values`, as `run_values` returns them, on a command line."""
    return to_plain_words(values, RunConfig)
