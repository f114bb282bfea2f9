"""The flags of a run: RunConfig's fields, those of a rank, and the original assignment's names for some of them."""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cos598d.checkpoint_flags import GROUP as CHECKPOINTS
from cos598d.commands.flags import add_flags, given_flags
from cos598d.commands.flags import to_words as to_plain_words
from cos598d.commands.rank_flags import RankFlags, StarterFlags
from cos598d.config import TRAINING, RunConfig
from cos598d.errors import UsageError
from cos598d.terminal.fields import flag

LOGGING_STEPS = 50  # as in the original assignment's scripts


@dataclass(frozen=True)
class CourseFlags:
    """Other names of RunConfig's flags, as in the original assignment's scripts."""

    fp16: bool = flag(False, "the same as --precision fp16", group=TRAINING)
    per_device_train_batch_size: int | None = flag(None, "the same as --per_gpu_train_batch_size", group=TRAINING)
    per_device_eval_batch_size: int | None = flag(None, "the same as --per_gpu_eval_batch_size", group=TRAINING)
    evaluate_during_training: bool = flag(
        False, f"the same as --eval_steps N, with --logging_steps N (default: {LOGGING_STEPS})", group=CHECKPOINTS
    )
    logging_steps: int | None = flag(None, "the same as --log_every", group=CHECKPOINTS)
    save_total_limit: int | None = flag(None, "the same as --keep", group=CHECKPOINTS)


# The flags of RunConfig by their names in the original assignment.
SAME = {
    "per_device_train_batch_size": "per_gpu_train_batch_size",
    "per_device_eval_batch_size": "per_gpu_eval_batch_size",
    "logging_steps": "log_every",
    "save_total_limit": "keep",
}


def add_run_options(parser: argparse.ArgumentParser, but: Collection[str] = (), **defaults: Any) -> None:
    """Add the flags of a run to `parser`, without those, or the groups, named in `but`.

    `defaults` are a task script's own, shown in the help; a flag that is not given stays None in the result.
    """
    add_flags(parser, RankFlags, StarterFlags, RunConfig, CourseFlags, shown=defaults, but=but)


def run_values(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that the user gave, under RunConfig's names, and no others. Raises UsageError."""
    values, course = given_flags(options, RunConfig), given_flags(options, CourseFlags)
    same = {SAME[name]: (f"--{name}", value) for name, value in course.items() if name in SAME}
    if course.get("fp16"):
        same["precision"] = ("--fp16", "fp16")
    if course.get("evaluate_during_training"):
        same["eval_steps"] = ("--evaluate_during_training", course.get("logging_steps", LOGGING_STEPS))
    for name, (word, value) in same.items():
        if values.get(name, value) != value:
            raise UsageError(f"{word} contradicts --{name} {values[name]}. Give only one.")
        values[name] = value
    return values


def to_words(values: Mapping[str, Any]) -> list[str]:
    """The flags that give `values`, as `run_values` returns them, on a command line."""
    return to_plain_words(values, RunConfig)
