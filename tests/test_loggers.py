"""Loggers: what rank 0 tells those who look on, CSV files, and a logger of one's own from a file."""

import csv
import json

import pytest

import cos598d
from cos598d.errors import UsageError
from cos598d.measure.loggers import load_logger

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
def test_a_logger_is_told_of_everything_once_and_of_what_a_resumed_run_adds(tmp_path, monkeypatch):
    monkeypatch.delenv("GLUE_DIR", raising=False)
    (tmp_path / "mine.py").write_text(OWN)
    flags = {"output_dir": tmp_path / "run", "logger": f"{tmp_path}/mine.py:Told", "csv": True, "save_steps": 2}
    flags |= {"max_steps": 4, "eval_steps": 2, "do_train": True, "do_eval": True, **SETTING}
    cos598d.train("rte", **flags)
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    expected = ["run", "step", "step", "evaluation", "checkpoint", "step", "step", "evaluation", "checkpoint", "end"]
    assert sorted(call for call, _ in told) == sorted(expected)
    assert (told[0], told[-1]) == (["run", {"task": "rte", "after": 0}], ["end", {"iteration": 4, "why": None}])
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "iterations.rank0.jsonl").open()]
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


def test_csv_goes_on_after_an_iteration_and_forgets_what_came_later(tmp_path):
    from cos598d.measure.loggers import CsvLogger

    for after, last, loss in ((0, 5, 0.5), (3, 6, 0.25)):
        logger = CsvLogger()
        logger.run(tmp_path, {}, after)
        for iteration in range(after + 1, last + 1):
            logger.step({"iteration": iteration, "loss": loss})
        logger.end({"iteration": last, "why": None})
    rows = [(row["iteration"], row["loss"]) for row in table(tmp_path / "steps.csv")]
    assert rows == [("1", "0.5"), ("2", "0.5"), ("3", "0.5"), ("4", "0.25"), ("5", "0.25"), ("6", "0.25")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class T: pass\n", ["is not a logger", "run, step, evaluation, checkpoint, end"]),
        ("class T:\n    def step(self): pass\n", ["step()", "step(self, row"]),
        ("class T:\n    def __init__(self, x): pass\n    def step(self, row): pass\n", ["take no arguments"]),
    ],
)
def test_a_wrong_logger_is_refused_in_a_sentence(text, words, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError) as error:
        load_logger(f"{tmp_path}/mine.py:T")()
    assert [word for word in words if word not in str(error.value)] == []


def test_a_csv_file_that_was_damaged_keeps_its_whole_rows(tmp_path):
    from cos598d.measure.loggers import CsvLogger

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
def test_an_error_in_a_logger_is_a_sentence_with_its_line_and_the_run_is_kept(tmp_path, call, capfd, monkeypatch):
    monkeypatch.delenv("GLUE_DIR", raising=False)
    (tmp_path / "mine.py").write_text(f"class Bad:\n    def {call}(self, row):\n        row['no such key']\n")
    flags = {"output_dir": tmp_path / "run", "logger": f"{tmp_path}/mine.py:Bad", "max_steps": 2, **SETTING}
    with pytest.raises(cos598d.errors.UserError) as error:
        cos598d.train("rte", do_train=True, save_model=False, **flags)
    said = f"{error.value}\n{capfd.readouterr().err}"
    assert f"{call}() raises KeyError at line 3" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "summary.json").exists() == (call == "end")
