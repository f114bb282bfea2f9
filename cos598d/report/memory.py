"""What a rank holds between steps and at the peak of one, by category, beside its formula and the process's peak."""

from collections.abc import Mapping, Sequence

from cos598d.records.run import Summary
from cos598d.report.numbers import megabytes

CATEGORIES = ("parameters", "gradients", "optimizer", "buckets")
WHEN = {"between_steps": "between steps", "peak": "at a step's peak", "formula": "by formula"}
MEMORY_NOTE = (
    "Held: MB of tensors on the rank that holds most, in one step of the warm-up. By formula: weights and gradients of "
    "S bytes each and the optimizer's state, divided by the ranks where the strategy shards them; layers that are "
    "gathered for a moment and buckets are not in it. What a library keeps to itself, as torch's DDP its buckets, "
    "is in the process's peak alone."
)


def memory_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """A head and three rows for each run whose record says it; nothing where none does, as older ones do not."""
    rows = []
    has_gpu = any(None not in run["memory"]["gpu_peak_bytes"] for run in runs if "memory" in run)
    for run in runs:
        found = run.get("memory") or {}
        if not all(when in found for when in WHEN):
            continue
        peaks = [megabytes(max(found["process_peak_bytes"]))]
        if has_gpu:
            peaks.append(megabytes(max((peak or 0 for peak in found["gpu_peak_bytes"]), default=0)))
        for when, words in WHEN.items():
            held = most(found[when])
            if not held:
                continue
            cells = [megabytes(held[name]) if name in held else "-" for name in CATEGORIES]
            ends = peaks if when == "peak" else ["-"] * len(peaks)
            rows.append([run["run"], words, *cells, megabytes(sum(held.values())), *ends])
    head = ["run", "held", *CATEGORIES, "in all", "process's peak", *(["GPU's peak"] if has_gpu else [])]
    return [head, *rows] if rows else []


def most(by_rank: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """What the rank holds that holds most."""
    return max(by_rank, key=lambda held: sum(held.values()))
