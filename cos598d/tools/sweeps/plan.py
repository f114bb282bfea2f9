"""Which runs a sweep has: its axes, their combinations, which of them cannot run, and the command of each."""

import hashlib
import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from cos598d.config import RunConfig, config_from
from cos598d.errors import UsageError, UserError
from cos598d.records.quantities import parse_delay, parse_rate
from cos598d.terminal.fields import Flag, flags_of
from cos598d.terminal.words import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OURS = (sys.executable, "-m", "cos598d")
SETUP, BATCH, COMMAND, WORLD_SIZE = "setup", "batch", "{command}", 4
LINKS = {"delay": "0", "rate": "1gbit"}  # of the links between emulated hosts
ALSO_AXES = {BATCH: "per_gpu_train_batch_size"}  # another name of a flag
LENGTHS = ("num_train_epochs", "max_steps")
# A sweep keeps no models. It keeps checkpoints only where one of SAVING asks for them.
OWN = {"save_model": False, "save_epochs": 0}
SAVING = ("save_steps", "save_epochs")
# What the sweep itself gives to each run.
SET_HERE = ("label", "output_dir", "overwrite_output_dir", "resume", "resume_anyway")
LONGEST_NAME = 90  # of the 100 characters of a run's label


@dataclass(frozen=True)
class Planned:
    """One run: its folder's name, what varies, all of its flags, its hosts and ranks, and why it cannot run."""

    name: str
    varies: Mapping[str, Any]
    flags: Mapping[str, Any]
    hosts: int
    ranks_per_host: int
    links: Mapping[str, str]
    refused: str = ""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def keeps(self) -> bool:
        """Whether its checkpoints stay after its end."""
        return any(self.flags.get(name) for name in SAVING)


def presets() -> dict[str, Any]:
    """The sweeps that have a name."""
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


def read_grid(given: Sequence[str]) -> dict[str, list[Any]]:
    """The axes of arguments such as "batch=1,4,16", each with its values. Raises UsageError for one that cannot be."""
    grid: dict[str, list[Any]] = {}
    flags = flags_of(RunConfig)
    for words in given:
        name, equals, values = words.partition("=")
        if not equals or not all(values.split(",")):
            raise UsageError(f"--grid {words} has no values. Write an axis and its values, as {BATCH}=1,4,16.")
        if name in SET_HERE or name == "seed":
            instead = "Give --seeds N" if name == "seed" else "Leave it out"
            raise UsageError(f"--grid {name} is not an axis: the sweep sets it itself. {instead}.")
        known = [*flags, *ALSO_AXES, SETUP, *LINKS]
        if name not in known:
            raise UsageError(
                f"--grid {name}: unknown axis.{did_you_mean(name, known)} Give a flag of train without its dashes, or "
                f"{BATCH}, {SETUP}, delay or rate."
            )
        flag = ALSO_AXES.get(name, name)
        grid[name] = [_value(name, flags.get(flag), word) for word in values.split(",")]
        if len(set(grid[name])) < len(grid[name]) or sum(one.startswith(f"{name}=") for one in given) > 1:
            raise UsageError(f"--grid {words}: a value, or the axis, is given twice. Leave one out.")
    return grid


def _value(name: str, said: Flag | None, word: str) -> Any:
    if said is None:
        if name in LINKS:
            (parse_delay if name == "delay" else parse_rate)(word)
        else:
            setup(word)
        return word
    if said.kind is bool:
        if word not in ("on", "off"):
            raise UsageError(f"--grid {name}={word}: it is a switch. Give on or off.")
        return word == "on"
    if word == said.none:
        return None
    try:
        value = said.kind(word)
    except ValueError:
        raise UsageError(f"--grid {name}={word} is not valid. Give a number.") from None
    said.check(name, value)
    return value


def setup(word: str, world_size: int = WORLD_SIZE) -> tuple[int, int]:
    """The hosts, and the ranks on each: "2x4". N stands for `world_size`."""
    found = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,2})", word.replace("N", str(world_size)))
    if not found:
        raise UsageError(f"--grid {SETUP}={word} is not valid. Give hosts and the ranks on each, as 1x4 or 2x2.")
    return int(found[1]), int(found[2])


def plan(
    preset: Mapping[str, Any],
    grid: Mapping[str, list[Any]],
    flags: Mapping[str, Any],
    seeds: int = 1,
    repeats: int = 1,
    world_size: int = WORLD_SIZE,
) -> list[Planned]:
    """The preset's runs, or every combination of the grid's values: for each seed, and then for each repeat.

    A repeat has the same seeds in another order, so that a machine that is slow for a while slows all alike. Raises
    UsageError if there is nothing to vary, or if nothing can run.
    """
    axes = {**preset.get("grid", {}), **grid}
    shared = {**OWN, **preset.get("flags", {}), **flags}
    if any(flags.get(name) for name in LENGTHS):  # one of the two says how long a run is
        shared = {name: value for name, value in shared.items() if name not in LENGTHS or name in flags}
    if not axes and "runs" not in preset:
        raise UsageError(
            f"sweep has nothing to vary. Give axes, such as --grid {BATCH}=1,4 --grid {SETUP}=1x1,1x4, or one of "
            f"{', '.join(presets())}."
        )
    for name in axes:
        if ALSO_AXES.get(name, name) in flags:
            raise UsageError(f"--{ALSO_AXES.get(name, name)} is given after -- and by --grid {name}. Leave one out.")
    found: dict[str, Planned] = {}
    for repeat in range(repeats):
        one_repeat = []
        for number, own in itertools.product(range(seeds), preset.get("runs", [{}])):
            for values in itertools.product(*axes.values()):
                seed = shared.get("seed", RunConfig.seed) + number
                varies = {**own, **dict(zip(axes, values, strict=True))}
                one_repeat.append(_planned(varies, {**shared, "seed": seed}, seeds > 1, world_size))
        if repeat:
            Random(repeat).shuffle(one_repeat)
        for one in one_repeat:
            name = f"repeat{repeat + 1}/{one.name}" if repeats > 1 else one.name
            found.setdefault(name, replace(one, name=name))
    if all(one.refused for one in found.values()):
        raise UsageError(next(iter(found.values())).refused)
    return list(found.values())


def _planned(varies: dict[str, Any], shared: Mapping[str, Any], has_seeds: bool, world_size: int) -> Planned:
    hosts, ranks = setup(str(varies.get(SETUP, "1x1")), world_size)
    if hosts == 1:  # links mean nothing there: combinations that differ only in them are one run
        varies = {name: value for name, value in varies.items() if name not in LINKS}
    if SETUP in varies:
        varies[SETUP] = f"{hosts}x{ranks}"
    flags = {**shared, **{ALSO_AXES.get(name, name): value for name, value in varies.items()}}
    links = {name: str(flags.pop(name, default)) for name, default in LINKS.items()}
    flags.pop(SETUP, None)
    words = [varies["label"]] if "label" in varies else [f"{axis}{value}" for axis, value in varies.items()]
    name = _folder_name("-".join([*words, f"seed{flags['seed']}"] if has_seeds else words))
    flags["label"] = name
    try:
        config_from(flags).check(hosts * ranks)
        refused = ""
    except UserError as error:
        refused = str(error)
    return Planned(name, varies, flags, hosts, ranks, links, refused)


def _folder_name(text: str) -> str:
    """The name of a run's folder. Characters that it cannot have are replaced, and a digest keeps names unique."""
    name = re.sub(r"[^\w.+=@-]", "_", text)
    if name != text or len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def check_launch(launch: str) -> None:
    """Raise UsageError for a template that a shell cannot parse, or that has no place for the training."""
    try:
        words = shlex.split(launch)
    except ValueError as error:
        raise UsageError(f"--launch {launch}: a shell cannot parse it ({error}). Check its quotes.") from None
    if COMMAND not in words:
        raise UsageError(f"--launch {launch}: it has no {COMMAND}. Write 'mpirun -np {{world_size}} {COMMAND}'.")


def command(one: Planned, training: Sequence[str], launch: str | None, cluster_name: str) -> list[str]:
    """The program that trains with the words `training` on the run's ranks: here, on emulated hosts, or by `launch`."""
    training = [*OURS, "train", *training]
    if launch is not None:
        values = {"hosts": one.hosts, "ranks_per_host": one.ranks_per_host, "world_size": one.world_size, **one.links}
        for name, value in values.items():
            launch = launch.replace(f"{{{name}}}", str(value))
        return [part for word in shlex.split(launch) for part in (training if word == COMMAND else [word])]
    if one.hosts == 1:
        return [*training, "--world_size", str(one.world_size)]
    shape = ["--hosts", str(one.hosts), "--ranks_per_host", str(one.ranks_per_host), "--name", cluster_name]
    links = [word for name, value in one.links.items() for word in (f"--{name}", value)]
    return [*OURS, "cluster", "run", *shape, *links, "--", *training]
