"""An audited run's files in the format of our own runs, so that `compare` and `report` can compare it with them."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cos598d.errors import UserError
from cos598d.records.conventions import CHECKPOINT, COMMUNICATION, DDP, EPOCHS, FLOOR, ITERATIONS, PHASES, WARM_UP
from cos598d.records.figures import summarize_seconds
from cos598d.terminal.files import json_text, write_together
from cos598d.tools.audit.book import BUFFER, GRADIENT, MOST_ROWS, OTHER, SCALAR, WEIGHT, Book

VERDICT = "audit.json"
_PURPOSES = {GRADIENT: "gradients", WEIGHT: "parameters", BUFFER: "buffers", SCALAR: "loss", OTHER: "agreement"}
_OWN_PHASES = [phase for phase in PHASES if phase != CHECKPOINT]
_SYNCHRONIZING = (GRADIENT, WEIGHT)


def write_record(folder: Path, books: Sequence[Book]) -> str:
    """Write the run's files from the ranks' books to the folder; returns "", or why they cannot be written."""
    if len(books) < books[0]["world_size"]:
        return "not every rank wrote its results"
    count = min(len(book["iterations"]) for book in books)
    if not count:
        return "no rank made an optimizer step"
    if not all(each["losses"] for book in books for each in book["iterations"][:count]):
        return "the loss of some steps was not a number"
    losses = [
        statistics.fmean(statistics.fmean(book["iterations"][place]["losses"]) for book in books)
        for place in range(count)
    ]
    files = {folder / EPOCHS: ""}
    for book in books:
        rows = [_row(book["iterations"][place], place + 1, losses[place]) for place in range(count)]
        files[folder / ITERATIONS.format(rank=book["rank"])] = _lines(rows)
        files[folder / COMMUNICATION.format(rank=book["rank"])] = _lines([_call(each) for each in _whole(book, count)])
    summary = _summary(books, count, losses)
    files[folder / "config.json"] = json_text({"label": summary["label"], "max_steps": count})
    files[folder / "environment.json"] = json_text(_environment(books))
    files[folder / "summary.json"] = json_text(summary)
    try:
        write_together(files)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be written ({error.strerror}). Make room there.") from None
    return ""


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _row(iteration: dict[str, Any], number: int, loss: float) -> dict[str, Any]:
    totals = [iteration["totals"].get(kind, [0, 0, 0, 0, 0.0]) for kind in _SYNCHRONIZING]
    calls, payload, sent, received = (sum(each[place] for each in totals) for place in range(4))
    return {
        "iteration": number,
        "loss": loss,
        "seconds": iteration["seconds"],
        **{f"seconds_{phase}": _phase(iteration, phase) for phase in _OWN_PHASES},
        "calls": calls,
        "payload_bytes": payload,
        "bytes_sent": sent,
        "bytes_received": received,
    }


def _phase(iteration: dict[str, Any], phase: str) -> float:
    """The seconds of a phase; for `sync` those of the calls, and for DDP's calls in backward only their start."""
    if phase == "sync":
        return sum(iteration["totals"].get(kind, [0.0])[-1] for kind in _SYNCHRONIZING)
    return iteration["phases"].get(phase, 0.0)


def _whole(book: Book, count: int) -> list[dict[str, Any]]:
    """The rows of calls, without those of a last iteration that is not complete, and those after the last iteration."""
    rows = [row for row in book["calls"] if row["iteration"] <= count]
    if len(book["calls"]) >= MOST_ROWS:
        last = rows[-1]["iteration"] if rows else 0
        rows = [row for row in rows if row["iteration"] < last] or rows
    return rows


def _call(row: dict[str, Any]) -> dict[str, Any]:
    purpose = _PURPOSES.get(row["kind"], "agreement")
    more = row["tensors"] - len(row["names"])
    name = ", ".join(row["names"]) + (f" and {more} more" if row["names"] and more > 0 else "")
    return {
        "iteration": row["iteration"],
        "purpose": "state" if purpose == "parameters" and not row["iteration"] else purpose,
        "op": row["op"],
        "tensor": name or f"{row['elements']} elements",
        **{each: row[each] for each in ("payload_bytes", "bytes_sent", "bytes_received", "seconds")},
    }


def _summary(books: Sequence[Book], count: int, losses: Sequence[float]) -> dict[str, Any]:
    first = books[0]
    counted = [book["iterations"][WARM_UP if count > WARM_UP else 0 : count] for book in books]
    rows = [[_row(each, 1, 0.0) for each in book["iterations"][:count]] for book in books]

    def mean(rank: int, name: str) -> float:
        value = statistics.fmean(row[name] for row in rows[rank])
        return int(value) if value == int(value) else value

    examined = [row for row in first["calls"] if row["iteration"] == min(2, count) and row["kind"] in _SYNCHRONIZING]
    model = first["model"]
    return {
        "label": first["script"],
        "task": f"script {first['script']}",
        "model": model.get("class", "unknown"),
        "parameters": model.get("parameters", 0),
        "data": "the script's own",
        "precision": {"bfloat16": "bf16", "float16": "fp16"}.get(model.get("dtype", ""), "fp32"),
        "sync": sync_of(first),
        "total_train_batch_size": max(sum(int(statistics.median(e["size"] for e in of)) for of in counted), 1),
        "max_seq_length": 1,
        "dropout": model.get("dropout"),
        "seed": first["seed"],
        "world_size": first["world_size"],
        "backend": first["backend"] or "unknown",
        "device": model.get("device", "cpu"),
        "iterations": count,
        "losses": list(losses),
        "seconds_per_iteration": summarize_seconds([each["seconds"] for each in first["iterations"][:count]]),
        "phases": {
            **{
                f"seconds_{phase}": statistics.fmean(_phase(each, phase) for of in counted for each in of)
                for phase in _OWN_PHASES
            },
            f"seconds_{CHECKPOINT}": 0.0,
        },
        "calls_per_iteration": mean(0, "calls"),
        "tensors_per_iteration": sum(row["tensors"] for row in examined),
        "payload_bytes_per_iteration": mean(0, "payload_bytes"),
        "bytes_sent_per_iteration": [mean(rank, "bytes_sent") for rank in range(len(books))],
        "bytes_received_per_iteration": [mean(rank, "bytes_received") for rank in range(len(books))],
        "epochs": [],
    }


def sync_of(book: Book) -> str:
    """How the script's gradients are sent: by the sync that one of our wrappers has, "ddp", the operation that sends
    most, or "none"."""
    if named := book["model"].get("sync"):
        return named
    if "DistributedDataParallel" in book["model"].get("wrappers", ()):
        return DDP
    carried: dict[str, int] = {}
    for entry in book["ledger"]:
        if entry["kind"] == GRADIENT:
            carried[entry["op"]] = carried.get(entry["op"], 0) + entry["payload_bytes"]
    return max(carried, key=lambda op: carried[op]) if carried else FLOOR


def _environment(books: Sequence[Book]) -> dict[str, Any]:
    first = books[0]
    return {
        "device": first["model"].get("device", "cpu"),
        "threads_per_rank": first["threads"],
        "ranks_on_host": sum(book["host"] == first["host"] for book in books),
        "versions": {"torch": first["torch"]},
    }
