"""A probe finds a precision that is slow here: a warning before the run, and `auto` chooses the faster one."""

import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from worlds import run_ranks

import cos598d
from cos598d.config import RunConfig
from cos598d.errors import UsageError
from cos598d.models.products import MOST_OPERATIONS, seconds_of_product, widest_product
from cos598d.records.run import read_summary
from cos598d.strategies import choose_precision as choosing
from cos598d.strategies.choose_precision import choose_precision, decide, slow_halves
from cos598d.tools.report.load import load_run

DIGITS = ["--task_name", "digits", "--max_train_examples", 60, "--max_eval_examples", 30]
DIGITS += ["--total_train_batch_size", 20, "--no_cuda"]
SLOW = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # oneDNN then has no instructions for 16 bits


@pytest.mark.parametrize(
    ("asked", "ratio", "chosen", "remark", "warns"),
    [
        ("auto", 0.4, "bf16", "--precision auto: bf16, since bf16 takes 0.4 times fp32's seconds", ""),
        ("auto", 0.99, "fp32", "--precision auto: fp32, since bf16 takes 0.99 times", ""),
        ("auto", 7.7, "fp32", "--precision auto: fp32, since bf16 takes 7.7 times", ""),
        ("bf16", 7.7, "bf16", "", "bf16 takes 7.7 times fp32's seconds here, measured now. Use --precision fp32"),
        ("fp16", 5.0, "fp16", "", "fp16 takes 5 times fp32's seconds"),
        ("bf16", 0.5, "bf16", "", ""),
        ("fp16", 1.0, "fp16", "", ""),
    ],
)
def test_the_decision_follows_the_probe(asked, ratio, chosen, remark, warns):
    found = decide(asked, ratio, "here")
    assert found.precision == chosen
    for text, beginning in ((found.remark, remark), (found.warning, warns)):
        assert text.startswith(beginning)
        assert bool(text) is bool(beginning)


def halves_take(seconds):
    """A probe by which float32 takes one second and 16 bits take `seconds`."""

    def probe(shape, *precisions):
        assert not torch.is_autocast_enabled("cpu"), "else float32 would be cast too"
        return dict(zip(precisions, (1.0, seconds), strict=True))

    return probe


@pytest.mark.parametrize(("half_seconds", "warns"), [(5.0, True), (0.5, False)])
def test_a_slow_half_precision_of_a_script_is_a_warning(half_seconds, warns, monkeypatch):
    monkeypatch.setattr(choosing, "seconds_of_product", halves_take(half_seconds))
    model = nn.Sequential(nn.Linear(8, 4))
    assert slow_halves(model) == slow_halves(nn.Sequential(nn.Embedding(3, 2)).bfloat16()) == ""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = slow_halves(model)
    for found, half in ((under_autocast, "bf16"), (slow_halves(model.half()), "fp16")):
        assert found.startswith(f"{half} takes 5 times fp32's seconds") if warns else found == ""


def warned_by_parallelize(comm):
    """On a rank: the warnings of two steps under autocast where 16 bits are slow."""
    choosing.seconds_of_product = halves_take(5.0)
    model, optimizer = cos598d.parallelize(nn.Linear(8, 4), lambda p: torch.optim.SGD(p, lr=0.1), strategy="zero1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 8)).float().sum()
            loss.backward()
            optimizer.step()
    return [str(one.message) for one in caught if "fp32" in str(one.message)]


def test_parallelize_warns_once_on_rank_0_of_slow_16_bits():
    first, second = run_ranks(2, warned_by_parallelize)
    assert len(first) == 1
    assert "bf16 takes 5 times" in first[0]
    assert second == []


def chosen_where_one_is_slow(comm, half_seconds):
    """On a rank: what is chosen where 16 bits take `half_seconds[rank]` and float32 takes one second."""
    choosing.seconds_of_product = halves_take(half_seconds[comm.rank])
    return [choose_precision(asked, "a shape", comm) for asked in ("auto", "bf16")]


def test_all_ranks_choose_by_the_slowest():
    first, second = run_ranks(2, chosen_where_one_is_slow, [0.3, 4.0])
    assert first == second
    (auto, remark, _), (_, _, warns) = first
    assert auto == "fp32"
    assert "bf16 takes 4 times fp32's seconds in a product of a shape on the slowest rank" in remark
    assert warns.startswith("bf16 takes 4 times")


@pytest.mark.parametrize(("support", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_if_every_gpu_supports_it(support, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: support)
    comm = SimpleNamespace(device=torch.device("cuda"), rank=0, exchange=lambda value: [True, value])
    assert choose_precision("auto", "a shape", comm).precision == chosen
    assert choose_precision("fp16", "a shape", comm) == ("fp16", "", "")
    assert choose_precision("fp32", "a shape", comm) == ("fp32", "", "")


def test_the_probe_multiplies_the_widest_layer_with_unchanged_threads():
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8), nn.Embedding(1000, 500))
    shape = widest_product(model)
    assert shape[1:] == (32, 64)
    large = widest_product(nn.Linear(5000, 6000))
    assert large.inputs == 5000
    assert 0 < large.operations <= MOST_OPERATIONS
    threads = torch.get_num_threads()
    found = seconds_of_product(shape, "fp32", "bf16", "fp16")
    assert found.keys() == {"fp32", "bf16", "fp16"}
    assert all(seconds >= 0 for seconds in found.values())
    assert torch.get_num_threads() == threads


@pytest.mark.long
def test_a_run_without_bf16_instructions_prints_what_its_probe_finds(start, tmp_path):
    def run(name, precision, *more, environ=SLOW):
        own = ["--precision", precision, "--max_steps", 4, "--world_size", 2, "--output_dir", name, *more]
        program = start(name, ["-m", "cos598d", "train", *DIGITS, *own], environ)
        assert program.wait() == 0, program.text
        return program.text

    text = run("auto", "auto", "--save_steps", 1)
    ((chosen, ratio),) = re.findall(r"--precision auto: (\w+), since bf16 takes (\S+) times", text)
    assert chosen == decide("auto", float(ratio), "").precision or 0.9 < float(ratio) < 0.92
    assert f"{chosen}, seed 42" in text
    summary = read_summary(tmp_path / "auto")
    assert summary["precision"] == chosen
    assert json.loads((tmp_path / "auto" / "config.json").read_text())["precision"] == "auto"
    assert load_run(tmp_path / "auto")["precision"] == chosen
    operations, speed = summary["operations"], summary["wall"]["examples_per_second_clock"]
    share = operations["per_example"] * speed / operations["peak_per_second"]
    assert operations["share_of_peak"] == pytest.approx(share)

    # Resumed, a run keeps the precision in which it was saved. The probe does not count.
    text = run("half", "bf16", "--save_steps", 1)
    ratios = re.findall(r"warning: bf16 takes (\S+) times fp32's seconds", text)
    assert len(ratios) <= 1
    assert all(decide("bf16", float(one), "").warning or float(one) == 1.1 for one in ratios)
    run("on", "auto", "--resume", "half/checkpoints", environ=None)
    assert read_summary(tmp_path / "on")["precision"] == "bf16"


def test_an_unknown_precision_is_refused():
    RunConfig(precision="auto").check(2)
    with pytest.raises(UsageError, match="unknown --precision half"):
        RunConfig(precision="half").check(2)
