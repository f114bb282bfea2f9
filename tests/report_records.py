"""Records of runs that never ran, in the form that measure/record.py writes, and the report made of them."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from cos598d.commands.report import add_options, run
from cos598d.records.conventions import ATTEMPTS, EPOCHS, EVALUATIONS, PHASES, SETTING, WARM_UP
from cos598d.records.run import SETTING_FIELDS


def write_run(
    folder: Path,
    seconds=(2.0, 1.1, 1.0, 1.2, 1.1),
    sync: str = "all_reduce",
    ranks: int = 2,
    batch: int = 16,
    words: str = "a sample",
    network: dict | None = None,
    losses: list[float] | None = None,
    wire_share: float | None = None,
    shared: int = 1,
    host: bool = False,
    old: bool = False,
) -> Path:
    """A run's record. `words` describe its data. Its interface, which `shared` ranks share, counted `wire_share` times
    the bytes that the ledger has. `host`: with samples of the host. `old`: its rows have no spans."""
    folder.mkdir(parents=True)
    losses = losses or [0.7 - 0.01 * number for number in range(len(seconds))]
    travels = ranks > 1 and sync != "none"
    sent = 2_000_000 if travels else 0
    epochs = [{"epoch": epoch, "iterations": 5, "loss": 0.69, "acc": 0.5 + epoch / 100} for epoch in (1, 2)]
    counted = seconds[WARM_UP:]
    mean = sum(counted) / len(counted) if counted else None
    summary = {
        "task": "rte",
        "label": "train",
        "sync": sync,
        "world_size": ranks,
        "backend": "gloo",
        "device": "cpu",
        "model": "tiny",
        "data": words,
        "parameters": 1000,
        "total_train_batch_size": batch,
        "max_seq_length": 32,
        "dropout": 0.0,
        "precision": "fp32",
        "seed": 42,
        "iterations": len(seconds),
        "losses": losses if seconds else [],
        "epochs": epochs,
        "seconds_per_iteration": {
            "first": seconds[0] if seconds else None,
            "counted": len(counted),
            "mean": mean,
            "median": sorted(counted)[len(counted) // 2] if counted else None,
            "p90": max(counted) if counted else None,
            "interval_95": [mean - 0.1, mean + 0.1] if len(counted) > 1 else None,
        },
        "phases": {f"seconds_{phase}": _phase(phase, mean) if seconds else None for phase in PHASES},
        "calls_per_iteration": 2 if travels else 0,
        "tensors_per_iteration": 2 if travels else 0,
        "payload_bytes_per_iteration": sent,
        "bytes_sent_per_iteration": [sent] * ranks,
        "bytes_received_per_iteration": [sent] * ranks,
    }
    if wire_share is not None:
        seen = [sent * wire_share * shared] * ranks
        for epoch in epochs:
            epoch |= {"predicted_bytes_sent": [5 * sent] * ranks, "counted_bytes_sent": [int(5 * n) for n in seen]}
        summary["wire"] = {
            "interface": "eth0",
            "shared_by_ranks": shared,
            "ranks_by_interface": [list(range(ranks))] if shared > 1 else [[rank] for rank in range(ranks)],
            "bytes_sent_per_iteration": seen,
            "bytes_received_per_iteration": seen,
        }
    environment = {"python": "3.11", "processor": "a processor", "threads_per_rank": 1, "memory_bytes": 8e9}
    environment |= {"ranks_on_host": ranks, "versions": {"torch": "2.13.0"}} | ({"network": network} if network else {})
    for name, value in (("summary", summary), ("environment", environment), ("config", {"learning_rate": 5e-5})):
        (folder / f"{name}.json").write_text(json.dumps(value))
    write_rows(folder / "epochs.jsonl", epochs)
    for rank in range(ranks):
        rows = [_iteration(number, *pair, old) for number, pair in enumerate(zip(seconds, losses), start=1)]
        write_rows(folder / f"iterations.rank{rank}.jsonl", rows)
        calls = [_call(row, place, sync) for row in rows for place in range(2)] if travels else []
        write_rows(folder / f"communication.rank{rank}.jsonl", calls)
        if host:
            write_rows(folder / f"host.rank{rank}.jsonl", [_host(number) for number in range(len(seconds) + 1)])
        if wire_share is not None:
            rows = [_wire(number, sent, shared) for number in range(len(seconds) + 1)]
            # A pause of a minute, to evaluate, and a sample that is too near to the one before.
            end = rows[-1] | {"kind": "interval", "seconds": rows[-1]["seconds"] + 1e-4}
            rows += [end, end | {"kind": "resume", "seconds": end["seconds"] + 60}]
            write_rows(folder / f"wire.rank{rank}.jsonl", rows)
    return folder


def counted_run(ranks_by_interface=((0,), (1,)), **changes) -> dict:
    """The summary of a run of 10 iterations on two ranks, each of which sends 2 MB of gradients per iteration.

    The kernel counted 2.05 MB per rank and iteration."""
    epoch = {"predicted_bytes_sent": [20_100_000] * 2, "counted_bytes_sent": [20_500_000] * 2, "iterations": 10}
    return {
        "run": "batch8-fp32",
        "total_train_batch_size": 8,
        "precision": "fp32",
        "tensors_per_iteration": 3,
        "payload_bytes_per_iteration": 2_000_000,
        "calls_per_iteration": 3,
        "bytes_sent_per_iteration": [2_000_000, 2_000_000],
        "epochs": [epoch],
        "wire": {"ranks_by_interface": ranks_by_interface, "packets_sent_per_iteration": [500, 500]},
    } | changes


def write_unfinished(folder: Path, **changes) -> Path:
    """What a killed run leaves of such a record: an attempt that was lost, an evaluation, and a row that is cut off."""
    whole = write_run(folder, **changes)
    live = whole
    summary = read(whole / "summary.json")
    (whole / "summary.json").unlink()
    (live / SETTING).write_text(json.dumps({name: summary[name] for name in (*SETTING_FIELDS, "label")}))
    write_rows(live / EPOCHS, summary["epochs"])
    write_rows(live / EVALUATIONS, [{"iteration": 2, "epoch": 1, "validation_loss": 0.7, "acc": 0.5}])
    lost = attempt(ended=None, to_iteration=0, lost_iterations=1, why="rank 1 was lost")
    (live / ATTEMPTS).write_text(json.dumps({"attempts": [lost, lost | {"lost_iterations": 0, "why": None}]}))
    with (live / "iterations.rank0.jsonl").open("a") as rows:
        rows.write('{"iteration": 6, ')
    return folder


def attempt(**changes) -> dict:
    """An attempt of a run of 5 iterations on 2 ranks, as the record has it."""
    begun, ended = ("2025-01-01T00:00:00Z", "2025-01-01T00:01:00Z")
    facts = {"begun": begun, "ended": ended, "from_iteration": 0, "to_iteration": 5, "lost_iterations": 0}
    return facts | {"ranks": 2, "why": None} | changes


def report(output: Path, *runs: Path) -> Path:
    """Write the runs' report as the command does."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert run(parser.parse_args([*map(str, runs), "-o", str(output)])) == 0
    return Path(output)


def read(path: Path):
    """The value of a JSON file, or the rows of a file of rows."""
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def edit(path: Path, change: Callable[[dict], object]) -> Path:
    """Change a JSON file in place; return its folder."""
    found = read(path)
    change(found)
    path.write_text(json.dumps(found))
    return path.parent


def update(path: Path, **values) -> Path:
    """Set these values of a JSON file in place; return its folder."""
    return edit(path, lambda found: found.update(values))


def write_rows(path: Path, rows: list[dict]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _phase(phase: str, seconds: float | None) -> float | None:
    parts = {"data": 0.01, "forward": 0.25, "backward": 0.4, "sync": 0.3, "clip": 0.01, "step": 0.02}
    parts["checkpoint"] = 0.01
    return None if seconds is None else parts[phase] * seconds


def _iteration(number: int, seconds: float, loss: float, is_old: bool) -> dict:
    phases = {f"seconds_{phase}": _phase(phase, seconds) for phase in PHASES}
    row = {"iteration": number, "epoch": 1, "loss": loss, "learning_rate": 5e-5, "examples": 16, "seconds": seconds}
    if not is_old:
        spans, start = [], 0.0
        for phase in PHASES:
            spans.append([phase, start, phases[f"seconds_{phase}"]])
            start += phases[f"seconds_{phase}"]
        row["spans_seconds"] = spans
    return row | phases


def _call(row: dict, place: int, sync: str) -> dict:
    """The first call begins beside backward, the second after it; torch's own have no times."""
    length = row["seconds"]
    times = {"seconds": 0.2 * length, "started": (0.5 + 0.2 * place) * length}
    if sync == "ddp":
        times = {"seconds": None, "started": None}
    call = {"iteration": row["iteration"], "purpose": "gradients", "op": "all_reduce", "tensor": f"bucket {place}"}
    return call | {"payload_bytes": 1_000_000, "bytes_sent": 1_000_000, "bytes_received": 1_000_000, **times}


def _host(number: int) -> dict:
    return {
        "seconds": float(number),
        "iteration": number,
        "process_cpu_seconds": 0.8 * number,
        "host_cpu_percent": 50.0,
        "rss_bytes": 300_000_000 + number,
    }


def _wire(number: int, sent: int, shared: int) -> dict:
    """Half a second apart: `sent` bytes leave in each, and half as many come."""
    place = {"seconds": 0.5 * number, "iteration": number, "kind": "iteration", "interface": "eth0"}
    return place | {"shared_by_ranks": shared, "bytes_sent": sent * number, "bytes_received": sent * number // 2}
