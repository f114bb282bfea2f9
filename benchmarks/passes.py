"""The cost of a rank's share of a batch, forward and backward, with the library's layers and with ours.

    GLUE_DIR=... python benchmarks/passes.py [--model minilm] [--precision fp32,bf16] [--rounds 12]

RTE's first global batches of 64, of which rank 0 of 4 has a quarter, on one thread: CPU seconds, medians over rounds in
which each way has its turn, without a sync and without an optimizer. Next to them are the differences of the loss and
of the largest gradient from the first way's. Each way includes those above it:

    grouped     the library's layers, and a share split into groups of similar length
    packed      no padding in BERT's encoder (`cos598d/models/padding.py`)
    first       only the tokens of the last layer that the head reads
    onednn      products in float32 by oneDNN, if it is the faster (`cos598d/models/linear.py`)
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cos598d.models.linear import multiply_by_the_faster
from cos598d.models.padding import cuts_by_length, leave_out_padding

from cos598d.data import get_task
from cos598d.data.examples import Examples
from cos598d.data.sampler import global_batches, micro_batches
from cos598d.models.build import ModelSource, build_model, find_model
from cos598d.records.conventions import WARM_UP
from cos598d.strategies.precision import autocast

WAYS = ("grouped", "packed", "first", "onednn")
BATCHES, BATCH, RANKS, SEED = 4, 64, 4, 42
TASK = get_task("rte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="as --model_name_or_path (default: minilm)")
    parser.add_argument("--precision", default="fp32,bf16", help="some of fp32,bf16,fp16 (default: fp32,bf16)")
    parser.add_argument("--rounds", type=int, default=12, help=f"more than {WARM_UP}, which are left out")
    options = parser.parse_args()
    if options.rounds <= WARM_UP:
        parser.error(f"--rounds must be more than {WARM_UP}, which are left out")
    torch.set_num_threads(1)
    source = find_model(options.model)
    location, words = TASK.locate(None)
    examples = TASK.load("train", location, source.load_encoder(), 128, overwrite_cache=False, limit=None)
    batches = list(global_batches(len(examples), BATCH, SEED, 0))[:BATCHES]
    tokens = statistics.fmean(int(examples.lengths[batch].sum()) for batch in batches)
    shares = [micro_batches(batch, examples.lengths, rank, RANKS) for batch in batches for rank in range(RANKS)]
    padded = sum(len(one.indices) * int(examples.lengths[one.indices].max()) for share in shares for one in share)
    print(f"{words}: {tokens:.0f} tokens a batch, {padded / BATCHES:.0f} with the padding of the groups,")
    print(f"which are {sum(map(len, shares)) / len(shares):.1f} to a share")
    for precision in options.precision.split(","):
        report(precision, {way: as_built(source, way) for way in WAYS}, examples, batches, options.rounds)


def as_built(source: ModelSource, way: str) -> torch.nn.Module:
    """The model, with the part of our layers that this way has."""
    with mock.patch.multiple(
        "cos598d.models.build", leave_out_padding=lambda *_: None, multiply_by_the_faster=lambda _: None
    ):
        model = build_model(source, TASK.head, TASK.num_labels, 0.0, SEED)
    if way != "grouped":
        leave_out_padding(model, TASK.head if way != "packed" else "question_answering")  # which reads every token
    if way == "onednn":
        multiply_by_the_faster(model)
    return model


def report(
    precision: str,
    models: dict[str, torch.nn.Module],
    examples: Examples,
    batches: list[np.ndarray],
    rounds: int,
) -> None:
    """Time the ways in turn and print a line for each."""
    seconds: dict[str, list[float]] = {way: [] for way in models}
    found: dict[str, tuple[float, list[torch.Tensor]]] = {}
    for number in range(rounds):
        for way, model in models.items():
            began = time.process_time()
            loss = one_pass(model, precision, examples, batches[number % len(batches)])
            seconds[way].append(time.process_time() - began)
            if number == 0:
                found[way] = loss, [p.grad for p in model.parameters() if p.grad is not None]
            model.zero_grad(set_to_none=True)
    print(f"{precision:8} s        of the first    loss apart    gradients apart")
    expected, gradients = found["grouped"]
    for way, (loss, others) in found.items():
        apart = max((a - b).abs().max().item() for a, b in zip(gradients, others, strict=True))
        median, base = (statistics.median(seconds[name][WARM_UP:]) for name in (way, "grouped"))
        print(f"{way:8} {median:.3f}    {median / base:.2f}            {abs(loss - expected):.1e}       {apart:.1e}")


def one_pass(model: torch.nn.Module, precision: str, examples: Examples, batch: np.ndarray) -> float:
    """Rank 0's forward and backward; return its part of the batch's mean loss."""
    share = micro_batches(batch, examples.lengths, 0, RANKS, group_by_length=cuts_by_length(model, True))
    total = 0.0
    for one in share:
        inputs = examples.collate(one.indices)
        with autocast(precision, torch.device("cpu")):
            loss = model(**inputs)[0] * one.weight
        loss.backward()
        total += loss.item()
    return total


if __name__ == "__main__":
    main()
