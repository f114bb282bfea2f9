"""Texts of your own from CSV, TSV and JSON lines, and what a run's model predicts without labels."""

import csv
import io
import json

import pytest

import cos598d
from cos598d.commands.cli import main
from cos598d.data import get_task
from cos598d.data.tasks import TaskOptions
from cos598d.errors import UserError

COLUMNS = TaskOptions(text_columns="review", label_column="stars")
SETTING = {"model": "tiny", "max_seq_length": 32, "total_train_batch_size": 16, "world_size": 2, "quiet": True}


@pytest.fixture(autouse=True)
def bundled(monkeypatch):
    """Runs train on the bundled samples, whatever data this machine has."""
    for name in ("GLUE_DIR", "SQUAD_DIR"):
        monkeypatch.delenv(name, raising=False)


def rows(count, seed=0):
    words = {"good": ["great", "fine", "lovely"], "bad": ["awful", "poor", "sad"]}
    return [
        {"stars": label, "review": f'{words[label][(i + seed) % 3]}, as "they" said {i}'}
        for i, label in enumerate(["good", "bad", "good"] * (count // 3))
    ]


def as_csv(found, delimiter=","):
    text = io.StringIO()
    quoting = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    writer = csv.DictWriter(
        text, ["stars", "review"], delimiter=delimiter, quoting=quoting, quotechar=None if quoting else '"'
    )
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def as_lines(found):
    return "".join(f"{json.dumps(row)}\n" for row in found)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A folder of reviews, and a run that was trained on it by two ranks."""
    folder = tmp_path_factory.mktemp("reviews")
    (folder / "train.csv").write_text(as_csv(rows(60)))
    (folder / "dev.csv").write_text(as_csv(rows(27, seed=1)))
    columns = {"text_columns": "review", "label_column": "stars"}
    run = cos598d.train(
        "text", data_dir=folder, max_steps=8, learning_rate=1e-3, output_dir=folder / "run", **columns, **SETTING
    )
    return folder, run


def predicted(capsys, *words):
    assert main(["predict", *map(str, words)]) == 0
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.long
def test_a_models_predictions_have_the_accuracy_that_its_run_found(reviews, capsys):
    folder, run = reviews
    assert run.summary["classes"] == ["bad", "good"]
    head, *found = predicted(capsys, run.folder, "--file", folder / "dev.csv", "--batch", 5)
    assert head == ["index", "prediction", "probability"]
    labels = [row["stars"] for row in rows(27, seed=1)]
    right = [row[1] == label for row, label in zip(found, labels, strict=True)]
    assert sum(right) / len(right) == pytest.approx(run.summary["epochs"][-1]["acc"])
    assert [row[0] for row in found] == [str(place) for place in range(27)]
    (folder / "new.jsonl").write_text(as_lines({"review": row["review"]} for row in rows(27, seed=1)))
    assert predicted(capsys, run.folder, "--file", folder / "new.jsonl")[1:] == found
    assert predicted(capsys, run.folder, "--text", rows(27, seed=1)[4]["review"])[1][1:] == found[4][1:]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl"])
def test_one_file_of_any_form_is_divided_alike_by_class(suffix, tmp_path):
    from cos598d.models.build import find_model

    text = as_lines(rows(60)) if suffix == "jsonl" else as_csv(rows(60), "," if suffix == "csv" else "\t")
    (tmp_path / f"all.{suffix}").write_text(text)
    task = get_task("text", COLUMNS)
    location, words = task.locate(str(tmp_path))
    assert words == str(tmp_path)
    assert task.classes == ("bad", "good")
    encoder = find_model("tiny").load_encoder()
    train, dev = (task.load(part, location, encoder, 32) for part in ("train", "dev"))
    assert (len(train), len(dev)) == (48, 12)
    assert sorted([*train.labels, *dev.labels]) == [0] * 20 + [1] * 40
    other = get_task("text", COLUMNS)
    (tmp_path / "as").mkdir()
    (tmp_path / "as" / "all.csv").write_text(as_csv(rows(60)))
    assert other.load("dev", other.locate(str(tmp_path / "as"))[0], encoder, 32).digest() == dev.digest()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train.csv": "a,b\n1,2\n"}, ["train.csv, line 2", "review", "a, b", "--text_columns"]),
        ({"train.csv": as_csv(rows(6)).replace("stars", "x")}, ["stars", "--label_column"]),
        ({"train.csv": as_csv(rows(6)), "dev.csv": "stars,review\nugly,x\n"}, ["dev.csv, line 2", "'ugly'"]),
        ({"train.csv": "stars,review\ngood,a,b\n"}, ["train.csv, line 2", "3 columns", "quote"]),
        ({"train.csv": "stars,review\n,a\n"}, ["line 2", "no label"]),
        ({"train.csv": 'stars,review\ngood,"a\n'}, ["train.csv", "line"]),
        ({"train.jsonl": '{"stars": "good", "review"\n'}, ["line 1", "not JSON"]),
        ({"train.jsonl": "[1]\n"}, ["line 1", "not an object"]),
        ({"train.jsonl": '{"stars": "good", "review": null}\n'}, ["line 1", "None"]),
        ({"train.csv": "stars,review\n"}, ["has no rows"]),
        ({"train.csv": ""}, ["has no rows"]),
        ({"train.csv": b"stars,review\ngood,\xff\n"}, ["UTF-8", "0xff"]),
        ({"train.csv": "stars,review\ngood,a\ngood,b\n"}, ["1 different labels"]),
        ({"a.csv": "x\n", "b.csv": "x\n"}, ["a.csv, b.csv"]),
        ({}, ["no such file"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_sentence_with_its_place(files, words, tmp_path):
    from cos598d.models.build import find_model

    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    task = get_task("text", COLUMNS)
    encoder = find_model("tiny").load_encoder()
    with pytest.raises(UserError) as error:
        task.load("dev", task.locate(str(tmp_path))[0], encoder, 32)
    assert [word for word in words if word not in str(error.value)] == []
    assert str(error.value).endswith(".")


@pytest.mark.long
def test_glues_test_files_give_the_benchmarks_form(tmp_path, capsys):
    from cos598d.data.samples import rte_sample

    run = cos598d.train("rte", max_steps=2, output_dir=tmp_path / "run", **SETTING)
    sample = list(rte_sample("dev"))
    lines = ["index\tsentence1\tsentence2", *(f"{100 + i}\t{a}\t{b}" for i, (a, b, _) in enumerate(sample))]
    (tmp_path / "test.tsv").write_text("\n".join(lines) + "\n")
    head, *found = predicted(capsys, run.folder, "--file", tmp_path / "test.tsv")
    assert head == ["index", "prediction"]
    assert [row[0] for row in found] == [str(100 + i) for i in range(len(sample))]
    right = [row[1] == label for row, (_, _, label) in zip(found, sample, strict=True)]
    assert sum(right) / len(right) == pytest.approx(run.summary["epochs"][-1]["acc"])
    assert main(["predict", str(run.folder), "--text", "one"]) == 2
    assert "Give 2" in capsys.readouterr().err
    (tmp_path / "cut.tsv").write_text("index\tsentence1\tsentence2\n1\tonly one\n")
    assert main(["predict", str(run.folder), "--file", str(tmp_path / "cut.tsv")]) == 1
    assert "cut.tsv, line 2" in capsys.readouterr().err


@pytest.mark.long
def test_squads_files_and_single_questions_are_answered_as_in_evaluation(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = cos598d.train("squad", max_steps=2, output_dir=tmp_path / "run", **SETTING | {"max_seq_length": 96})
    assert main(["sample", "files", "--task", "squad"]) == 0
    capsys.readouterr()
    data = next((tmp_path / "files").glob("dev*.json"))
    assert main(["predict", str(run.folder), "--file", str(data), "-o", "answers.json"]) == 0
    kept = json.loads((run.folder / "predictions.json").read_text())
    assert json.loads((tmp_path / "answers.json").read_text()) == kept
    paragraph = json.loads(data.read_text())["data"][0]["paragraphs"][0]
    asked = paragraph["qas"][0]
    words = ["--question", asked["question"], "--context", paragraph["context"]]
    assert predicted(capsys, run.folder, *words) == [[kept[asked["id"]]]]


@pytest.mark.long
def test_images_are_told_apart_and_what_is_none_is_refused(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image", reason="needs the images extra")
    run = cos598d.train("digits", max_steps=2, world_size=2, quiet=True, output_dir=tmp_path / "run")
    image.new("L", (8, 8), 200).save(tmp_path / "a.png")
    head, first, second = predicted(capsys, run.folder, "--image", tmp_path / "a.png", tmp_path / "a.png")
    assert head == ["file", "prediction", "probability"]
    assert first == second
    assert first[1] in run.summary["classes"]
    assert main(["predict", str(run.folder), "--image", str(run.folder / "summary.json")]) == 1
    assert main(["predict", str(run.folder), "--text", "a"]) == 2
    assert main(["predict", str(tmp_path), "--text", "a"]) == 1
