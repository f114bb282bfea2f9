"""A run's records as one frozen object, every file checked as it is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import WARM_UP
from cos598d.records.facts import OF_RUNS, OF_WORK, collect
from cos598d.records.run import (
    CALL,
    CONFIG,
    ENVIRONMENT,
    HOST_ROW,
    ITERATION,
    WIRE_ROW,
    Summary,
    read_object,
    read_summary,
    read_table,
)
from cos598d.records.schema import NUMBER
from cos598d.report.repeats import what_was_asked
from cos598d.terminal.printable import printable

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What the page needs of one run. `summary` is summary.json with the run's name as "run"; lists are by rank."""

    summary: Summary
    config: dict[str, Any]
    environment: dict[str, Any]
    iterations: Sequence[Sequence[Row]]
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
        """Seconds an iteration: first, counted, mean, median, p90, interval_95."""
        return self.summary["seconds_per_iteration"]

    @property
    def counted_seconds(self) -> list[float]:
        """Rank 0's seconds of the iterations that its summary counts: not of those that warm up."""
        rows = self.iterations[0] if self.iterations else []
        return [row["seconds"] for row in rows[left_out(self.summary) :]]

    @property
    def typical(self) -> Row | None:
        """Rank 0's iteration nearest the median, those that warm up left out where there are others."""
        return typical_iteration(self.iterations[0]) if self.iterations else None


def typical_iteration(rows: Sequence[Row]) -> Row | None:
    """The row nearest the median of the seconds, those that warm up left out where there are others."""
    counted = sorted(rows[WARM_UP:] or rows, key=lambda row: row["seconds"])
    return counted[(len(counted) - 1) // 2] if counted else None


def left_out(run: Summary) -> int:
    """How many of its first iterations a run's seconds do not count."""
    iterations, counted = run["iterations"], run["seconds_per_iteration"].get("counted")
    known = isinstance(counted, int) and 0 <= counted <= iterations
    return iterations - counted if known else WARM_UP


def load_run(folder: Path) -> Summary:
    """A run's summary, with its folder's name as "run", the emulated links as "network" (None without), what makes
    another run a repeat of it as "repeat_of" (None where its config is not there), and what makes another run's work
    the same as its as "work", by the page's words.

    Raises UserError when there is none that can be read.
    """
    return _load(folder)[0]


def load_run_as(folder: Path, name: str) -> Run:
    """The run in a folder with all its rows, under this name. Raises UserError naming what cannot be read."""
    summary, config, environment = _load(folder)
    summary["run"] = name
    if "epochs" not in summary:
        raise UserError(f"{folder / 'summary.json'} has no epochs: it is not the summary of a run of this version.")
    ranks = range(summary["world_size"])
    iterations = [list(read_table(folder / f"iterations.rank{rank}.jsonl", ITERATION)) for rank in ranks]
    if [row["loss"] for row in iterations[0]] != summary["losses"]:
        raise UserError(
            f"{folder / 'iterations.rank0.jsonl'} does not have the losses of summary.json beside it: "
            f"these files are not of one run; give the folder of a run that ended well."
        )
    typical = typical_iteration(iterations[0])
    calls = [
        row
        for row in read_table(folder / "communication.rank0.jsonl", CALL)
        if typical is not None and row["iteration"] == typical["iteration"]
    ]
    host = [list(read_table(folder / f"host.rank{rank}.jsonl", HOST_ROW, is_needed=False)) for rank in ranks]
    wire = list(read_table(folder / "wire.rank0.jsonl", WIRE_ROW, is_needed=False))
    return Run(summary, config, environment, iterations, calls, host, wire)


def _load(folder: Path) -> tuple[Summary, dict[str, Any], dict[str, Any]]:
    """A run's summary with what `load_run` adds, its config and its environment; those two may be empty."""
    summary = read_summary(folder)
    environment = read_object(folder / "environment.json", ENVIRONMENT) or {}
    config = read_object(folder / "config.json", CONFIG)
    asked = config and what_was_asked(summary, config, environment)
    summary = {"run": folder.resolve().name} | summary
    summary = summary | {
        "network": environment.get("network"),
        "repeat_of": asked,
        "work": _work(summary, config or {}, environment),
    }
    return summary, config or {}, environment


def _work(summary: Summary, config: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """What `fairness` compares, by the page's words; None where the record does not say."""
    dropout = "the model's own" if summary["dropout"] is None else summary["dropout"]
    places = {"summary": summary | {"dropout": dropout}, "config": config, "environment": environment, "network": {}}
    found = {word: value for word, value in collect(OF_RUNS, places).items() if word in OF_WORK}
    epochs = summary.get("epochs", [])
    # Steps may have ended within the last epoch: those before it are whole.
    whole = epochs[0] if len(epochs) > 1 or (epochs and config.get("max_steps", 1) < 0) else {}
    examples = whole.get("training", {}).get("examples")
    return found | {"steps": summary["iterations"], "examples an epoch": examples}


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number that a run can have come to."""
    return NUMBER.fits(value)


def own_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of the folders above as tell them apart; a folder given twice is an error."""
    folders = [folder.resolve() for folder in folders]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise UserError(f"{folder} is given twice: give each record once.")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    # Characters that no page can show, such as an escape, would make the plots no XML.
    return [printable("/".join(folder.parts[-depth:])) for folder in folders]
