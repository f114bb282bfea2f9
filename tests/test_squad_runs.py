"""Runs of the SQuAD scripts: the same predictions on any ranks, and errors of one sentence."""

import json

import pytest
from programs import Program, free_port, script
from report_records import read as rows_of

from cos598d.commands.cli import main
from cos598d.records.unfinished import read_summary

TINY = ("--model_name_or_path", "tiny", "--max_seq_length", "96", "--doc_stride", "48", "--threads", "1")
SHORT = (*TINY, "--max_train_examples", "40", "--max_eval_examples", "30")
FILES = ("predictions.json", "null_odds.json")
TASK1 = "task1/run_squad.py"


def run_on(ranks, folder, name, words):
    """Run a script on that many ranks, in the four-shell form, with its output in `name`."""
    words = [*map(str, words), "--output_dir", name]
    words += ["--master_port", str(free_port()), "--world_size", str(ranks)] if ranks > 1 else []
    places = [["--local_rank", str(rank)] for rank in range(ranks)] if ranks > 1 else [[]]
    cache = {"COS598D_CACHE": str(folder / "cache")}
    programs = [Program(folder, f"{name}.{rank}", [*words, *place], cache) for rank, place in enumerate(places)]
    assert [program.wait() for program in programs] == [0] * ranks, programs[0].text


@pytest.mark.long
def test_predictions_are_the_same_on_any_number_of_ranks_and_have_the_record_s_scores(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_on(1, tmp_path, "trained", [script(TASK1), *SHORT, "--max_steps", "4"])
    model = tmp_path / "trained" / "model"
    assert main(["sample", "files", "--task", "squad"]) == 0
    found = []
    for ranks in (1, 3):
        folder = tmp_path / f"evaluated{ranks}"
        words = ["--do_eval", "--model_name_or_path", model, "--version_2_with_negative", *TINY[2:]]
        run_on(ranks, tmp_path, folder.name, [script("task2b/run_squad.py"), *words, "--data_dir", "files"])
        found.append([(folder / name).read_bytes() for name in FILES])
    assert found[0] == found[1]
    files = {"--data": "files/dev-v2.0.json", "--predictions": folder / FILES[0], "--null_odds": folder / FILES[1]}
    capsys.readouterr()
    assert main(["score", "--task", "squad", *(str(word) for pair in files.items() for word in pair)]) == 0
    scores = json.loads(capsys.readouterr().out)
    epoch = read_summary(folder).epochs[-1]
    assert scores == {name: epoch[name] for name in scores}
    assert {"exact", "f1", "HasAns_f1", "NoAns_f1", "best_f1"} <= set(scores)


CONTEXT = "The bridge of Ålesund was opened in 1925 and painted in 1950. " * 3
YEAR = {"text": "1925", "answer_start": CONTEXT.index("1925")}
GOOD = [{"id": "q1", "question": "When was it opened?", "answers": [YEAR]}]
ODD = [{"id": "q2", "question": "When was it painted?", "answers": [{"text": "1950", "answer_start": 3}]}]
ODD += [{"id": "q3", "question": "Who?", "answers": [{"text": "1925", "answer_start": CONTEXT.rindex("1925")}]}]


def write_squad(path, asked):
    content = {"version": "1.1", "data": [{"title": "One", "paragraphs": [{"context": CONTEXT, "qas": asked}]}]}
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    write_squad(tmp_path / "train-v1.1-part.json", GOOD + ODD)
    write_squad(tmp_path / "dev-v1.1.json", GOOD)
    return tmp_path


def test_files_are_found_by_the_beginning_of_their_names(folder, run_here):
    words = [*TINY, "--max_steps", 1, "--no_save_model", "--data_dir", folder, "--output_dir", "a"]
    code, text = run_here(TASK1, words)
    assert code == 0, text
    assert f"data: {folder}" in text
    (row,) = rows_of(folder / "a" / "iterations.rank0.jsonl")
    assert row["examples"] == 2, "a question whose answer is not at its place is left out"
    words = [*TINY, "--do_eval", "--data_dir", folder, "--output_dir", "b"]
    assert run_here(TASK1, words)[0] == 0, "an evaluation without a training"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data_dir", "nowhere"], "the data folder nowhere of --data_dir does not exist."),
        (["--data_dir", ".", "--version_2_with_negative"], "dev-v2.0.json is not a SQuAD file (FileNotFoundError"),
        (["--data_dir", "cut"], "dev-v1.1.json is not a SQuAD file"),
        (["--model_type", "vit"], "--model_type vit cannot do squad. Choose bert or roberta or distilbert."),
        (["--max_seq_length", "67"], "--max_seq_length 67 leaves no room for text next to questions of 64"),
        (["--null_score_diff_threshold", "1"], "--null_score_diff_threshold is for SQuAD 2.0. Add --version_2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(folder, run_here, words, sentence):
    (folder / "cut").mkdir()
    write_squad(folder / "cut" / "train-v1.1.json", GOOD)
    (folder / "cut" / "dev-v1.1.json").write_text('{"data": [')
    code, text = run_here(TASK1, [*TINY, *words])
    assert code != 0
    assert sentence in text.splitlines()[-1]
    assert "Traceback" not in text


def test_every_rank_names_a_fault_of_the_data(folder, start_ranks):
    write_squad(folder / "dev-v1.1.json", GOOD + GOOD)
    ranks = start_ranks("task2b/run_squad.py", 2, [*TINY, "--data_dir", folder])
    assert [(rank.wait() != 0, "has two questions with one id" in rank.text) for rank in ranks] == [(True, True)] * 2
