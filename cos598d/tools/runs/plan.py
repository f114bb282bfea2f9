"""The runs of a command before they are made: the axes of a sweep, its combinations, and which of them cannot run."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from cos598d.config import RunConfig, config_from
from cos598d.errors import UsageError, UserError, flag_called
from cos598d.records.quantities import parse_delay, parse_rate
from cos598d.terminal.fields import Flag, flags_of
from cos598d.terminal.printable import printable
from cos598d.terminal.words import did_you_mean
from cos598d.tools.report.sweep_entries import ALONE, BATCH, DELAY, LINKS, RATE, SETUP


@dataclass(frozen=True)
class Setup:
    """The number of hosts, and of ranks on each: "2x2"."""

    hosts: int
    ranks_per_host: int

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks_per_host}"

    @classmethod
    def parse(cls, word: str) -> "Setup":
        """Raises UsageError unless it is HOSTSxRANKS."""
        found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", word, re.ASCII)
        if not found:
            raise UsageError(
                f"--grid {SETUP}={printable(word, 40)} is not valid. Give hosts and the ranks on each, as 1x4 (four "
                "ranks of this host) or 2x2 (two ranks on each of two hosts)."
            )
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class PlannedRun:
    """One run of many.

    place       its folder in that of all runs, and its key in their state
    label       as in its config
    name        what it shares with its repeats under other seeds, in the table of --dry_run
    head        the line that is printed when it begins
    values      RunConfig's, also those that all runs share
    settings    of a sweep: the axes' values as the user wrote them, in the axes' order; without links on one host
    seed        of a sweep, too
    delay       seconds from host to host; `rate`: bits per second of each link, None without a limit
    refused     why it cannot run, as a sentence; "" if it can
    """

    place: str
    label: str
    name: str
    head: str
    setup: Setup
    values: Mapping[str, Any]
    settings: Mapping[str, str] = field(default_factory=dict)
    seed: int = RunConfig.seed
    delay: float = 0.0
    rate: float | None = None
    refused: str = ""


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


LONGEST_LABEL = 90  # of the 100 characters of a run's label
DEFAULT_SETUP, NO_DELAY = ALONE, "0"


def combine(
    grid: Mapping[str, Sequence[str]], flags: Mapping[str, Any], seeds: Sequence[int], rate: str
) -> list[PlannedRun]:
    """Every combination of the grid's values for each seed, with the shared `flags`: seed by seed, so that one seed's
    table is complete before the next begins.

    Delays and rates have no effect on one host: combinations that differ only in them are one. Raises UsageError if an
    axis changes nothing, or if a value can run with none of the others.
    """
    _check_links(grid)
    _check_once(grid, flags)
    found: dict[str, PlannedRun] = {}
    for seed in seeds:
        for words in product(*grid.values()):
            one = _combination(dict(zip(grid, words)), flags, seed, rate)
            found.setdefault(one.place, one)
    _check_refused(grid, list(found.values()))
    return list(found.values())


def collapsed(grid: Mapping[str, Sequence[str]]) -> str:
    """The remark about set-ups of one host together with axes of links; "" if there is none."""
    axes = [name for name in LINKS if name in grid]
    single = [word for word in grid.get(SETUP, ()) if Setup.parse(word).hosts == 1]
    if not axes or not single:
        return ""
    means = "mean" if len(axes) > 1 else "means"
    have = "which has one host: it is" if len(single) == 1 else "which have one host: each is"
    all_of = "all of them" if len(axes) > 1 else "all of its values"
    return f"{' and '.join(axes)} {means} nothing to {', '.join(single)}, {have} run once for {all_of}."


def _combination(settings: dict[str, str], flags: Mapping[str, Any], seed: int, rate: str) -> PlannedRun:
    setup = Setup.parse(settings.get(SETUP, DEFAULT_SETUP))
    if setup.hosts == 1:
        settings = {name: word for name, word in settings.items() if name not in LINKS}
    own = {
        BATCH_FLAG if name == BATCH else name: read_value(name, word)
        for name, word in settings.items()
        if name not in (SETUP, *LINKS)
    }
    values = {**flags, **own, "seed": seed}
    refused = ""
    try:
        config_from(values).check(setup.world_size)
    except UserError as error:
        refused = str(error)
    label = _label([*settings.items(), ("seed", str(seed))])
    return PlannedRun(
        place=label,
        label=label,
        name=_label(settings.items()),
        head=label,
        setup=setup,
        values=values,
        seed=seed,
        settings=settings,
        delay=read_value(DELAY, settings.get(DELAY, NO_DELAY)),
        rate=None if setup.hosts == 1 else read_value(RATE, settings.get(RATE, rate)),
        refused=refused,
    )


def _label(words: Iterable[tuple[str, str]]) -> str:
    """The run's name, also of its folder. Characters that a folder's name cannot have are replaced, and a digest keeps
    names unique."""
    text = "-".join(name + word for name, word in words)
    label = re.sub(r"[^\w.+=@-]", "_", text)
    if label != text or len(label) > LONGEST_LABEL:
        label = f"{label[: LONGEST_LABEL - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return label


def _check_links(grid: Mapping[str, Sequence[str]]) -> None:
    for name in LINKS:
        if name in grid and all(Setup.parse(word).hosts == 1 for word in grid.get(SETUP, (DEFAULT_SETUP,))):
            raise UsageError(
                f"--grid {name}={','.join(grid[name])} would change nothing: no set-up has several hosts. Add one, as "
                f"--grid {SETUP}=2x2, or leave {name} out."
            )


def _check_once(grid: Mapping[str, Sequence[str]], flags: Mapping[str, Any]) -> None:
    """Raise UsageError for a flag that is an axis and is also given to all runs."""
    for name in grid:
        others = (BATCH_FLAG, "total_train_batch_size") if name == BATCH else (name,)
        for flag in others:
            if flag in flags:
                raise UsageError(f"--{flag} is given after -- and by --grid {name}. Leave one of them out.")


def _check_refused(grid: Mapping[str, Sequence[str]], combinations: Sequence[PlannedRun]) -> None:
    """Raise UsageError if nothing can run, or no combination with a certain value can."""
    if all(one.refused for one in combinations):
        raise UsageError(combinations[0].refused)
    for name, words in grid.items():
        for word in words:
            mine = [one for one in combinations if one.settings.get(name) == word]
            if mine and all(one.refused for one in mine):
                raise UsageError(f"--grid {name}={word} does not work with any other axis here: {mine[0].refused}")
