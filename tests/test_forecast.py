"""A forecast has the numbers of the run's later record, and starts nothing."""

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from report_records import read
from scale_records import write_bench

from cos598d.commands import cli, train
from cos598d.config import config_from
from cos598d.cost import seconds
from cos598d.cost.forecast import forecast, forecast_lines
from cos598d.cost.model import Compute, Costs
from cos598d.cost.planned import Known
from cos598d.cost.seconds import CallCosts, costs_of
from cos598d.cost.timed import Timed
from cos598d.errors import UserError
from cos598d.strategies import known_names
from cos598d.tools.report.load import load_run

DIGITS = {"task_name": "digits", "max_train_examples": 150, "max_eval_examples": 90, "total_train_batch_size": 30}
DIGITS |= {"num_train_epochs": 2.0, "no_cuda": True}
RUNS = {"ddp": 2, "zero3": 2, "all_reduce": 1}
TIMED = Timed(Compute(0.1, 0.2, 0.05, {}), 7, 100.0, 1, 1.0)
ENGINES = ("deepspeed", "horovod")  # libraries that do not report what they send
PACKAGES = {"deepspeed": "deepspeed", "horovod": "horovod", "fabric": "lightning"}


@pytest.fixture
def timed(monkeypatch):
    """Timings take no time; the list has what was to be timed."""
    asked = []

    def _time(config, strategy, ranks):
        asked.append((config.per_gpu_train_batch_size, config.learning_rate, ranks))
        return TIMED

    monkeypatch.setattr(seconds, "_time", _time)
    costs = CallCosts(Costs(3e-4, 1e-4, 3.5e-10, 0.95), "")
    monkeypatch.setattr(seconds, "costs_of", lambda benches, ranks: costs_of(benches, ranks) if benches else costs)
    return asked


def digits(**values):
    return config_from(DIGITS | values)


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("sync", RUNS)
def test_the_record_of_the_run_has_what_was_forecast(sync, start, tmp_path):
    ranks = RUNS[sync]
    words = ["-m", "cos598d", "train", "--task_name", "digits", "--max_train_examples", 150, "--max_eval_examples", 90]
    words += ["--total_train_batch_size", 30, "--num_train_epochs", 2, "--no_cuda", "--sync", sync]
    words += ["--output_dir", "out", "--world_size", ranks]
    assert start("run", words).wait() == 0
    run, found = load_run(tmp_path / "out"), forecast(digits(sync=sync), ranks, timings=Known(times=False))
    assert (found.parameters, found.iterations) == (run["parameters"], run["iterations"])
    assert [row["iterations"] for row in run["epochs"]] == [found.iterations_per_epoch] * 2
    assert read(tmp_path / "out" / "iterations.rank0.jsonl")[2]["bytes_sent"] == found.bytes_sent_per_iteration[0]
    for row in run["epochs"]:
        assert row["predicted_bytes_sent"] == pytest.approx(found.bytes_sent_per_epoch, rel=1e-3)
    counted = max(run["memory"]["peak_with_activations"], key=lambda held: sum(held.values()))
    assert found.peak_bytes == pytest.approx(sum(counted.values()), rel=0.15)
    between = [sum(held.values()) for held in run["memory"]["between_steps"]]
    assert sum(found.memory.values()) == pytest.approx(max(between), rel=0.02)
    for path, size in found.writes:
        is_below = path.name in ("model", "checkpoints")
        files = (tmp_path / "out" / path.name).rglob("*") if is_below else (tmp_path / "out").glob("*")
        files = [file for file in files if file.is_file()]
        assert sum(file.stat().st_size for file in files) == pytest.approx(size, rel=0.5), path


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("sync", known_names())
def test_every_strategy_has_a_forecast_or_the_reason_why_not(sync, timed):
    if sync in PACKAGES and find_spec(PACKAGES[sync]) is None:
        pytest.skip(f"{PACKAGES[sync]} is not installed: make engines")
    found = forecast(digits(sync=sync, do_train=True), 1 if sync == "dp" else 2)
    assert bool(found.bytes_sent_per_iteration) == (not found.bytes_unsaid) == (sync not in ENGINES)
    assert bool(found.bytes_more) == (sync == "sparse_zero1")
    assert found.peak or found.memory_unsaid
    assert (found.seconds_per_iteration is None) == (sync in ENGINES)
    assert found.seconds_from


def test_a_step_of_sparse_zero1_sends_more_than_its_forecast(tmp_path, start):
    flags = {"sync": "sparse_zero1", "learning_rate": 0.01, "max_steps": 3, "max_eval_examples": 10}
    words = ["--do_train", "--task_name", "digits", "--no_cuda", "--world_size", 2, "--output_dir", "out"]
    words += [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert start("run", ["-m", "cos598d", "train", *words]).wait() == 0
    found = forecast(digits(do_train=True, **flags), 2, timings=Known(times=False))
    sent = [row["bytes_sent"] for row in read(tmp_path / "out" / "iterations.rank0.jsonl")]
    assert sum(sent) > 3 * found.bytes_sent_per_iteration[0]


def test_rows_of_an_embedding_bound_the_bytes_of_sparse_rows(timed):
    flags = {"task_name": "rte", "model_name_or_path": "minilm", "max_train_examples": 64, "do_train": True}
    flags["no_cuda"] = True
    rows, every = (forecast(config_from(flags | {"sync": name}), 4) for name in ("sparse_rows", "flat"))
    numbers = re.findall(r"\b\d[\d,]+(?= bytes|\b for all)", rows.bytes_unsaid)
    least, most = (int(number.replace(",", "")) for number in numbers)
    assert most == every.bytes_sent_per_iteration[0]
    assert most - least == 30522 * 384 * 4 * 2 * 3 // 4


def test_forecasts_of_a_sweep_time_each_batch_once(timed):
    known = Known()
    for rate in (1e-4, 1e-5):
        for batch in (4, 16):
            values = {name: value for name, value in DIGITS.items() if name != "total_train_batch_size"}
            config = config_from(values | {"per_gpu_train_batch_size": batch, "learning_rate": rate})
            assert forecast(config, 2, timings=known).seconds_per_iteration > TIMED.compute.after
    assert [batch for batch, *_ in timed] == [4, 16]


def test_calls_cost_seconds_and_a_slow_link_costs_more(timed):
    known = Known()
    alone = forecast(digits(sync="none", do_train=True), 2, timings=known).seconds_per_iteration
    two = forecast(digits(sync="all_reduce"), 2, timings=known).seconds_per_iteration
    slow, far = (
        forecast(digits(sync="all_reduce"), 2, 2, rate, delay, known).seconds_per_iteration
        for rate, delay in ((1e7, 0.0), (None, 0.01))
    )
    assert alone < two < min(slow, far)


def test_costs_are_fitted_to_benches_that_are_named(timed, tmp_path):
    write_bench(tmp_path / "bench", syncs="all_reduce,bucketed")
    theirs = forecast(digits(), 2, timings=Known(costs_from=(tmp_path / "bench",)))
    assert "fitted to 1 bench" in theirs.seconds_from
    assert theirs.seconds_per_iteration != forecast(digits(), 2).seconds_per_iteration
    for ranks in (1, 2):
        with pytest.raises(UserError, match="nowhere"):
            forecast(digits(), ranks, timings=Known(costs_from=(Path("nowhere"),)))


@pytest.mark.long
def test_ranks_that_only_compute_are_timed_at_once(monkeypatch):
    monkeypatch.setattr(seconds, "TIMED_SECONDS", 0.05)
    known = Known()
    config = digits(sync="zero1")
    found = forecast(config, 2, timings=known)
    assert "fitted to a short bench that was made here" in found.seconds_from
    assert found.seconds_per_epoch == pytest.approx(found.seconds_per_iteration * found.iterations_per_epoch)
    assert "iterations of 2 ranks were timed here at once" in found.seconds_from
    times = next(value for value in known._found.values() if isinstance(value, Timed))
    names = {name for name, _ in known.work(config).model.named_parameters()}
    assert set(times.compute.arrivals) == names
    assert min(times.compute.before, times.compute.backward, times.compute.after) > 0
    assert times.counted >= 3


@pytest.mark.parametrize(("share", "is_busy"), [(1.0, False), (0.3, True)])
def test_a_timing_on_a_busy_machine_is_a_remark(timed, monkeypatch, share, is_busy):
    monkeypatch.setattr(seconds, "_time", lambda *_: replace(TIMED, share=share))
    monkeypatch.setattr(seconds, "count_cores", lambda: 2)
    assert ("Other programs were using the CPU" in forecast(digits(), 2).seconds_from) == is_busy


@pytest.mark.long
def test_what_cannot_be_timed_is_a_sentence(monkeypatch):
    monkeypatch.setattr(seconds, "TIMED_SECONDS", "soon")
    with pytest.raises(UserError, match=r"could not be timed here: .*\.$"):
        forecast(digits(), 1)


def test_the_command_starts_nothing_and_makes_no_folder(timed, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("run_rank", "start_local_workers"):
        monkeypatch.setattr(train, name, None)
    words = ["train", "--task_name", "digits", "--no_cuda", "--dry_run", "--world_size", "4", "--sync", "zero1"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    for word in ("nothing is started", "parameters: 534,410", "iterations: 345, 23 per epoch", "seconds: "):
        assert word in said
    assert "sent per rank and iteration: 3,206,464, 3,206,464, 3,206,456, 3,206,456 bytes, rank by rank" in said
    assert "would write runs/train-digits-zero1-n4-WHEN/model: about 2.16 MB" in said
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert cli.main([*words, "--output_dir", "full"]) == 0
    assert "warning: the run would be refused, because --output_dir full is not empty" in capsys.readouterr().out


def test_a_task_s_script_forecasts_itself(timed, run_here, tmp_path):
    words = ["--dry_run", "--world_size", 2, "--model_name_or_path", "tiny", "--max_seq_length", 32, "--no_cuda"]
    code, said = run_here("task2b/run_glue.py", words)
    assert code == 0
    assert "task2b: rte, sync all_reduce, 2 ranks; nothing is started (--dry_run)" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--from", "bench"], "--from is for --dry_run"),
        (["--dry_run", "--do_eval"], "--dry_run predicts a training. Add --do_train."),
        (["--dry_run", "--from", "nowhere"], "nowhere"),
        (["--dry_run", "--learning_rate", "-1"], "--learning_rate -1 is not valid. Give a number of at least 0."),
    ],
)
def test_a_wrong_argument_is_a_sentence(words, sentence, timed, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--task_name", "digits", "--no_cuda", "--world_size", "2", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_gpu_is_not_timed(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = replace(digits(), no_cuda=False)
    found = forecast(config, 1)
    assert found.seconds_per_iteration is None
    assert "--no_cuda" in found.seconds_from
    (peak,) = [line for line in forecast_lines(config, 1, found) if "at a step's peak" in line]
    assert peak.endswith("; without activations, which are predicted only for CPUs")
    assert "activations" not in found.peak
