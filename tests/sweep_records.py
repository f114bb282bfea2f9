"""Entries of a sweep whose runs never ran: records as those of other reports' tests, and what a sweep looks at."""

import json

from report_records import write_rows, write_run

from cos598d.tools.report.load import load_run_as
from cos598d.tools.report.sweep_entries import SweepEntry

BYTES = 2_000_000


def entry(folder, settings, seed=42, **changes):
    """A finished run's entry. `changes`: seconds (of an epoch), acc (or None), loss, epochs, examples, attempts, why,
    config (values of config.json), environment, summary, and what `write_run` takes."""
    found = {"seconds": 10.0, "acc": 0.8, "loss": 0.5, "epochs": 2, "examples": 80, "attempts": 1, "why": "finished"}
    found |= {"config": {}, "environment": {}, "summary": {}} | changes
    hosts, _, each = settings.get("setup", "1x1").partition("x")
    words = "-".join(name + word for name, word in {**settings, "seed": str(seed)}.items())
    others = {name: value for name, value in changes.items() if name in ("sync", "batch", "losses", "network")}
    path = write_run(folder / words, ranks=int(hosts) * int(each), **others)
    summary = json.loads((path / "summary.json").read_text()) | {"seed": seed} | found["summary"]
    metrics = {} if found["acc"] is None else {"acc": found["acc"]}
    summary["epochs"] = [
        {"epoch": number, "iterations": 5, "loss": found["loss"], **metrics, "validation_loss": found["loss"] + 0.1}
        | {"seconds_evaluation": 1.0, "training": {"examples": found["examples"], "wall_seconds": found["seconds"]}}
        for number in range(1, found["epochs"] + 1)
    ]
    attempt = {"begun": "2025-01-01T00:00:00Z", "ended": "2025-01-01T00:01:00Z", "from_iteration": 0, "to_iteration": 5}
    whys = ["stopped by SIGTERM"] * (found["attempts"] - 1) + [found["why"]]
    summary["attempts"] = [attempt | {"lost_iterations": 0, "ranks": summary["world_size"], "why": why} for why in whys]
    write_rows(path / "epochs.jsonl", summary["epochs"])
    (path / "summary.json").write_text(json.dumps(summary))
    for name in ("config", "environment"):
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | found[name]))
    return SweepEntry(settings, seed, run=load_run_as(path, words))
