"""Records as the bench writes them, whose seconds follow known costs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from cos598d.records.bench import FILE_NAME
from cos598d.records.quantities import delay_words, rate_words
from cos598d.records.summary import summarize
from cos598d.tools.bench.candidates import parse_candidates, references

SYNCS = (
    "gather_scatter,reduce_broadcast,all_reduce,flat,overlap,bucketed,ring,halving_doubling,tree,hierarchical,"
    "sparse_rows,bucketed+bf16,ring+topk"
)
GBIT = 1e9
SPREAD = (0.98, 0.99, 1.0, 1.0, 1.0, 1.01, 1.02)  # of a candidate's rounds around its median
# An embedding that comes last, four layers of four tensors, and a head that comes first.
TENSORS = (
    [("embeddings.word_embeddings.weight", [10000, 384])]
    + [(f"layer.{i}.{j}", shape) for i in range(4) for j, shape in enumerate(([384, 384], [384], [1536, 384], [384]))]
    + [("classifier.weight", [2, 384])]
)


def bench_record(
    rate: float = GBIT, delay: float = 0.0, ranks: int = 4, batch: int = 4, syncs: str = SYNCS, compute: float = 0.5
) -> dict[str, Any]:
    """A record as the bench writes it, but for the rungs' seconds."""
    tensors = [
        {"name": name, "shape": shape, "dtype": "float32", "bytes": 4 * math.prod(shape)} for name, shape in TENSORS
    ]
    # Backward takes half of the compute, and comes to the tensors at even distances from the last to the first.
    backward = compute / 2
    for place, tensor in enumerate(reversed(tensors)):
        tensor["seconds"] = backward * (place + 1) / len(tensors)
    size = sum(tensor["bytes"] for tensor in tensors)
    candidates = references(parse_candidates(syncs))
    labels = [candidate.label for candidate in candidates]
    found = {
        "setting": {
            "model": "toy", "task": "rte", "gradient_bytes": size, "tokens": 64, "step": False, "backend": "gloo",
            "device": "cpu", "threads_per_rank": 1, "world_size": ranks, "batch": batch,
        },
        "environment": {
            "cores": 2, "ranks_on_host": 1,
            "network": {"hosts": ranks, "rate": rate_words(rate), "delay": delay_words(delay)},
        },
        "candidates": [{"label": c.label, "sync": c.name, "options": c.options} for c in candidates],
        "samples": [
            {"candidate": "none", "seconds_forward_by_rank": [compute * 0.4] * ranks,
             "seconds_backward_by_rank": [backward] * ranks}
        ],
        "arrivals": {"backward_seconds": backward, "tensors": tensors},
        "traffic": {
            label: {"calls": [6], "payload_bytes": [size], "bytes_sent": [2 * (ranks - 1) / ranks * size]}
            for label in labels
        },
        "summary": {label: {"seconds_median": compute} for label in labels},
    }  # fmt: skip
    found["traffic"] |= {
        "bucketed+bf16": {"calls": [6], "payload_bytes": [size / 2], "bytes_sent": [0.75 * size]},
        "all_reduce": {
            "calls": [len(tensors)],
            "payload_bytes": [size],
            "bytes_sent": [2 * (ranks - 1) / ranks * size],
        },
        "gather_scatter": {"calls": [6], "payload_bytes": [size], "bytes_sent": [(ranks - 1) * size]},
        "ring+topk": {"calls": [1], "payload_bytes": [size / 50], "bytes_sent": [3 * size / 50]},
        # A third of the embedding's rows are looked up.
        "sparse_rows": {"calls": [6], "payload_bytes": [size - tensors[0]["bytes"] * 2 / 3], "bytes_sent": [size]},
    }
    return found


def write_bench(folder: Path, noise: float = 0.0, seed: int = 0, **setting: Any) -> Path:
    """A record of this setting in a folder of its own, with the seconds that follow TRUTH and all that they make."""
    path = folder / FILE_NAME
    folder.mkdir(parents=True)
    found = bench_record(**setting)
    factors = iter(1 + noise * np.random.default_rng(seed).standard_normal(len(found["candidates"])))
    medians = {label: summary["seconds_median"] for label, summary in found["summary"].items()}
    rate, delay = setting.get("rate", GBIT), setting.get("delay", 0.0)
    for label in medians if setting.get("ranks", 4) > 1 else ():
        traffic = found["traffic"][label]
        if label != "none":
            sent = 8 * traffic["bytes_sent"][0] / rate + 6 * traffic["calls"][0] * (delay + 1e-3)
            medians[label] = (medians[label] + sent) * next(factors)
    rounds = {
        label: [median * SPREAD[(place + number) % len(SPREAD)] for number in range(len(SPREAD))]
        for place, (label, median) in enumerate(medians.items())
    }
    found["setting"]["rounds"] = len(SPREAD)
    found["summary"] = summarize(rounds, "none", "ddp")
    path.write_text(json.dumps(found))
    return folder
