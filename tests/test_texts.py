"""GLUE's tables, your own texts, and what becomes of them: ids equal to pytorch-transformers' tokenizer. Imports: one
call of a task's methods in the place of a run of seconds."""

import json

import numpy as np
import pytest
from data_files import FILES, task_at, write_task
from pytorch_transformers import BertTokenizer

from cos598d.data import TASK_NAMES, TaskFlags, get_task
from cos598d.data.encoders import TextEncoder, word_pieces
from cos598d.data.examples import split, spread
from cos598d.data.samples import vocabulary
from cos598d.errors import UsageError, UserError

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = {"one": 4, "two": 5, "a": 6, "b": 7}


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder(word_pieces([*SPECIALS, *WORDS], lower_case=True))


@pytest.mark.parametrize("name", FILES)
def test_all_files_of_glue_become_ids_and_labels(name, encoder, tmp_path, monkeypatch):
    folder = write_task(tmp_path / get_task(name).table.folder, name)
    for place in (str(folder), str(tmp_path), None):
        if place is None:
            monkeypatch.setenv("GLUE_DIR", str(tmp_path))
        task = task_at(place, name.upper())
        for part in task.parts:
            examples = task.load(part, encoder, 16)
            assert len(examples) == sum("~ID" not in row and "index" not in row for row in FILES[name][part]) - (
                name in ("sst-2", "qqp")
            )
    first = task.load("train", encoder, 16).collate([0, 1])
    pair = [2, 4, 3, 5, 3] if task.texts == 2 else [2, 4, 5, 3]
    assert first["input_ids"][0].tolist()[: len(pair)] == pair
    if task.texts == 2:
        assert first["token_type_ids"][0].tolist()[:5] == [0, 0, 0, 1, 1]
    wanted = {"cola": [1, 0], "sst-2": [0, 1], "mrpc": [1, 0], "sts-b": [2.5, 5.0], "qqp": [1, 0], "mnli": [2, 0]}
    wanted |= {"qnli": [1, 0], "rte": [1, 0], "wnli": [1, 0]}
    assert first["labels"].tolist() == wanted[name]
    assert first["labels"].is_floating_point() == (name == "sts-b")


TEXTS = [
    ("A man is playing a guitar.", "He's at the state-of-the-art studio, isn't he?"),
    ("Na\u00efve caf\u00e9s in Z\u00fcrich", None),
    ("\u4e2d\u6587 and\u200b zero width \u00df \ufb01 \U0001f642", "\u0130stanbul   tabs\tand\nlines"),
    ("[SEP] inside a text", "[MASK] too"),
    ("word" * 60, "!" * 40),
]


def test_ids_are_those_of_the_librarys_tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary()), encoding="utf-8")
    theirs = BertTokenizer.from_pretrained(str(tmp_path), do_lower_case=True)
    ours = TextEncoder(word_pieces(vocabulary(), lower_case=True))
    rows = [(a, b) for a, b, _ in task_at(None, "rte").rows("train")][::40] + TEXTS
    for (first, second), found in zip(rows, ours.encode(rows, 10_000), strict=True):
        sides = [theirs.convert_tokens_to_ids(theirs.tokenize(text)) for text in (first, second) if text]
        wanted = [theirs.vocab["[CLS]"], *(one for side in sides for one in (*side, theirs.vocab["[SEP]"]))]
        assert found.ids == wanted, first
        assert found.type_ids == [0] * (len(sides[0]) + 2) + [1] * (len(wanted) - len(sides[0]) - 2)


def test_long_texts_are_cut_at_the_end_of_the_longer_one(encoder):
    for first, second in ((20, 3), (3, 20), (20, 20), (9, 8)):
        (found,) = encoder.encode([("a " * first, "b " * second)], 12)
        kept = [found.ids.count(WORDS[word]) for word in "ab"]
        assert sum(kept) == min(9, first + second) == 9
        short = min(first, second)
        assert min(kept) == min(short, 4), "the shorter text stays whole, or both are about equal"


def test_batches_are_padded_and_limits_spread_evenly(encoder, tmp_path):
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps({"text": "a " * (n + 1), "label": n % 2}) + "\n" for n in range(50)))
    task = task_at(file, "text")
    train, few = task.load("train", encoder, 30), task.load("train", encoder, 30, limit=4)
    batch = train.collate([0, 20])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, train.lengths[[0, 20]].max())
    assert batch["attention_mask"].sum(dim=1).tolist() == train.lengths[[0, 20]].tolist()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == encoder.pad_id).all()
    chosen = spread(len(train), 4)
    assert few.lengths.tolist() == train.lengths[chosen].tolist()
    assert few.digest() != train.digest() == task.load("train", encoder, 30).digest()
    assert train.counts(np.array([0, 1])) == {"tokens": int(train.lengths[:2].sum())}


def test_one_file_is_split_by_class_and_labels_are_in_order(encoder, tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("text,label\n" + '"a, b",10\nb,9\n"line\nbreak",ten\n' * 10)
    task = task_at(file, "text")
    assert task.classes == ("9", "10", "ten")
    parts = {part: task.load(part, encoder, 16) for part in task.parts}
    assert [np.bincount(parts[part].labels).tolist() for part in ("train", "dev")] == [[8, 8, 8], [2, 2, 2]]
    assert sorted([*split(["x"] * 10, "train"), *split(["x"] * 10, "dev")]) == list(range(10))


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_folders_of_your_own_texts(ending, encoder, tmp_path):
    rows = [("a one", "b two", "yes"), ("two", "a", "no")]
    for name in ("training", "val", "test"):
        if ending == "jsonl":
            lines = [json.dumps({"premise": a, "hypothesis": b, "answer": c}) for a, b, c in rows]
        else:
            mark = "," if ending == "csv" else "\t"
            lines = [mark.join(row) for row in [("premise", "hypothesis", "answer"), *rows]]
        (tmp_path / f"{name}.{ending}").write_text("\ufeff" * (ending == "csv") + "\n".join(lines) + "\n", "utf-8")
    task = task_at(tmp_path, "text", text_columns="premise, hypothesis", label_column="answer")
    assert task.classes == ("no", "yes")
    assert task.load("dev", encoder, 16).labels.tolist() == [1, 0]
    assert {ending: len(one) for ending, one in task.unlabelled(encoder, 16).items()} == {"": 2}


HEAD = "index\tsentence1\tsentence2\tlabel\n"
# A file, its content, and what is said of it.
BAD = [
    ("train.tsv", HEAD + "0\ta\tb\n", "line 2: no column label"),
    ("train.tsv", "a\tb\n1\t2\n", "no column sentence1, only a, b"),
    ("train.tsv", HEAD + "0\ta\tb\tentailment\n1\ta\tb\tmaybe\x1b\n", r"line 3: unknown label 'maybe\\x1b'"),
    ("train.tsv", HEAD + "0\ta\udcff\tb\tentailment\n", "line 2: byte 0xff is not UTF-8"),
    ("train.tsv", "", "has no rows"),
    ("quote.csv", 'text,label\nb,c\n"open,1\n', r"line \d: unexpected end of data"),
    ("more.csv", "text,label\na,b\nc,d,e\n", "line 3: 3 columns, not 2"),
    ("json.jsonl", '{"text": "a", "label": 1}\n{"text"\n', "line 2"),
    ("list.jsonl", '{"text": "a", "label": 1}\n[1]\n', "line 2"),
    ("label.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', "line 2: no column label"),
    ("classes.csv", "text,label\na,b\nc,b\n", "1 different labels"),
    ("nothing.txt", "a", "has no train.tsv"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD)
def test_faults_in_tables_and_in_your_own_texts_name_file_and_line(name, content, words, encoder, tmp_path):
    (tmp_path / name).write_text(content, "utf-8", "surrogateescape")
    task, place = ("rte", tmp_path) if name == "train.tsv" else ("text", tmp_path / name)
    with pytest.raises(UserError, match=words) as caught:  # one of your own is read to find its classes
        task_at(place, task).load("train", encoder, 16)
    assert str(tmp_path / name) in str(caught.value)
    assert str(caught.value).isprintable()


def test_scores_must_be_numbers_and_broken_lines_of_qqp_are_skipped(encoder, tmp_path):
    write_task(tmp_path, "sts-b")
    file = tmp_path / "train.tsv"
    file.write_text(file.read_text().replace("2.500", "nan"))
    with pytest.raises(UserError, match="line 2: the score 'nan' is not a number"):
        task_at(tmp_path, "sts-b").load("train", encoder, 16)
    write_task(tmp_path, "qqp")
    file.write_text(file.read_text() + "7\t8\t9\tbroken\n8\t1\t2\ta\tb\t1\n")
    assert task_at(tmp_path, "qqp").load("train", encoder, 16).labels.tolist() == [1, 0, 1]


def test_mnlis_second_part_and_its_test_sets_have_their_own_names(encoder, tmp_path):
    write_task(tmp_path, "mnli")
    for part in ("test_matched", "test_mismatched"):
        (tmp_path / f"{part}.tsv").write_text("index\tsentence1\tsentence2\n0\tone\ttwo\n")
    task = task_at(tmp_path, "mnli")
    examples = task.load("dev_mismatched", encoder, 16)
    outputs = np.eye(3)[[2, 1]]
    assert task.score("dev_mismatched", outputs, examples).metrics == {"acc_mismatched": 1.0}
    assert task.score("dev_matched", outputs[1:], task.load("dev_matched", encoder, 16)).metrics == {"acc": 1.0}
    assert set(task.unlabelled(encoder, 16)) == {"", "_mismatched"}


def test_data_that_are_not_there_are_one_sentence(tmp_path):
    for name, place, words in (
        ("cola", None, "download_glue_data.py --data_dir D --tasks CoLA"),
        ("rte", str(tmp_path), "has no train.tsv or .csv or .jsonl of rte"),
        ("rte", str(tmp_path / "no"), "does not exist"),
        ("text", None, "No data of text"),
    ):
        with pytest.raises(UserError, match=words):
            get_task(name).find(place)
    with pytest.raises(UsageError, match="Did you mean 'rte'"):
        get_task("rtee")
    with pytest.raises(UsageError, match="one or two names"):
        get_task("text", TaskFlags(text_columns="a,b,c"))
    assert len(TASK_NAMES) == len(set(TASK_NAMES)) == 15
