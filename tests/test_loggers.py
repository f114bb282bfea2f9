"""Loggers get the rows of rank 0: CSV files, TensorBoard, and a logger of one's own from a file."""

import csv
import sys
import types

import pytest
from programs import TINY, TINY_TRAINING
from recorded import rows_of

import cos598d
from cos598d.commands.script import run_script
from cos598d.errors import UsageError
from cos598d.measure.loggers import CsvLogger, load_logger
from cos598d.measure.tensorboard import LOSSES, Board
from cos598d.records.conventions import PHASES
from cos598d.tools.report.load import load_run

ACCUMULATOR = "tensorboard.backend.event_processing.event_accumulator"

SETTING = {"model": "tiny", "max_seq_length": 32, "total_train_batch_size": 16, "world_size": 2, "quiet": True}
OWN = """
import json

class Told:
    def run(self, folder, config, iteration):
        self.file = open(folder.parent / "told.jsonl", "a")
        self.say("run", {"task": config["task_name"], "after": iteration})

    def say(self, call, row):
        print(json.dumps([call, dict(row)]), file=self.file, flush=True)

    def step(self, row): self.say("step", row)
    def evaluation(self, row): self.say("evaluation", row)
    def checkpoint(self, row): self.say("checkpoint", row)
    def end(self, row): self.say("end", row)
"""


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_a_logger_gets_every_row_once(tmp_path, monkeypatch):
    monkeypatch.delenv("GLUE_DIR", raising=False)
    (tmp_path / "mine.py").write_text(OWN)
    flags = {"output_dir": tmp_path / "run", "logger": f"{tmp_path}/mine.py:Told", "csv": True, "save_steps": 2}
    flags |= {"max_steps": 4, "eval_steps": 2, "do_train": True, "do_eval": True, **SETTING}
    cos598d.train("rte", **flags)
    told = rows_of(tmp_path / "told.jsonl")
    expected = ["run", "step", "step", "evaluation", "checkpoint", "step", "step", "evaluation", "checkpoint", "end"]
    assert sorted(call for call, _ in told) == sorted(expected)
    assert (told[0], told[-1]) == (["run", {"task": "rte", "after": 0}], ["end", {"iteration": 4, "why": None}])
    losses = [row["loss"] for row in rows_of(tmp_path / "run" / "iterations.rank0.jsonl")]
    assert [row["loss"] for call, row in told if call == "step"] == losses
    assert [row["iteration"] for call, row in told if call == "evaluation"] == [2, 4]
    assert [row["iteration"] for call, row in told if call == "checkpoint"] == [2, 4]
    steps, evaluations = (table(tmp_path / "run" / name) for name in ("steps.csv", "evaluations.csv"))
    assert [float(row["loss"]) for row in steps] == losses
    assert [row["iteration"] for row in evaluations] == ["2", "4"]
    assert all(0 <= float(row["acc"]) <= 1 for row in evaluations)
    again = flags | {"csv": False, "logger": None, "overwrite_output_dir": True}
    cos598d.train("rte", **again)
    assert not (tmp_path / "run" / "steps.csv").exists()


@pytest.mark.parametrize("kind", [CsvLogger, Board])
def test_a_resumed_logger_replaces_the_rows_after_its_iteration(kind, tmp_path):
    if kind is Board:
        accumulator = pytest.importorskip(ACCUMULATOR, reason="the extra `tensorboard` is not installed")
    for after, last, loss in ((0, 5, 0.5), (3, 6, 0.25)):
        logger = kind()
        logger.run(tmp_path, {}, after)
        for iteration in range(after + 1, last + 1):
            logger.step({"iteration": iteration, "loss": loss})
            if iteration == 5:
                logger.evaluation({"epoch": 1, "iteration": 5, "last_iteration": 5, "loss": loss, "acc": loss})
        logger.end({"iteration": last, "why": None})
    if kind is Board:
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        rows = [(event.step, event.value) for event in events.Scalars("loss")]
        for tag in ("epoch/loss", "epoch/acc", "evaluation/acc"):
            assert [(event.step, event.value) for event in events.Scalars(tag)] == [(5, 0.25)], tag
    else:
        rows = [(int(row["iteration"]), float(row["loss"])) for row in table(tmp_path / "steps.csv")]
        assert [row["acc"] for row in table(tmp_path / "evaluations.csv")] == ["0.25"]
    assert rows == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.25), (5, 0.25), (6, 0.25)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class T: pass\n", ["is not a logger", "run, step, evaluation, checkpoint, end"]),
        ("class T:\n    def step(self): pass\n", ["step()", "step(self, row"]),
        ("class T:\n    def __init__(self, x): pass\n    def step(self, row): pass\n", ["take no arguments"]),
    ],
)
def test_a_wrong_logger_is_refused(text, words, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError) as error:
        load_logger(f"{tmp_path}/mine.py:T")()
    assert [word for word in words if word not in str(error.value)] == []


def test_a_damaged_csv_file_keeps_its_complete_rows(tmp_path):
    (tmp_path / "steps.csv").write_bytes(b"iteration,loss\r\n1,0.5\r\nx,\xff\r\n2,0.25\r\n3,0.2")
    (tmp_path / "evaluations.csv").write_bytes(b"")
    logger = CsvLogger()
    logger.run(tmp_path, {}, 2)
    logger.step({"iteration": 3, "loss": 0.125})
    logger.evaluation({"iteration": 3, "epoch": 1, "acc": 0.5})
    logger.end({"iteration": 3, "why": None})
    assert [(row["iteration"], row["loss"]) for row in table(tmp_path / "steps.csv")] == [
        ("1", "0.5"),
        ("2", "0.25"),
        ("3", "0.125"),
    ]
    assert [row["acc"] for row in table(tmp_path / "evaluations.csv")] == ["0.5"]


@pytest.mark.long
@pytest.mark.parametrize("call", ["step", "end"])
def test_an_error_in_a_logger_names_its_line_and_the_run_is_kept(tmp_path, call, capfd, monkeypatch):
    monkeypatch.delenv("GLUE_DIR", raising=False)
    (tmp_path / "mine.py").write_text(f"class Bad:\n    def {call}(self, row):\n        row['no such key']\n")
    flags = {"output_dir": tmp_path / "run", "logger": f"{tmp_path}/mine.py:Bad", "max_steps": 2, **SETTING}
    with pytest.raises(cos598d.errors.UserError) as error:
        cos598d.train("rte", do_train=True, save_model=False, **flags)
    said = f"{error.value}\n{capfd.readouterr().err}"
    assert f"{call}() raises KeyError at line 3" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "summary.json").exists() == (call == "end")


def test_tensorboard_has_the_values_of_the_record(tmp_path, monkeypatch, capfd):
    accumulator = pytest.importorskip(ACCUMULATOR, reason="the extra `tensorboard` is not installed")
    monkeypatch.chdir(tmp_path)
    stale = tmp_path / "out" / "tensorboard" / "events.out.tfevents.1.old"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"")
    words = [*TINY, "--max_steps", "2", "--no_save_model", "--output_dir", "out", "--overwrite_output_dir"]
    assert run_script("task1", "none", [*words, "--tensorboard"]) == 0, capfd.readouterr().err
    assert not stale.exists()
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    summary, rows = load_run(tmp_path / "out"), rows_of(tmp_path / "out" / "iterations.rank0.jsonl")
    for tag, name in (
        ("loss", "loss"),
        ("learning_rate", "learning_rate"),
        ("seconds/iteration", "seconds"),
        *((f"seconds/{phase}", f"seconds_{phase}") for phase in PHASES),
        ("bytes/predicted_sent", "predicted_bytes_sent"),
    ):
        shown = events.Scalars(tag)
        assert [event.step for event in shown] == [1, 2], tag
        assert [event.value for event in shown] == pytest.approx([row[name] for row in rows]), tag
    assert "bytes/counted_sent" not in events.Tags()["scalars"], "a single rank has no wire"
    assert events.Scalars("epoch/acc")[0].value == pytest.approx(summary["epochs"][0]["acc"])
    (validated,) = events.Scalars("evaluation/validation_loss")
    assert (validated.step, validated.value) == (2, pytest.approx(summary["epochs"][0]["validation_loss"]))
    training = summary["epochs"][0]["training"]
    assert events.Scalars("epoch/seconds_training")[0].value == pytest.approx(training["wall_seconds"])
    assert events.Scalars("epoch/tokens_per_second")[0].value == pytest.approx(training["tokens_per_second_wall"])
    assert set(LOSSES) <= set(events.Tags()["scalars"]), "the chart of both losses has both"


def test_tensorboard_has_each_class_the_seconds_and_the_speed(tmp_path, monkeypatch):
    shown = {}

    class Writer:
        def __init__(self, *_, **__):
            pass

        def add_custom_scalars(self, layout):
            pass

        def add_scalar(self, tag, value, step):
            shown[tag] = (value, step)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    by_class = [{"class": "a cat", "examples": 2, "precision": 0.5, "recall": 1.0, "f1": 0.75}]
    training = {"examples": 8, "tokens": 80, "wall_seconds": 4.0}
    training |= {"examples_per_second_wall": 2.0, "tokens_per_second_wall": 20.0}
    facts = {"epoch": 1, "iteration": 3, "last_iteration": 3, "loss": 0.5, "f1_macro": 0.75, "seconds_evaluation": 1.5}
    board = Board()
    board.run(tmp_path, {}, 0)
    board.evaluation(facts | {"training": training, "by_class": by_class, "confusion": [[2]]})
    assert {tag: value for tag, (value, _) in shown.items()} == {
        "epoch/loss": 0.5,
        "epoch/f1_macro": 0.75,
        "epoch/seconds_evaluation": 1.5,
        "epoch/seconds_training": 4.0,
        "epoch/examples_per_second": 2.0,
        "epoch/tokens_per_second": 20.0,
        "evaluation/f1_macro": 0.75,
        "class/precision/a cat": 0.5,
        "class/recall/a cat": 1.0,
        "class/f1/a cat": 0.75,
    }
    assert {step for _, step in shown.values()} == {3}
    shown.clear()
    board.evaluation(facts | {"by_class": by_class})
    assert not any(tag.startswith("class/") for tag in shown), "of more than 20 classes there are no charts"


def test_without_the_package_tensorboard_is_refused_first(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert run_script("task1", "none", [*TINY_TRAINING, "--output_dir", "out", "--tensorboard"]) == 2
    said = capfd.readouterr().err.strip()
    assert said.startswith("error: --tensorboard needs the package tensorboard (")
    assert "\n" not in said
    assert not (tmp_path / "out").exists()
