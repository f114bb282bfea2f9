"""A task of your own from a file: you train it, resume it and predict with it, and each mistake in it gets an error."""

import json
import shutil

import pytest
from data_files import task_at
from programs import Program
from recording import summary_of

import cos598d
from cos598d.commands.cli import main
from cos598d.errors import UserError

SETTING = {"model": "tiny", "max_seq_length": 32, "total_train_batch_size": 16, "world_size": 2, "quiet": True}
TASK = """
import json, pathlib

class Reviews:
    classes = ("bad", "good")

    def examples(self, part, data_dir):
        for line in (pathlib.Path(data_dir) / f"{part}.jsonl").open():
            row = json.loads(line)
            yield row["text"], row.get("label")
"""
SCORE = """
class Stars(Reviews):
    classes = None
    metrics = ("error",)

    def examples(self, part, data_dir):
        for number in range(24):
            yield f"stars {number % 5}", "a pair", number % 5

    def score(self, predictions, labels):
        return {"error": -abs(predictions - labels).mean()}
"""


def reviews(count):
    words = [("great", "good"), ("awful", "bad"), ("fine", "good")]
    return [{"text": f"{words[i % 3][0]} {i}", "label": words[i % 3][1]} for i in range(count)]


def write(folder, part, found):
    (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a task, its data, and a run of two ranks that has predicted its test part."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_task.py").write_text(TASK + SCORE)
    write(folder, "train", reviews(60))
    write(folder, "dev", reviews(27))
    write(folder, "test", [{"text": row["text"]} for row in reviews(27)])
    cos598d.train(f"{folder}/my_task.py:Reviews", output_dir=folder / "run", data_dir=folder, do_train=True,
                  do_eval=True, do_predict=True, max_steps=4, save_steps=2, learning_rate=1e-3, **SETTING)  # fmt: skip
    return folder


def words_of(place, *more):
    return ["predict", str(place / "run"), "--file", str(place), "--task_name", f"{place}/my_task.py:Reviews", *more]


@pytest.mark.long
def test_any_number_of_ranks_predicts_each_example_once_in_order(place, tmp_path, capsys):
    summary = summary_of(place / "run")
    assert (summary["task"], summary["classes"]) == ("Reviews", ["bad", "good"])
    assert main(words_of(place)) == 0
    said = capsys.readouterr().out
    assert said == (place / "run" / "predictions.tsv").read_text()
    head, *expected = [line.split("\t") for line in said.splitlines()]
    assert head == ["index", "prediction", "probability"]
    right = [row[1] == one["label"] for row, one in zip(expected, reviews(27), strict=True)]
    assert sum(right) / len(right) == pytest.approx(summary["epochs"][-1]["acc"])
    words = words_of(place, "--world_size", "3", "--batch", "2", "-o", str(tmp_path / "found.tsv"))
    program = Program(tmp_path, "predict", ["-m", "cos598d", *words])
    assert program.wait() == 0, program.text
    rows = [line.split("\t") for line in (tmp_path / "found.tsv").read_text().splitlines()[1:]]
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    assert [float(row[2]) for row in rows] == pytest.approx([float(row[2]) for row in expected], abs=2e-4)


@pytest.mark.long
def test_run_resumes_only_with_the_same_data(place, tmp_path):
    for name in ("again", "other"):  # as after two of four steps
        shutil.copytree(place / "run", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000004")
        (tmp_path / name / "summary.json").unlink()
    known = {"output_dir": tmp_path / "again", "resume": "auto", "max_steps": 4, "learning_rate": 1e-3}
    cos598d.train(f"{place}/my_task.py:Reviews", data_dir=place, **known, **SETTING)
    assert summary_of(tmp_path / "again")["epochs"][-1]["loss"] == summary_of(place / "run")["epochs"][-1]["loss"]
    for part in ("train", "dev"):
        write(tmp_path, part, reviews(60)[::-1])
    with pytest.raises(UserError, match="training data was"):
        cos598d.train(f"{place}/my_task.py:Reviews", data_dir=tmp_path, **known | {"output_dir": tmp_path / "other"},
                      **SETTING)  # fmt: skip


def test_class_scores_pairs_with_numbers(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK + SCORE)
    words = ["train", "--task_name", f"{tmp_path}/my_task.py:Stars", "--output_dir", str(tmp_path / "run")]
    assert main([*words, "--model_name_or_path", "tiny", "--max_steps", "2", "--no_save_model"]) == 0
    assert summary_of(tmp_path / "run")["epochs"][-1]["error"] < 0


@pytest.mark.long
def test_run_folder_loads_no_code_by_itself(place, capsys):
    words = words_of(place)
    assert main([*words[: words.index("--task_name")]]) == 2
    assert f"Add --task_name {place}/my_task.py:Reviews" in capsys.readouterr().err
    config = place / "run" / "config.json"
    assert main(["train", "--config", str(config), "--dry_run"]) == 2
    assert f"Add --task_name {place}/my_task.py:Reviews" in capsys.readouterr().err
    assert main(words_of(place)[:-1] + [f"{place}/my_task.py:Stars"]) == 1
    assert "trained on the classes bad, good" in capsys.readouterr().err


def use(named):
    """Do what a run does with a task: check it, load it and score it."""
    from cos598d.models.build import find_model

    task = task_at(None, named)
    features = task.load("dev", find_model("tiny").encoder, 16)
    task.score("dev", features.labels[:, None] == [[0, 1]], features)


BODY = "class T:\n    classes = ('a', 'b')\n    def examples(self, part, data_dir):\n        "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no such file", "FILE.py:CLASS"]),
        ("class Other:\n    def examples(self): pass\n", ["no class T", "Give ", ":Other"]),
        ("import nothing_here\n", ["ModuleNotFoundError", "line 1"]),
        ("class T: classes = ('a', 'b')\n", ["lacks examples"]),
        ("class T:\n    def __init__(self, x): pass\n    def examples(self): pass\n", ["cannot be made", "TypeError"]),
        (BODY.replace("'b'", "3") + "pass", ["('a', 3)"]),
        (BODY + "pass\n    def score(self, p, l): pass", ["metrics, a tuple"]),
        (BODY + "return []", ["no example"]),
        (BODY + "yield 'text'", ["example 0", "(text, label)"]),
        (BODY + "yield 3, 'a'", ["example 0", "texts are str"]),
        (BODY + "yield 'text', 'c'", ["example 0", "'c'", "a, b"]),
        (BODY + "yield 'text', 'a'\n        1 / 0", ["ZeroDivisionError", "line 5"]),
        (BODY + "yield 'text', 'a'\n    metrics = ('f1',)\n    def score(self, p, l): return {}", ["returned {}"]),
        (BODY + "yield 'text', 'a'\n    metrics = ('f1',)\n    def score(self, p, l): return p.no", ["line 6"]),
    ],
)  # fmt: skip
def test_mistake_in_a_task_file_is_named_with_its_line(text, words, tmp_path):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError) as error:
        use(f"{tmp_path}/mine.py:T")
    assert [word for word in words if word not in str(error.value)] == []
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


def test_prediction_without_a_test_set_is_refused_before_training(tmp_path, monkeypatch, capsys):
    words = ["--do_train", "--do_predict", "--model_name_or_path", "tiny", "--output_dir", str(tmp_path / "run")]
    assert main(["train", *words]) == 2
    assert "has no test set" in capsys.readouterr().err
    assert main(["train", *words, "--sync", "none", "--world_size", "2"]) == 2
    assert "drift" in capsys.readouterr().err
