"""The program that makes a run: ranks on this host, ranks on emulated hosts, or what a template starts."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from cos598d.errors import UsageError
from cos598d.records.quantities import delay_words, rate_words
from cos598d.terminal.printable import printable
from cos598d.terminal.words import listed
from cos598d.tools.cluster.plan import MOST_HOSTS
from cos598d.tools.report.sweep_entries import LINKS, SETUP
from cos598d.tools.runs.plan import PlannedRun, Setup

OURS = (sys.executable, "-m", "cos598d")
COMMAND = "{command}"


def program(one: PlannedRun, words: Sequence[str], launch: str | None = None, cluster_name: str = "") -> list[str]:
    """The command that trains with these `words` on the run's ranks.

    One host is this one, whose ranks are started here. Several are emulated, as a cluster with that name, unless a
    `launch` template starts all ranks.
    """
    training = [*OURS, "train", *words]
    if launch is not None:
        return _filled(one, training, launch)
    setup = one.setup
    if setup.hosts == 1:
        return [*training, "--world_size", str(setup.world_size)]
    links = ["--rate", rate_words(one.rate), "--delay", delay_words(one.delay)]
    shape = ["--hosts", str(setup.hosts), "--ranks_per_host", str(setup.ranks_per_host)]
    return [*OURS, "cluster", "run", *shape, *links, "--name", cluster_name, "--", *training]


def check_launch(launch: str | None, combinations: Sequence[PlannedRun]) -> None:
    """Raise UsageError if a template has no place for the command or for an axis of links, or starts two set-ups in the
    same way. Without a template, raise it for more hosts than can be emulated."""
    if launch is None:
        for one in combinations:
            if one.setup.hosts > MOST_HOSTS:
                raise UsageError(
                    f"--grid setup={one.setup}: one machine emulates at most {MOST_HOSTS} hosts. Give fewer."
                )
        return
    try:
        words = shlex.split(launch)
    except ValueError as error:
        raise UsageError(
            f"--launch {printable(launch, 100)}: a shell cannot parse it ({error}). Check its quotes."
        ) from None
    if not any(COMMAND in word for word in words):
        raise UsageError(
            f"--launch {printable(launch, 100)}: it has no {COMMAND}, the place of the training. Write it as "
            "'mpirun -np {world_size} {command}'."
        )
    if words[0] != COMMAND and shutil.which(words[0]) is None:
        raise UsageError(
            f"--launch {printable(launch, 100)}: there is no program {printable(words[0], 60)} on this machine. "
            "Install it, or give its path."
        )
    for name in LINKS:
        if f"{{{name}}}" not in launch and any(name in one.settings for one in combinations):
            raise UsageError(
                f"--grid {name} would change nothing: --launch has no {{{name}}}. Put it there, or leave the axis out."
            )
    shapes: dict[str, Setup] = {}
    for one in combinations:
        other = shapes.setdefault(_with(launch, _of_setup(one.setup)), one.setup)
        if other != one.setup:
            raise UsageError(
                f"--grid {SETUP}={other},{one.setup} would change nothing: --launch starts both in the same way. Put "
                f"{listed([*_of_setup(one.setup)])} there, as far as your launcher needs them."
            )


def _filled(one: PlannedRun, training: Sequence[str], launch: str) -> list[str]:
    """The template's arguments, as a shell parses them. {command} as a separate argument becomes all of the command's;
    inside an argument it becomes one."""
    values = _of_setup(one.setup) | {"{delay}": delay_words(one.delay), "{rate}": rate_words(one.rate)}
    words: list[str] = []
    for word in shlex.split(launch):
        word = _with(word, values)
        words += training if word == COMMAND else [word.replace(COMMAND, shlex.join(training))]
    return words


def _of_setup(setup: Setup) -> dict[str, str]:
    """The values of the placeholders for hosts and ranks."""
    return {
        "{hosts}": str(setup.hosts),
        "{ranks_per_host}": str(setup.ranks_per_host),
        "{world_size}": str(setup.world_size),
    }


def _with(text: str, values: Mapping[str, str]) -> str:
    for blank, value in values.items():
        text = text.replace(blank, value)
    return text
