"""`cos598d predict` with the models of short runs: your own texts, questions, images."""

import json

import pytest

import cos598d
from cos598d.commands.cli import main

SHORT = {"max_steps": 1, "threads": 1, "max_train_examples": 16}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(start, here):
    """Train as a program with these flags, in a folder."""

    def _train(task, folder, *words):
        words = ["--task_name", task, "--output_dir", folder, *words, *(f"--{name}={SHORT[name]}" for name in SHORT)]
        program = start(folder, ["-m", "cos598d", "train", "--do_train", *words])
        assert program.wait() == 0, program.text

    return _train


def said(capsys, *words):
    capsys.readouterr()
    assert main(["predict", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_your_own_texts(here, capsys):
    (here / "own.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 8)
    (here / "new.csv").write_text("text\na fine day\nno\n")
    named = {"data_dir": here / "own.csv", "model_name_or_path": "tiny", "output_dir": here / "run", "quiet": True}
    cos598d.train("text", do_train=True, **named, **SHORT)
    rows = said(capsys, "run", "--file", "new.csv").splitlines()
    assert rows[0] == "index\tprediction\tprobability"
    assert [row.split("\t")[0] for row in rows[1:]] == ["0", "1"]
    assert {row.split("\t")[1] for row in rows[1:]} <= {"yes", "no"}
    assert said(capsys, "run", "--text", "a fine day").splitlines()[1] == rows[1]
    assert main(["predict", "run", "--text", "a", "b"]) == 2
    assert "an example of text is a single text" in capsys.readouterr().err


def test_glue_s_test_set_is_what_its_benchmark_takes(here, train, capsys):
    head = "index\tsentence1\tsentence2"
    rows = "".join(f"{number}\tone\ttwo\tentailment\n" for number in range(4))
    for part in ("train", "dev"):
        (here / f"{part}.tsv").write_text(f"{head}\tlabel\n{rows}")
    (here / "test.tsv").write_text(f"{head}\n0\tone\ttwo\n1\ttwo\tone\n")
    train("rte", "run", "--data_dir", ".", "--model_name_or_path", "tiny", "--do_predict")
    table = (here / "run" / "predictions.tsv").read_text()
    assert table.splitlines()[0] == "index\tprediction"
    assert said(capsys, "run", "--file", "test.tsv") == table


def test_questions_and_images(here, train, capsys):
    image = pytest.importorskip("PIL.Image")
    train("squad", "squad", "--model_name_or_path", "tiny", "--max_seq_length", "100")
    context = "Ada wrote it in 1843."
    assert said(capsys, "squad", "--question", "Who wrote it?", "--context", context).strip() in context
    asked = {"id": "7", "question": "Who?", "answers": []}
    (here / "q.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]}))
    assert json.loads(said(capsys, "squad", "--file", "q.json"))["7"] in context
    train("digits", "digits")
    image.new("L", (20, 30), 7).save(here / "a.png")
    assert said(capsys, "digits", "--image", "a.png").splitlines()[1].startswith("a.png\t")
