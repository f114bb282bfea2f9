"""The axes of a sweep and their values, each checked: flags of a run, its set-up, and the links between its hosts."""

from collections.abc import Sequence
from typing import Any

from cos598d.config import RunConfig
from cos598d.errors import UsageError, flag_called
from cos598d.records.quantities import parse_delay, parse_rate
from cos598d.terminal.fields import Flag, flags_of
from cos598d.terminal.printable import printable
from cos598d.terminal.words import did_you_mean
from cos598d.tools.report.sweep_entries import BATCH, DELAY, LINKS, RATE, SETUP
from cos598d.tools.runs.planned import Setup

# The flag for which this axis is another name.
BATCH_FLAG = "per_gpu_train_batch_size"
BY_ITSELF = "the sweep sets it itself. Leave it out"
OF_TRAININGS = "every run of a sweep trains. To skip the evaluations, give only --do_train after --"
# Flags that a sweep sets, and the alternatives.
INSTEAD = {
    "seed": "a sweep sets it. Give --seeds N, and the first seed as --seed after --",
    "world_size": f"a sweep sets it. Use the axis {SETUP}, as {SETUP}=1x1,1x4,2x2",
    BATCH_FLAG: f"a sweep sets it. Use the axis {BATCH}, as {BATCH}=1,4,16",
    "do_train": OF_TRAININGS,
    "do_eval": OF_TRAININGS,
} | dict.fromkeys(("label", "output_dir", "overwrite_output_dir", "save_model", "resume", "resume_anyway"), BY_ITSELF)
SWITCH = {"on": True, "off": False}


def read_grid(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The axes in the given order, each with its values as the user wrote them, from arguments such as "batch=1,4,16".

    Raises UsageError for an unknown axis, one given twice, and an invalid or repeated value.
    """
    grid: dict[str, tuple[str, ...]] = {}
    for words in given:
        name, equals, values = words.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(
                f"--grid {printable(words, 100)} has no value. Write an axis and its values, as {BATCH}=1,4,16."
            )
        _check_name(name)
        if name in grid:
            raise UsageError(f"--grid {name} is given twice. Write all of its values in one.")
        grid[name] = tuple(word.strip() for word in values.split(","))
        if "" in grid[name]:
            raise UsageError(
                f"--grid {printable(words, 100)}: a value is empty. Write one or more, separated by commas."
            )
        read: list[Any] = []
        for word in grid[name]:
            value = read_value(name, word)
            if value in read:
                raise UsageError(f"--grid {printable(words, 100)}: {word} appears twice. Leave one out.")
            read.append(value)
    return grid


def read_value(name: str, word: str) -> Any:
    """The value of a word of this axis: a Setup, seconds, bits per second, or what the flag takes.

    Raises UsageError for an invalid word.
    """
    if name == SETUP:
        return Setup.parse(word)
    if name in LINKS:
        with flag_called(f"--grid {name}=", there=f"--{name} "):
            return parse_delay(word) if name == DELAY else parse_rate(word)
    flag = BATCH_FLAG if name == BATCH else name
    with flag_called(f"--grid {name}=", there=f"--{flag} "):
        return _of_flag(flag, flags_of(RunConfig)[flag], word)


def _of_flag(name: str, said: Flag, word: str) -> Any:
    if said.kind is bool:
        if word not in SWITCH:
            raise UsageError(f"--{name} {printable(word, 40)}: it is a switch. Give {' or '.join(SWITCH)}.")
        return SWITCH[word]
    if said.none is not None and word == said.none:
        return None
    try:
        value = said.kind(word)
    except ValueError:
        kind = "a whole number" if said.kind is int else "a number"
        raise UsageError(f"--{name} {printable(word, 40)} is not valid. Give {kind}.") from None
    said.check(name, value)
    return value


def _check_name(name: str) -> None:
    if name in INSTEAD:
        raise UsageError(f"--grid {name} is not an axis: {INSTEAD[name]}.")
    known = [BATCH, SETUP, *LINKS, *flags_of(RunConfig)]
    if name not in known:
        raise UsageError(
            f"--grid {printable(name, 60)}: unknown axis.{did_you_mean(name, known)} Give a flag of train without "
            f"dashes, or {BATCH}, {SETUP}, {DELAY} or {RATE}."
        )
