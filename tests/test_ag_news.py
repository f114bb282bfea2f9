"""AG News is read from its CSV files, as one part or two, and what is wrong in them is named by file and line."""

import csv

import numpy as np
import pytest

from cos598d.data import get_task
from cos598d.data.ag_news import read_items
from cos598d.data.samples import vocabulary
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError
from cos598d.tools.report.load import load_run


def without_bytes(value):
    """A file's content is no name for a test."""
    return "content" if isinstance(value, bytes) else None


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))


def write_news(file, rows: int, start: int = 0):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="") as lines:
        writer = csv.writer(lines, quoting=csv.QUOTE_ALL)
        for number in range(start, start + rows):
            writer.writerow([number % 4 + 1, f"title {number}", f'a "quoted" word, and\\a break {number}'])
    return file.parent


def loaded(folder, part, **options):
    task = get_task("ag_news")
    location, _ = task.locate(str(folder))
    task.check(location)
    return task.load(part, location, load_encoder("bert", vocabulary(), True), 48, **options)


def test_rows_are_class_title_and_description(tmp_path):
    write_news(tmp_path / "test.csv", 6)
    items = list(read_items(tmp_path / "test.csv"))
    assert [item.label for item in items] == [0, 1, 2, 3, 0, 1]
    assert items[5].title == "title 5"
    assert items[5].description == 'a "quoted" word, and a break 5'


def test_two_files_are_two_parts_and_one_is_divided(tmp_path):
    both = write_news(tmp_path / "both/train.csv", 40)
    write_news(tmp_path / "both/test.csv", 8, 100)
    assert [len(loaded(both, part)) for part in ("train", "dev")] == [40, 8]
    one = write_news(tmp_path / "one/test.csv", 40)
    train, dev = (loaded(one, part) for part in ("train", "dev"))
    assert [np.bincount(part.labels).tolist() for part in (train, dev)] == [[8] * 4, [2] * 4]
    rows = [
        part.tokens[start:end].tobytes() for part in (train, dev) for start, end in zip(part.offsets, part.offsets[1:])
    ]
    assert len(set(rows)) == 40
    assert len(loaded(one, "train", limit=10)) == 10


def test_title_and_description_are_a_pair(tmp_path):
    features = loaded(write_news(tmp_path / "test.csv", 20), "dev")
    batch = features.collate([0])
    assert set(batch["token_type_ids"][0].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'"1","a","b"\n"5","a","b"\n', "line 2: unknown class '5', not 1, 2, 3 or 4"),
        (b'"1","a","b"\n"2","a"\n', "line 2: 2 columns, not class, title and description"),
        (b'"1","a","b\n', "line 1"),
        (b'"1","a","\xff"\n', "is not UTF-8 (byte 0xff)"),
        (b'"1","' + b"a" * 200_000 + b'","b"\n', "line 1: field larger than field limit"),
        (b"\n\n", "has no rows"),
        (b"", "test.csv is empty"),
        (b'"\x1b[2J","a","b"\n', "unknown class '\\x1b[2J'"),
    ],
    ids=without_bytes,
)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path, content, words):
    (tmp_path / "test.csv").write_bytes(content)
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, "train")
    assert words in str(caught.value), str(caught.value)
    assert "test.csv" in str(caught.value)


def test_a_folder_without_the_files_is_refused(tmp_path):
    for place, words in ((str(tmp_path), "has no test.csv"), (None, "No AG News")):
        with pytest.raises(UserError, match=words):
            get_task("ag_news").locate(place, {})
    assert (
        get_task("ag_news").locate(None, {"AG_NEWS_DIR": str(write_news(tmp_path / "test.csv", 4))})[1] == "AG_NEWS_DIR"
    )


def train(run_here, tmp_path, *words):
    folder = write_news(tmp_path / "news/test.csv", 80)
    common = ["--task_name", "ag_news", "--data_dir", folder, "--max_seq_length", 32, "--output_dir", tmp_path / "out"]
    return run_here("task2b/run_glue.py", [*common, *words])


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_it_is_trained_and_evaluated_from_one_file(run_here, tmp_path, model_type):
    words = ["--model_type", model_type, "--model_name_or_path", "tiny", "--max_steps", 1]
    code, text = train(run_here, tmp_path, *words)
    assert code == 0, text
    (epoch,) = load_run(tmp_path / "out")["epochs"]
    assert {"acc", "precision_macro", "recall_macro", "f1_macro"} <= epoch.keys()
    assert [row["class"] for row in epoch["by_class"]] == ["World", "Sports", "Business", "Sci/Tech"]
    assert sum(row["examples"] for row in epoch["by_class"]) == 16


def test_distilbert_alone_means_the_published_one_and_without_a_network_says_the_ways_out(run_here, tmp_path):
    (tmp_path / "hub").mkdir()
    words = ["--model_type", "distilbert", "--cache_dir", tmp_path / "hub"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        code, text = train(run_here, tmp_path, *words)
    assert code == 1
    assert text.count("\n") == 1
    assert "distilbert-base-uncased is not a folder here" in text
    assert "tiny" in text
