"""A run's records as one frozen object, every file checked as it is read."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import AUTO_PRECISION, COMMUNICATION, HOST, ITERATIONS, WARM_UP
from cos598d.records.facts import ALSO_OF_WORK, CODE, GROUND, NOT_OF_A_STEP, OF_RUNS, OF_WORK, collect
from cos598d.records.kinds import NUMBER, POSITIVE, SIZE, TEXT, Fields, ListOf, OrNone, ValueKind
from cos598d.records.old_schema import check, is_as_read, last_row
from cos598d.records.run import (
    CALL,
    CONFIG,
    ENVIRONMENT,
    HOST_ROW,
    ITERATION,
    LIVE,
    MEMORY,
    REMEDY,
    WIRE,
    WIRE_ROW,
    Summary,
    live_folder,
    read_object,
    read_summary,
    read_table,
    read_unfinished,
    reading,
)
from cos598d.terminal.printable import printable
from cos598d.tools.report.disturbed import busy_and_own, share_of_others
from cos598d.tools.report.numbers import plain
from cos598d.tools.report.references import what_was_asked
from cos598d.tools.report.series import Series, find_calls, read_calls

Row = Mapping[str, Any]
# What a run's summary, or setting, says as its config does.
SAID_TWICE = ("label", "sync", "world_size", "precision", "seed", "dropout", "max_seq_length")
# What the config has where the run has chosen, and the summary tells what.
CHOSEN = {"sync": "auto", "precision": AUTO_PRECISION}
# An epoch's seconds, by the wall, are no fewer than its iterations', by their clock, except for rounding.
MOST_OF = 0.99
# What the table needs of a run, beyond what every record has.
TABLE_TRAINING = Fields({"examples": SIZE, "wall_seconds": POSITIVE})
TABLE_SUMMARY = Fields(
    {"epochs": ListOf(Fields({"loss": NUMBER, "training": TABLE_TRAINING}), least=1), "memory": MEMORY}
)
TABLE_ENVIRONMENT = Fields({"device": TEXT, "cores": OrNone(SIZE), "threads_per_rank": SIZE, "ranks_on_host": SIZE})


class AnotherRun(UserError):
    """A finished record is whole, and of another run than was asked for; `what` says so without what to do."""

    def __init__(self, what: str):
        super().__init__(f"{what}. {REMEDY}.")
        self.what = what


@dataclass(frozen=True)
class Run:
    """What the page needs of one run. `summary` is summary.json with the run's name as "run"; lists are by rank."""

    summary: Summary
    config: dict[str, Any]
    environment: dict[str, Any]
    series: Series  # rank 0's
    calls: Sequence[Row]  # rank 0's, of its typical iteration
    host: Sequence[Sequence[Row]]
    wire: Sequence[Row]  # rank 0's, in the order of time

    @property
    def name(self) -> str:
        """The run's name, which no other run of the page has."""
        return self.summary["run"]

    @property
    def facts(self) -> dict[str, Any]:
        """The run's setting by the page's words."""
        # Off is what these are in runs of older versions, which do not say it.
        config = self.config | {"bucket_view": self.config.get("bucket_view") or None}
        environment = self.environment | {"tf32": self.environment.get("tf32") or None}
        places = {"summary": self.summary, "config": config, "environment": environment}
        return collect(OF_RUNS, places | {"network": self.summary["network"] or {}})

    @property
    def seconds(self) -> dict[str, Any]:
        """Seconds per iteration: first, counted, mean, median, p90, interval_95."""
        return self.summary["seconds_per_iteration"]

    @property
    def counted_seconds(self) -> Sequence[float]:
        """Rank 0's seconds of the iterations that its summary counts: not of those that warm up."""
        return self.series.seconds[left_out(self.summary) :]

    @property
    def typical(self) -> Row | None:
        """Rank 0's iteration nearest the median of those that have their details."""
        return self.series.typical


def left_out(run: Summary) -> int:
    """How many of its first iterations a run's seconds do not count."""
    iterations, counted = run["iterations"], run["seconds_per_iteration"].get("counted")
    known = isinstance(counted, int) and 0 <= counted <= iterations
    return iterations - counted if known else WARM_UP


def load_run(folder: Path, unfinished: bool = False) -> Summary:
    """A run's summary, with its folder's name as "run", the emulated links as "network" (None without), what makes
    another run a repeat of it as "repeat_of" (None where its config is not there), and, by the page's words, what makes
    another run's work the same as its as "work", what decides the loss of each of its iterations as "step", what it ran
    on as "ground", the versions of what it ran as "code", and `share_of_others` as "taken_by_others".

    With `unfinished` a run that is going on or that died has one too, made of its rows so far, whose "unfinished" says
    so in words. Raises UserError when there is none that can be read.
    """
    summary = _load(folder, unfinished)[0]
    if "unfinished" not in summary:
        _check_ends(folder, summary)
    return summary


def load_run_as(folder: Path, name: str, unfinished: bool = False) -> Run:
    """As `load_run`, with the rows that a page shows, under this name. Raises UserError naming what cannot be read."""
    summary, config, environment = _load(folder, unfinished)
    summary["run"] = name
    if "epochs" not in summary:
        raise UserError(f"{folder / 'summary.json'} has no epochs, so another version wrote it. {REMEDY}.")
    grows = "unfinished" in summary
    folder = (live_folder(folder) if grows else None) or folder

    def rows(file: str, kind: ValueKind, rank: int = 0, is_needed: bool = False) -> Iterator[Row]:
        return read_table(folder / file.format(rank=rank), kind, is_needed and not grows, grows)

    calls = find_calls(folder / COMMUNICATION.format(rank=0), grows)
    series = Series(folder / ITERATIONS.format(rank=0), calls, grows)
    if series.losses[: summary["iterations"]].tolist() != summary["losses"]:
        raise UserError(
            f"{folder / ITERATIONS.format(rank=0)} does not have the losses of summary.json, so these files are not "
            "of one run. Give the folder of a finished run."
        )
    ranks = range(summary["world_size"])
    for rank in ranks[1:]:
        for _ in rows(ITERATIONS, ITERATION, rank, is_needed=True):
            pass  # only to know that they are whole
    typical = calls.get(series.typical["iteration"]) if series.typical else None
    return Run(
        summary,
        config,
        environment,
        series,
        read_calls(folder / COMMUNICATION.format(rank=0), typical) if typical else [],
        [list(rows(HOST, HOST_ROW, rank)) for rank in ranks],
        list(rows(WIRE, WIRE_ROW)),
    )


def _check_ends(folder: Path, summary: Summary) -> None:
    """Raise UserError if a file of rows was cut: its last row is damaged, or rank 0 lacks iterations. Only the ends of
    files are read, since a run has up to gigabytes of rows. A file that is missing was not needed here."""
    for rank in range(summary["world_size"]):
        for name, kind in ((ITERATIONS, ITERATION), (COMMUNICATION, CALL)):
            path = folder / name.format(rank=rank)
            with reading(path, is_needed=False):
                row = last_row(path, kind, REMEDY)
                last = row["iteration"] if row else 0
                if name == ITERATIONS and rank == 0 and last < summary["iterations"]:
                    raise UserError(
                        f"{path} ends at iteration {last} of {summary['iterations']}, so it was cut. {REMEDY}."
                    )


def _load(folder: Path, unfinished: bool) -> tuple[Summary, dict[str, Any], dict[str, Any]]:
    """A run's summary with what `load_run` adds, its config and its environment; those two may be empty."""
    live = live_folder(folder) if unfinished else None
    summary = read_unfinished(live) if live else read_summary(folder)
    place = live or folder
    environment = read_object(place / "environment.json", ENVIRONMENT) or {}
    config = read_object(place / "config.json", CONFIG)
    if not live:  # else one of them may be of an earlier start, just now
        _check_of_one_run(place, summary, config or {})
    work = _work(summary, config or {}, environment)
    # One that has not ended well is no repeat of another.
    asked = config and "unfinished" not in summary and what_was_asked(summary, config, environment)
    summary = {"run": _name(folder)} | summary
    summary = summary | {
        "network": environment.get("network"),
        "repeat_of": asked or None,
        "work": work,
        "taken_by_others": _taken_by_others(place, summary, environment, live is not None),
        "step": {word: value for word, value in work.items() if word not in NOT_OF_A_STEP}
        | _schedule(summary, config or {}),
        "ground": {name: environment.get(name) for name in GROUND},
        "code": {word: environment.get(name) for word, name in CODE} | environment.get("versions", {}),
    }
    return summary, config or {}, environment


def _taken_by_others(folder: Path, run: Summary, environment: dict[str, Any], grows: bool) -> float | None:
    files = [folder / HOST.format(rank=rank) for rank in range(run["world_size"])]
    return share_of_others([busy_and_own(read_table(file, HOST_ROW, False, grows)) for file in files], environment)


def _check_of_one_run(folder: Path, summary: Summary, config: Mapping[str, Any]) -> None:
    """Raise UserError where a run's two files that say the same do not."""
    for name in SAID_TWICE:
        if name in config and name in summary and config[name] not in (summary[name], CHOSEN.get(name)):
            shown = [printable(value, 60) for value in (summary[name], config[name])]
            raise UserError(
                f"{folder} has {name} {shown[0]} in one file and {shown[1]} in its config.json, so these files are "
                "not of one run. Give the folder of a finished run."
            )


def _name(folder: Path) -> str:
    """A folder's name; of the `live/` in a run's folder that folder's and its own."""
    folder = folder.resolve()
    return "/".join(folder.parts[-2:]) if folder.name == LIVE else folder.name


def _work(summary: Summary, config: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """What `fairness` compares, by the page's words; None where the record does not say."""
    dropout = "the model's own" if summary["dropout"] is None else summary["dropout"]
    places = {"summary": summary | {"dropout": dropout}, "config": config, "environment": environment, "network": {}}
    found = {word: value for word, value in collect(OF_RUNS, places).items() if word in OF_WORK}
    epochs = summary.get("epochs", [])
    # Steps may have ended within the last epoch, which older records do not say: those before it are whole.
    is_whole = len(epochs) > 1 or (epochs and config.get("max_steps", 1) < 0 and not epochs[0].get("is_cut"))
    examples = epochs[0].get("training", {}).get("examples") if is_whole else None
    found |= {word: config.get(name) for word, name in ALSO_OF_WORK}
    if config.get("max_train_examples", 1) is None:
        found["training examples"] = "all"
    return found | {"steps": summary["iterations"], "examples per epoch": examples}


def _schedule(summary: Summary, config: dict[str, Any]) -> dict[str, Any]:
    """What the learning rate of an iteration depends on beyond `work`: unless it is constant, the planned steps.

    A record that does not have its plan is taken to have planned the steps that it took.
    """
    steps, epochs = config.get("max_steps", -1), config.get("num_train_epochs")
    planned = f"{steps} steps" if steps > 0 else f"{epochs:g} epochs" if epochs else f"{summary['iterations']} steps"
    planned_words = {} if config.get("lr_scheduler") == "constant" else {"planned": planned}
    return planned_words | {"steps between averages": config.get("sync_every")}


def load_entry_run(folder: Path, name: str, asked: Mapping[str, Any]) -> Run:
    """The run in a folder, under this name. Raises UserError naming what cannot be read, what the table lacks, and
    seconds that cannot be those of its rows; AnotherRun naming the flag in which it is another than was `asked` for."""
    run = load_run_as(folder, name)
    check(run.summary, TABLE_SUMMARY, folder / "summary.json", REMEDY)
    check(run.environment, TABLE_ENVIRONMENT, folder / "environment.json", REMEDY)
    for flag, value in asked.items():
        if not is_as_read(run.config.get(flag), value):
            raise AnotherRun(
                f"{folder} is another run: its {flag} is {printable(run.config.get(flag), 60)} and should be "
                f"{printable(value, 60)}"
            )
    trained = sum(epoch["training"]["wall_seconds"] for epoch in run.summary["epochs"])
    if trained < MOST_OF * math.fsum(run.series.seconds):
        raise UserError(
            f"{folder} has epochs of {plain(trained)} s in summary.json and iterations of "
            f"{plain(math.fsum(run.series.seconds))} s in its rows, so these files are not of one run. {REMEDY}."
        )
    return run


def iteration_rows(folder: Path) -> Iterator[Row]:
    """Rank 0's rows. Raises UserError for one that is damaged."""
    return read_table(folder / ITERATIONS.format(rank=0), ITERATION)


def own_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of the folders above as tell them apart; a folder given twice is an error."""
    folders = [folder.resolve() for folder in folders]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise UserError(f"{folder} is given twice. Give each folder once.")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    # Characters that no page can show, such as an escape, would make the plots no XML.
    return [printable("/".join(folder.parts[-depth:])) for folder in folders]
