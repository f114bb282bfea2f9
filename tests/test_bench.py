"""The bench: its statistics, the names of candidates, and complete runs on real ranks."""

import json
import statistics

import numpy as np
import pytest
import torch
from programs import ROOT

from cos598d.commands.cli import main
from cos598d.models.build import find_model
from cos598d.optimizers import make_optimizer
from cos598d.records.summary import LAST_TO_LAST, median_interval, paired_ratio, summarize, world_seconds
from cos598d.tools.bench.candidates import parse_candidate, parse_candidates, references
from cos598d.tools.bench.plan import BenchPlan
from cos598d.tools.bench.rounds import order_of_round
from cos598d.tools.bench.turns import STEPPING
from cos598d.tools.bench.workload import Workload

TINY_BENCH = ["-m", "cos598d", "bench", "--model", "tiny", "--world_size", 2, "--batch", 2, "--tokens", 16]
SUMMING = """
import torch.distributed as dist

from cos598d.sync.base import GradientSync


class Sum(GradientSync):
    def average(self, name, gradient):
        dist.all_reduce(gradient)
"""


def read(path):
    return json.loads(path.read_text())


def test_the_median_s_interval_is_of_order_statistics_and_holds_it_as_often_as_stated():
    assert median_interval([3.0] * 5) is None
    assert median_interval([6, 1, 5, 2, 4, 3]) == [1, 6]
    assert median_interval(list(range(1, 21))) == [6, 15]  # as in any table of the sign test
    draws = np.random.default_rng(1).exponential(size=(2000, 15))
    held = [low <= np.log(2) <= high for low, high in (median_interval(row.tolist()) for row in draws)]
    assert 0.95 <= statistics.fmean(held) < 0.99


def test_a_ratio_within_rounds_does_not_see_a_slow_round():
    base = [1.0, 1.1, 9.0, 1.0, 1.2, 1.1]
    ratio = paired_ratio([2 * value for value in base], base)
    assert ratio == {"median": 2.0, "interval_95": [2.0, 2.0]}
    assert paired_ratio([1.0], [2.0]) == {"median": 0.5, "interval_95": None}


def test_a_late_start_is_no_time_of_the_sync_on_one_clock():
    # Rank 0 starts 8 ms before rank 1, and waits for it: both stop together.
    started, stopped = [1.000, 1.008], [1.030, 1.030]
    by_rank = [stop - start for start, stop in zip(started, stopped, strict=True)]
    assert world_seconds(by_rank, started, stopped, one_clock=True) == pytest.approx(0.022)
    # The clocks of different hosts cannot be compared: only each rank's own seconds are known.
    elsewhere = [[moments[0], moments[1] + 1000] for moments in (started, stopped)]
    assert world_seconds(by_rank, *elsewhere, one_clock=False) == pytest.approx(0.030)


def test_the_summary_compares_with_the_floor_and_ddp_within_rounds():
    floor = [1.0, 5.0, 1.1, 3.0, 1.2, 2.0]
    found = summarize({"flat": [value + 0.5 for value in floor], "none": floor}, "none", "ddp")["flat"]
    assert found["exposed_within_rounds"]["median"] == pytest.approx(0.5)
    assert found["exposed_within_rounds"]["interval_95"] == pytest.approx([0.5, 0.5])
    seconds = {"flat": [3.0, 5.0, 4.0], "none": [1.0, 2.0, 1.0], "ddp": [2.0, 2.0, 2.0]}
    found = summarize(seconds, "none", "ddp")["flat"]
    assert (found["seconds_median"], found["seconds_exposed"]) == (4.0, 3.0)
    assert found["seconds_quartiles"] == [3.5, 4.5]
    assert (found["ratio_to_ddp"]["median"], found["ratio_to_floor"]["median"]) == (2.0, 3.0)
    alone = summarize({"flat": [3.0]}, "none", "ddp")["flat"]
    assert alone["seconds_quartiles"] == [3.0, 3.0]
    assert alone["seconds_exposed"] is alone["ratio_to_ddp"] is alone["ratio_to_floor"] is None
    assert alone["exposed_within_rounds"] is None


def test_a_round_has_every_candidate_once_in_its_own_order():
    orders = [order_of_round(5, number, seed=42) for number in range(20)]
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert len(set(map(tuple, orders))) > 10
    assert orders == [order_of_round(5, number, seed=42) for number in range(20)]


@pytest.mark.parametrize(
    ("word", "name", "options"),
    [
        ("all_reduce", "all_reduce", {}),
        ("bucketed:bucket_mb=5", "bucketed", {"bucket_mb": 5.0}),
        ("bucketed+bf16", "bucketed", {"compress": "bf16"}),
        ("bucketed+topk:0.05:bucket_mb=5", "bucketed", {"compress": "topk:0.05", "bucket_mb": 5.0}),
        ("local_sgd:sync_every=4", "local_sgd", {"sync_every": 4}),
        ("ddp:bucket_mb=5", "ddp", {"bucket_mb": 5.0}),
    ],
)
def test_a_candidate_is_a_name_with_options(word, name, options):
    label, found, found_options = parse_candidate(word)
    assert (label, found) == (word, name)
    assert found_options.items() >= options.items()


def test_the_floor_and_ddp_are_added_once():
    def labels(words):
        return [candidate.label for candidate in references(parse_candidates(words))]

    assert labels("flat, all_reduce,flat") == ["flat", "all_reduce", "none", "ddp"]
    assert labels("ddp,flat") == ["ddp", "flat", "none"]
    whole = BenchPlan(sync="zero1", step=True).candidates()
    assert [candidate.label for candidate in whole] == ["zero1", "none", "ddp"]


REFUSED = {
    "--sync flat,nosuch": "unknown sync nosuch. Choose one of ",
    "--sync flat:bucket_mb=5": "--bucket_mb has no effect with --sync flat",
    "--sync bucketed:size=5": "unknown option 'size'. Choose from ",
    "--sync bucketed:bucket_mb=x": "bucket_mb 'x' is not valid. Give a number",
    "--sync local_sgd:sync_every=1.5": "sync_every '1.5' is not valid. Give a whole number",
    "--sync bucketed:bucket_mb=-1": "--bucket_mb -1",
    "--sync bucketed+nosuch": "--compress nosuch: unknown compression",
    "--sync bucketed+bf16:compress=fp16": "has two compressions",
    "--sync ddp+topk": "--compress has no effect with --sync ddp",
    "--sync ,": "names no sync",
    "--sync flat,zero1": "--sync zero1 takes the optimizer's step itself. Add --step",
    "--rounds 0": "--rounds 0",
    "--tokens 4": "--tokens 4",
    "--threads 0": "--threads 0",
    "--precision fp16": "unknown --precision fp16. Did you mean 'bf16'? Choose one of fp32, bf16",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_measured_is_one_sentence_and_nothing_starts(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words.split()]) == 2
    said = capsys.readouterr().err
    assert REFUSED[words] in said
    assert said.startswith("error: ")
    assert said.endswith(".\n")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_replicas_share_only_the_weights():
    workload = Workload(find_model("tiny"), torch.device("cpu"), batch=2, tokens=400, seed=1)
    replica = workload.replica()
    pairs = list(zip(workload.model.parameters(), replica.parameters(), strict=True))
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)
    inputs = [workload.inputs(0, rank, 2) for rank in range(2)]
    shapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (2, 400)) | {"labels": (2,)}
    for batch in inputs:  # filled up, since no example is so long, with tokens that are computed as others are
        assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
        assert batch["attention_mask"].sum() == 800
    assert not torch.equal(inputs[0]["input_ids"], inputs[1]["input_ids"])
    replica(**inputs[0])[0].backward()
    assert all(own.grad is None and other.grad is not None for own, other in pairs)
    before = [own.clone() for own, _ in pairs]
    make_optimizer(replica, STEPPING).step()
    assert all(torch.equal(own, kept) for (own, _), kept in zip(pairs, before, strict=True))


def test_under_bf16_forward_runs_in_bf16_and_the_weights_stay_fp32():
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        workload = Workload(find_model("tiny"), torch.device("cpu"), batch=2, tokens=16, seed=1, precision=precision)
        replica = workload.replica()
        loss, logits = workload.computing(replica)(**workload.inputs(0, 0, 1))
        assert logits.dtype == dtype
        loss.backward()
        assert {(p.dtype, p.grad.dtype) for p in replica.parameters()} == {(torch.float32, torch.float32)}


def bench(start, words):
    program = start("bench", [*TINY_BENCH, *words], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 0, program.text
    return program.text


def test_every_candidate_is_measured_in_every_round_and_is_in_the_table(start, tmp_path):
    (tmp_path / "mine.py").write_text(SUMMING)
    text = bench(start, ["--rounds", 2, "--sync", "all_reduce,sparse_rows,mine.py:Sum", "--output", "out"])
    record = read(tmp_path / "out" / "bench.json")
    labels = ["all_reduce", "sparse_rows", "mine.py:Sum", "none", "ddp"]
    assert [candidate["label"] for candidate in record["candidates"]] == labels
    assert {(s["round"], s["candidate"]) for s in record["samples"]} == {(r, c) for r in range(2) for c in labels}
    assert len(record["samples"]) == 2 * len(labels)
    for sample in record["samples"]:
        assert len(sample["seconds_by_rank"]) == 2
        starts = sample["started_by_rank"]
        stops = [start + seconds for start, seconds in zip(starts, sample["seconds_by_rank"], strict=True)]
        # The rank that starts first waits for the other, which is no time of the sync.
        assert min(starts) == 0
        assert sample["seconds"] == pytest.approx(max(stops) - max(starts))
        assert 0 < sample["seconds"] <= max(sample["seconds_by_rank"])
        phases = sum(sample[f"seconds_{phase}_by_rank"][1] for phase in ("forward", "backward", "sync"))
        assert 0 < phases <= sample["seconds_by_rank"][1]
    seconds = {label: [s["seconds"] for s in record["samples"] if s["candidate"] == label] for label in labels}
    assert record["summary"] == summarize(seconds, "none", "ddp")
    assert record["setting"]["seconds_of"] == LAST_TO_LAST
    assert record["setting"]["operations"] > 0
    assert record["setting"]["peak_per_second"] > 0
    assert f"median s: {LAST_TO_LAST}." in text
    # Each of two ranks sends as many bytes as the gradient has.
    size = record["setting"]["gradient_bytes"]
    assert size == 4 * record["setting"]["parameters"]
    assert record["traffic"]["all_reduce"]["bytes_sent"] == [size, size]
    assert record["traffic"]["none"]["bytes_sent"] == [0, 0]
    assert record["environment"]["versions"]["torch"] == torch.__version__
    rows = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert all(label in rows for label in labels)
    # A sum is not an average.
    assert "not the same work: mine.py:Sum.\n" in text


def test_candidates_that_step_by_themselves_are_measured_with_their_steps(start, tmp_path):
    words = ["--rounds", 1, "--sync", "zero1,zero3,torch_fsdp", "--step", "--precision", "bf16", "--output", "out"]
    text, record = bench(start, words), read(tmp_path / "out" / "bench.json")
    assert record["setting"]["precision"] == "bf16"
    assert " each), bf16, 1 round\n" in text
    size = record["setting"]["gradient_bytes"]
    # Of two ranks each sends half of the gradient and half of the weights, zero3 most of these twice.
    assert record["traffic"]["zero1"]["bytes_sent"] == pytest.approx([size, size], rel=1e-3)
    assert all(size < sent < 1.5 * size for sent in record["traffic"]["zero3"]["bytes_sent"])  # looked-up rows once
    norms = record["gradient_norm"]
    # The ranks' sums are in another order.
    for name in ("zero1", "zero3", "torch_fsdp"):
        assert norms[name] == pytest.approx(norms["ddp"], rel=1e-4)
    assert "not the same work" not in text
