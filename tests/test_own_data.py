"""Texts from CSV, TSV and JSON lines, yours and AG News's, and what a run's model predicts without labels."""

import csv
import io
import json

import numpy as np
import pytest
from data_files import refusal

import cos598d
from cos598d.commands.cli import main
from cos598d.data import get_task
from cos598d.data.ag_news import read_items
from cos598d.data.samples import rte_sample, vocabulary
from cos598d.data.tasks import TaskOptions
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError
from cos598d.tools.report.load import load_run

COLUMNS = {"text_columns": "review", "label_column": "stars"}
SETTING = {"model": "tiny", "max_seq_length": 32, "total_train_batch_size": 16, "world_size": 2, "quiet": True}


@pytest.fixture(autouse=True)
def bundled(monkeypatch):
    """Runs train on the bundled samples, not on data of this machine."""
    for name in ("GLUE_DIR", "SQUAD_DIR"):
        monkeypatch.delenv(name, raising=False)


def rows(count, seed=0):
    words = {"good": ["great", "fine", "lovely"], "bad": ["awful", "poor", "sad"]}
    return [
        {"stars": label, "review": f'{words[label][(i + seed) % 3]}, as "they" said {i}'}
        for i, label in enumerate(["good", "bad", "good"] * (count // 3))
    ]


def as_csv(found):
    text = io.StringIO()
    csv.writer(text).writerows([("stars", "review"), *(row.values() for row in found)])
    return text.getvalue()


def as_tsv(found):
    return "".join("\t".join(line) + "\n" for line in [("stars", "review"), *(row.values() for row in found)])


def as_lines(found):
    return "".join(f"{json.dumps(row)}\n" for row in found)


def loaded(task, folder, part, **options):
    location, _ = task.locate(str(folder))
    task.check(location)
    return task.load(part, location, load_encoder("bert", vocabulary(), True), 48, **options)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A folder of reviews, and a run that was trained on it by two ranks."""
    folder = tmp_path_factory.mktemp("reviews")
    (folder / "train.csv").write_text(as_csv(rows(60)))
    (folder / "dev.csv").write_text(as_csv(rows(27, seed=1)))
    run = cos598d.train(
        "text", data_dir=folder, max_steps=8, learning_rate=1e-3, output_dir=folder / "run", **COLUMNS, **SETTING
    )
    return folder, run


def predicted(capsys, *words):
    assert main(["predict", *map(str, words)]) == 0
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.long
def test_predictions_have_the_accuracy_of_the_run(reviews, capsys):
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


def test_one_file_of_any_form_is_divided_the_same_way_by_class(tmp_path):
    digests = set()
    for form, write in (("csv", as_csv), ("tsv", as_tsv), ("jsonl", as_lines)):
        (tmp_path / form).mkdir()
        (tmp_path / form / f"all.{form}").write_text(write(rows(60)))
        task = get_task("text", TaskOptions(**COLUMNS))
        train, dev = (loaded(task, tmp_path / form, part) for part in ("train", "dev"))
        assert task.locate(str(tmp_path / form))[1] == str(tmp_path / form)
        assert task.classes == ("bad", "good")
        assert (len(train), len(dev)) == (48, 12)
        assert sorted([*train.labels, *dev.labels]) == [0] * 20 + [1] * 40
        digests.add(dev.digest())
    assert len(digests) == 1


WRONG_TEXTS = [
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
]  # fmt: skip
WRONG_NEWS = [
    (b'"1","a","b"\n"5","a","b"\n', "line 2: unknown class '5', not 1, 2, 3 or 4"),
    (b'"1","a","b"\n"2","a"\n', "line 2: 2 columns, not class, title and description"),
    (b'"1","a","b\n', "line 1"),
    (b'"1","a","\xff"\n', "is not UTF-8 (byte 0xff)"),
    (b'"1","' + b"a" * 200_000 + b'","b"\n', "line 1: field larger than field limit"),
    (b"\n\n", "has no rows"),
    (b"", "test.csv is empty"),
    (b'"\x1b[2J","a","b"\n', "unknown class '\\x1b[2J'"),
]


@pytest.mark.parametrize(
    ("task", "files", "words"),
    [
        *(("text", *case) for case in WRONG_TEXTS),
        *(("ag_news", {"test.csv": content}, ["test.csv", words]) for content, words in WRONG_NEWS),
    ],
)
def test_an_error_names_the_place_in_the_file_that_is_wrong(task, files, words, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refusal(*words):
        loaded(get_task(task, TaskOptions(**COLUMNS)), tmp_path, "dev")


@pytest.mark.long
def test_predictions_for_a_glue_test_file_have_the_benchmark_s_form(tmp_path, capsys):
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
def test_squad_answers_equal_those_of_the_evaluation(tmp_path, capsys, monkeypatch):
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
def test_images_are_classified_and_other_files_are_refused(tmp_path, capsys):
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


# AG News


def write_news(file, rows: int, start: int = 0):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="") as lines:
        writer = csv.writer(lines, quoting=csv.QUOTE_ALL)
        for number in range(start, start + rows):
            writer.writerow([number % 4 + 1, f"title {number}", f'a "quoted" word, and\\a break {number}'])
    return file.parent


def test_ag_news_rows_are_class_title_and_description(tmp_path):
    write_news(tmp_path / "test.csv", 6)
    items = list(read_items(tmp_path / "test.csv"))
    assert [item.label for item in items] == [0, 1, 2, 3, 0, 1]
    assert items[5].title == "title 5"
    assert items[5].description == 'a "quoted" word, and a break 5'


def test_two_ag_news_files_are_two_parts_and_one_is_divided(tmp_path):
    task = get_task("ag_news")
    both = write_news(tmp_path / "both/train.csv", 40)
    write_news(tmp_path / "both/test.csv", 8, 100)
    assert [len(loaded(task, both, part)) for part in ("train", "dev")] == [40, 8]
    one = write_news(tmp_path / "one/test.csv", 40)
    train, dev = (loaded(task, one, part) for part in ("train", "dev"))
    assert [np.bincount(part.labels).tolist() for part in (train, dev)] == [[8] * 4, [2] * 4]
    rows = [
        part.tokens[start:end].tobytes() for part in (train, dev) for start, end in zip(part.offsets, part.offsets[1:])
    ]
    assert len(set(rows)) == 40
    assert len(loaded(task, one, "train", limit=10)) == 10
    assert set(dev.collate([0])["token_type_ids"][0].tolist()) == {0, 1}, "title and description are a pair"


def test_a_folder_without_ag_news_is_refused(tmp_path):
    for place, words in ((str(tmp_path), "has no test.csv"), (None, "No AG News")):
        with pytest.raises(UserError, match=words):
            get_task("ag_news").locate(place, {})
    write_news(tmp_path / "test.csv", 4)
    assert get_task("ag_news").locate(None, {"AG_NEWS_DIR": str(tmp_path)})[1] == "AG_NEWS_DIR"


def train(run_here, tmp_path, *words):
    folder = write_news(tmp_path / "news/test.csv", 80)
    common = ["--task_name", "ag_news", "--data_dir", folder, "--max_seq_length", 32, "--output_dir", tmp_path / "out"]
    return run_here("task2b/run_glue.py", [*common, *words])


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_ag_news_is_trained_and_evaluated_from_one_file(run_here, tmp_path, model_type):
    words = ["--model_type", model_type, "--model_name_or_path", "tiny", "--max_steps", 1]
    code, text = train(run_here, tmp_path, *words)
    assert code == 0, text
    (epoch,) = load_run(tmp_path / "out")["epochs"]
    assert {"acc", "precision_macro", "recall_macro", "f1_macro"} <= epoch.keys()
    assert [row["class"] for row in epoch["by_class"]] == ["World", "Sports", "Business", "Sci/Tech"]
    assert sum(row["examples"] for row in epoch["by_class"]) == 16


def test_distilbert_without_a_name_is_the_published_model(run_here, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "hub").mkdir()
    code, text = train(run_here, tmp_path, "--model_type", "distilbert", "--cache_dir", tmp_path / "hub")
    assert code == 1
    assert text.count("\n") == 1
    assert "distilbert-base-uncased is not a folder here" in text
    assert "tiny" in text
