"""The combinations of a sweep: each one's values, hosts and links, and which of them cannot run."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from cos598d.config import config_from
from cos598d.errors import UsageError, UserError
from cos598d.tools.report.sweep_entries import ALONE, BATCH, DELAY, LINKS, RATE, SETUP
from cos598d.tools.runs.grid import BATCH_FLAG, read_value
from cos598d.tools.runs.planned import PlannedRun, Setup

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
