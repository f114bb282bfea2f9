"""Records of runs that never ran, in the form that measure/record.py writes, and the report made of them."""

import json
from collections.abc import Callable
from pathlib import Path

from cos598d.commands import cli

PARTS = {"data": 0.01, "forward": 0.25, "backward": 0.4, "sync": 0.3, "clip": 0.01, "step": 0.02, "checkpoint": 0.01}
REAL_BENCH = Path(__file__).parent / "real_benches" / "2hosts-1gbit.json"
OF_SETTING = ("task", "model", "data", "precision", "sync", "total_train_batch_size", "max_seq_length", "seed")


def write_run(
    folder: Path,
    seconds=(2.0, 1.1, 1.0, 1.2, 1.1),
    sync: str = "all_reduce",
    ranks: int = 2,
    batch: int = 16,
    losses: list[float] | None = None,
    config: dict | None = None,
    environment: dict | None = None,
    summary: dict | None = None,
    wire_share: float | None = None,
    load: tuple[float, float] = (0.5, 0.4),
) -> Path:
    """A run's record; `config`, `environment` and `summary` replace values in its files.

    The kernel counted `wire_share` times the bytes that the ledger has. `load`: the share of the 2 cores that was busy,
    and the share that the ranks used together.
    """
    folder.mkdir(parents=True)
    losses = [0.7 - 0.01 * number for number in range(len(seconds))] if losses is None else losses
    sent = 2_000_000 if ranks > 1 and sync != "none" else 0
    counted = sorted(seconds[2:])
    mean = sum(counted) / len(counted) if counted else None
    epochs = [{"epoch": epoch, "iterations": 5, "loss": 0.69, "acc": 0.5 + epoch / 100} for epoch in (1, 2)]
    wire = {
        "predicted_bytes_sent_per_iteration": [sent] * ranks,
        **{f"bytes_{way}_per_iteration": [sent * (wire_share or 0)] * ranks for way in ("sent", "received")},
    }
    found = {
        "task": "rte",
        "label": "",
        "sync": sync,
        "world_size": ranks,
        "model": "tiny",
        "data": "a sample",
        "total_train_batch_size": batch,
        "max_seq_length": 32,
        "dropout": 0.0,
        "precision": "fp32",
        "seed": 42,
        "iterations": len(seconds),
        "losses": losses,
        "epochs": epochs,
        "seconds_per_iteration": {
            "first": seconds[0] if seconds else None,
            "counted": len(counted),
            "mean": mean,
            "median": counted[len(counted) // 2] if counted else None,
            "p90": max(counted, default=None),
            "interval_95": [mean - 0.1, mean + 0.1] if len(counted) > 1 else None,
        },
        "phases": {f"seconds_{name}": mean and part * mean for name, part in PARTS.items()},
        "calls_per_iteration": 2 if sent else 0,
        "payload_bytes_per_iteration": sent,
        "bytes_sent_per_iteration": [sent] * ranks,
        "bytes_received_per_iteration": [sent] * ranks,
        "wire": None if wire_share is None else wire,
    } | (summary or {})
    write(folder / "setting.json", {name: found[name] for name in (*OF_SETTING, "world_size", "label")})
    write(folder / "summary.json", found)
    flags = {"sync": sync, "world_size": ranks, "learning_rate": 5e-5, "sync_every": 1, "output_dir": str(folder)}
    write(folder / "config.json", flags | (config or {}))
    ground = {"processor": "a processor", "cores": 2, "threads_per_rank": 2 if ranks == 1 else 1, "device": "cpu"}
    ground |= {"ranks_on_host": ranks, "versions": {"torch": "2.13.0"}}
    write(folder / "environment.json", ground | (environment or {}))
    write_rows(folder / "epochs.jsonl", found["epochs"])
    for rank in range(ranks):
        rows = [iteration(number, *pair, sent) for number, pair in enumerate(zip(seconds, losses), start=1)]
        write_rows(folder / f"iterations.rank{rank}.jsonl", rows)
        calls = [call(row, place, sent // 2) for row in rows for place in range(2)] if sent else []
        write_rows(folder / f"communication.rank{rank}.jsonl", calls)
        busy, own = load
        samples = [
            {"seconds": float(at), "iteration": at, "process_cpu_seconds": at * own * 2 / ranks, "rss_bytes": 1}
            | {"host_cpu_percent": 100.0 * busy}
            for at in range(len(seconds) + 1)
        ]
        write_rows(folder / f"host.rank{rank}.jsonl", samples)
    return folder


def write_bench(folder: Path) -> Path:
    """The record of a real bench, of some syncs, with intervals."""
    found, syncs = read(REAL_BENCH), ("reduce_broadcast", "all_reduce", "bucketed", "none", "ddp")
    found["candidates"] = sorted(
        (one for one in found["candidates"] if one["label"] in syncs), key=lambda one: syncs.index(one["label"])
    )
    for name in ("summary", "traffic"):
        found[name] = {label: found[name][label] for label in syncs}
    for one in found["summary"].values():
        if ratio := one["ratio_to_ddp"]:
            ratio["interval_95"] = [0.98 * ratio["median"], 1.02 * ratio["median"]]
    folder.mkdir(parents=True)
    write(folder / "bench.json", found)
    return folder


def write_unfinished(folder: Path) -> Path:
    """What a killed run leaves of such a record: an attempt without an end, and a row that is cut off."""
    write_run(folder)
    (folder / "summary.json").unlink()
    write_rows(folder / "attempts.jsonl", [{"iteration": 0, "begun": "2025-01-01T00:00:00Z", "ranks": 2}])
    with (folder / "iterations.rank0.jsonl").open("a") as rows:
        rows.write('{"iteration": 6, ')
    return folder


def iteration(number: int, seconds: float, loss: float, sent: int) -> dict:
    """A row of an iteration, whose phases follow one another."""
    spans, start = [], 0.0
    for name, part in PARTS.items():
        spans.append([name, start, part * seconds])
        start += part * seconds
    row = {"iteration": number, "epoch": 1, "loss": loss, "learning_rate": 5e-5, "examples": 16, "seconds": seconds}
    row |= {f"seconds_{name}": part * seconds for name, part in PARTS.items()}
    row |= {"wall_seconds": seconds, "wall_seconds_after": 0.0, "spans_seconds": spans}
    row |= {"calls": 2, "payload_bytes": sent, "bytes_sent": sent, "bytes_received": sent}
    row |= {"predicted_bytes_sent": sent, "predicted_bytes_received": sent}
    row |= {"counted_bytes_sent": None, "counted_bytes_received": None}
    return row | {"by_purpose": {"gradients": [2, sent, sent, sent]} if sent else {}}


def call(row: dict, place: int, sent: int) -> dict:
    """The first call of an iteration begins beside backward, the second after it."""
    times = {"seconds": 0.2 * row["seconds"], "started": (0.5 + 0.2 * place) * row["seconds"]}
    found = {"iteration": row["iteration"], "purpose": "gradients", "op": "all_reduce", "tensor": f"bucket {place}"}
    return found | {"payload_bytes": sent, "bytes_sent": sent, "bytes_received": sent, **times}


def report(output: Path, *runs: Path) -> str:
    """The runs' page, as the command writes it."""
    assert cli.main(["report", *map(str, runs), "-o", str(output)]) == 0
    return output.read_text()


def read(path: Path):
    """The value of a JSON file, or the rows of a file of rows."""
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def write(path: Path, value: object) -> None:
    """A JSON file."""
    path.write_text(json.dumps(value))


def write_rows(path: Path, rows: list[dict]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit(path: Path, change: Callable[[dict], object]) -> Path:
    """Change a JSON file in place; return its folder."""
    found = read(path)
    change(found)
    write(path, found)
    return path.parent


def update(path: Path, **values) -> Path:
    """Set these values of a JSON file in place; return its folder."""
    return edit(path, lambda found: found.update(values))
