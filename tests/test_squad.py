"""SQuAD: windows against a search by hand, answers cut right, scores equal to the official scripts' logic. Imports: as
a run uses them; the official logic below is the oracle."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from data_files import task_at

from cos598d.commands.cli import main
from cos598d.data.encoders import TextEncoder, word_pieces
from cos598d.data.samples import vocabulary, write_squad_sample
from cos598d.data.squad import Question, build_windows, golds_of, predict, read_questions, score_file
from cos598d.data.squad_scores import normalize_answer, version_1, version_2
from cos598d.errors import UserError


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder(word_pieces(vocabulary(), lower_case=True))


def task_of(impossible: bool, stride: int = 40):
    return task_at(None, "squad", version_2_with_negative=impossible, doc_stride=stride)


@pytest.mark.parametrize("part", ["train", "dev"])
def test_windows_cover_contexts_and_hold_answers(part, encoder):
    task = task_of(True)
    windows = task.load(part, encoder, 120, limit=60)
    asked, by_question = task._asked[part], {}
    for number in range(len(windows)):
        by_question.setdefault(int(windows.questions[number]), []).append(number)
    for number, question in enumerate(asked):
        (context,), (query,) = encoder.pieces([question.context]), encoder.pieces([question.text])
        room = 120 - min(len(query.ids), 64) - 3
        first, covered, held = 0, [], False
        for window in by_question[number]:
            start, length = windows.starts[window], windows.lengths[window]
            ids = windows.tokens[start : start + length].tolist()
            part_ids = context.ids[first : first + room]
            assert ids == [encoder.cls_id, *query.ids[:64], encoder.sep_id, *part_ids, encoder.sep_id]
            covered += range(first, first + len(part_ids))
            begin, end = (int(windows.targets[name][window]) for name in ("start_positions", "end_positions"))
            if begin:
                held = True
                offsets = windows.offsets[start : start + length]
                text = question.context[offsets[begin][0] : offsets[end][1]]
                assert normalize_answer(question.answers[0][0]) in normalize_answer(text)
            first += min(room, 40)
        assert sorted(set(covered)) == list(range(len(context.ids)))
        assert held == bool(question.answers)


@pytest.mark.parametrize("impossible", [False, True])
def test_gold_scores_give_gold_answers(impossible, encoder):
    task = task_of(impossible)
    windows = task.load("dev", encoder, 160)
    width = task.widths(windows)[0]
    outputs = np.zeros((len(windows), 2 * width))
    rows = np.arange(len(windows))
    outputs[rows, windows.targets["start_positions"]] = 10
    outputs[rows, width + windows.targets["end_positions"]] = 10
    found = task.score("dev", outputs, windows)
    assert {found.metrics[name] for name in task.metric.names} == {100.0}
    assert set(found.files) == {"predictions.json", *(["null_odds.json"] if impossible else [])}


def test_an_answer_is_the_best_span_that_may_be(encoder):
    asked = [Question("q", "who", "the man and the woman", (("the woman", 12),))]
    windows = build_windows(asked, encoder, 100, 100)
    width, base = int(windows.lengths.max()), int(windows.splits[0])
    outputs = np.zeros((len(windows), 2 * width))
    last = int(windows.lengths[0]) - 2
    outputs[0, [base, 1, last]] = 5, 9, 8  # the question's own token does not count
    outputs[0, [width + last, width + base]] = 4, 6
    text, odds = predict(asked, windows, outputs, True, 0.0)
    assert odds["q"] < 0
    assert text["q"]
    assert asked[0].context.endswith(text["q"]), "the end must not come before the beginning"
    outputs[0, [0, width]] = 50
    assert predict(asked, windows, outputs, True, 0.0)[0] == {"q": ""}
    assert predict(asked, windows, outputs, True, 100.0)[0] == text
    assert predict(asked, windows, outputs, False, 0.0)[0] == text


def test_a_training_question_whose_answer_is_elsewhere_is_left_out(encoder):
    good = Question("a", "who", "the man and the woman", (("the woman", 12),))
    bad = good._replace(identity="b", answers=(("the woman", 3),))
    impossible = good._replace(identity="c", answers=(), impossible=True)
    asked = [bad, good, impossible]
    assert build_windows(asked, encoder, 100, 100, training=True).questions.tolist() == [1, 2]
    assert build_windows(asked, encoder, 100, 100).questions.tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="answer_start"):
        build_windows([bad], encoder, 100, 100, training=True)


# The official scripts' logic, as they are published for 1.1 and 2.0.
def official_tokens(text):
    return normalize_answer(text).split() if text else []


def official_f1(gold, prediction, version):
    golds, predicted = official_tokens(gold), official_tokens(prediction)
    same = sum((Counter(golds) & Counter(predicted)).values())
    if version == 2 and (len(golds) == 0 or len(predicted) == 0):
        return int(golds == predicted)
    if same == 0:
        return 0
    precision, recall = 1.0 * same / len(predicted), 1.0 * same / len(golds)
    return (2 * precision * recall) / (precision + recall)


def official_2(golds, predictions, na_probs, threshold=1.0):
    exact, f1 = {}, {}
    for identity, answers in golds.items():
        known = [one for one in answers if normalize_answer(one)] or [""]
        given = predictions[identity]
        exact[identity] = max(int(normalize_answer(one) == normalize_answer(given)) for one in known)
        f1[identity] = max(official_f1(one, given, 2) for one in known)
    has = {identity: bool(answers) for identity, answers in golds.items()}
    odds = na_probs or dict.fromkeys(predictions, 0.0)
    out = {}
    for name, raw in (("exact", exact), ("f1", f1)):
        kept = {one: float(not has[one]) if odds[one] > threshold else value for one, value in raw.items()}
        for prefix, chosen in (
            ("", [*has]),
            ("HasAns_", [o for o in has if has[o]]),
            ("NoAns_", [o for o in has if not has[o]]),
        ):
            if chosen:
                out[prefix + name] = 100.0 * sum(kept[one] for one in chosen) / len(chosen)
                out[prefix + "total"] = len(chosen)
        if na_probs:
            current = best = sum(1 for one in has if not has[one])
            best_threshold = 0.0
            for one in sorted(na_probs, key=lambda key: na_probs[key]):
                if one not in raw:
                    continue
                current += raw[one] if has[one] else (-1 if predictions[one] else 0)
                if current > best:
                    best, best_threshold = current, na_probs[one]
            out[f"best_{name}"], out[f"best_{name}_thresh"] = 100.0 * best / len(raw), best_threshold
    return out


def generated(asked, seed):
    """Answers that are right, near, from elsewhere or missing; and odds with many ties, some above the threshold."""
    drawn = random.Random(seed)
    answers, odds = {}, {}
    for question in asked:
        words = question.context.split()
        gold = drawn.choice(question.answers)[0] if question.answers else ""
        place = drawn.randrange(len(words))
        answers[question.identity] = drawn.choice(
            [gold, gold.upper() + "!", f"the {gold} {words[place]}", " ".join(words[place : place + 3]), "", "the a an"]
        )
        odds[question.identity] = drawn.choice([0.0, 0.25, 0.5, 0.5, 0.9, 1.0, 1.5])
    return answers, odds


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_the_official_ones(seed, tmp_path):
    write_squad_sample(tmp_path)
    asked = read_questions(tmp_path / "dev-v2.0.json")
    answers, odds = generated(asked, seed)
    golds = golds_of(asked)
    golds[asked[0].identity], golds[asked[1].identity] = ["the"], ["!", "word"]  # answers without words
    assert version_2(golds, answers) == official_2(golds, answers, None)
    assert version_2(golds, answers, odds) == official_2(golds, answers, odds)
    asked = read_questions(tmp_path / "dev-v1.1.json")
    answers, _ = generated(asked, seed)
    golds, rows = golds_of(asked), len(asked)
    exact = sum(max(normalize_answer(answers[one]) == normalize_answer(gold) for gold in golds[one]) for one in golds)
    f1 = sum(max(official_f1(gold, answers[one], 1) for gold in golds[one]) for one in golds)
    assert version_1(golds, answers) == {"exact_match": 100.0 * exact / rows, "f1": 100.0 * f1 / rows}


def test_the_command_scores_files(tmp_path, capsys):
    write_squad_sample(tmp_path)
    asked = read_questions(tmp_path / "dev-v2.0.json")
    answers, odds = generated(asked, 7)
    for name, content in (("p.json", answers | {"strange": "x"}), ("o.json", odds)):
        (tmp_path / name).write_text(json.dumps(content))
    words = ["score", "--task", "squad", "--data", str(tmp_path / "dev-v2.0.json")]
    words += ["--predictions", str(tmp_path / "p.json"), "--null_odds", str(tmp_path / "o.json")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == official_2(golds_of(asked), answers, odds)
    assert said.err == "warning: 1 predictions are for other questions and are ignored: strange\n"


def test_files_that_cannot_be_scored_are_one_sentence(tmp_path):
    write_squad_sample(tmp_path)
    data, given = tmp_path / "dev-v1.1.json", tmp_path / "p.json"
    for content, words in (
        ("{", "is not {question id: answer}"),
        ("[1]", "is not {question id: answer}"),
        ('{"x": 1}', "the entry of x"),
        ('{"x": "y"}', "answers no question"),
    ):
        given.write_text(content)
        with pytest.raises(UserError, match=words):
            score_file(data, given)
    for content, words in (
        ("{", "is not a SQuAD file"),
        ('{"data": []}', "has no question"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1"}]}]}]}', "KeyError: 'question'"),
    ):
        (tmp_path / "data.json").write_text(content)
        with pytest.raises(UserError, match=words):
            read_questions(tmp_path / "data.json")
    with pytest.raises(UserError, match="not a SQuAD file"):
        read_questions(tmp_path / "nothing.json")
