"""SQuAD's scores on cases worked out by hand by the official rules."""

import pytest

from cos598d.data.squad.read import GoldAnswer, Question
from cos598d.data.squad.score import (
    exact_match,
    f1_score,
    f1_score_version_2,
    normalize_answer,
    score_version_1,
    score_version_2,
)


def asked(identity, *golds, impossible=False):
    return Question(identity, 0, "?", tuple(GoldAnswer(text, 0) for text in golds), impossible)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Quick, brown\tFox!", "quick brown fox"),
        ("a an the", ""),
        ("Theatre, another, than", "theatre another than"),  # articles only as words of their own
        ("The-end", "theend"),  # punctuation goes first and leaves no space, so no article is left
        ("An U.S.A. $5.00", "usa 500"),
        ("20–18", "20–18"),  # an en dash is no ASCII punctuation: the official scripts keep it
        ("“quoted”", "“quoted”"),
        ("ÉCOLE a\u00a0b", "école b"),
    ],
)
def test_normalization_follows_the_official_scripts(text, normalized):
    assert normalize_answer(text) == normalized


def test_f1_counts_words_with_their_repetitions():
    assert f1_score("the cat sat", "a cat") == pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert f1_score("to be or not to be", "to be") == pytest.approx(0.5)  # 2 of 6, 2 of 2
    assert f1_score("to be", "to to to be") == pytest.approx(2 / 3)  # 2 of 2, 2 of 4
    assert f1_score("dog", "cat") == 0.0


def test_an_empty_prediction_is_right_only_where_nothing_is_wanted_and_only_in_version_2():
    assert f1_score("", "") == 0.0
    assert f1_score_version_2("", "") == 1.0
    assert f1_score_version_2("the", "") == 1.0  # nothing is left of an article
    assert f1_score_version_2("", "cat") == f1_score_version_2("cat", "") == 0.0
    assert exact_match("the", "") == 1.0


def test_the_best_gold_answer_counts_in_each_measure():
    questions = [asked("q", "Denver Broncos of Colorado", "Broncos", "the Denver")]
    scores = score_version_1(questions, {"q": "Denver Broncos"})
    assert scores == {"exact_match": 0.0, "f1": pytest.approx(100 * 2 / 3)}
    assert score_version_1(questions, {"q": "The BRONCOS."}) == {"exact_match": 100.0, "f1": 100.0}


def test_missing_predictions_and_missing_golds_count_as_wrong():
    questions = [asked("right", "yes"), asked("missing", "yes"), asked("no gold")]
    predictions = {"right": "yes", "no gold": "anything"}
    assert score_version_1(questions, predictions) == pytest.approx({"exact_match": 100 / 3, "f1": 100 / 3})
    assert score_version_2(questions, {"right": "yes"})["exact"] == pytest.approx(100 / 3)


def test_version_2_reports_questions_with_and_without_answer_apart():
    questions = [
        asked("a", "red apple"),
        asked("b", "pear"),
        asked("c", impossible=True),
        asked("d", impossible=True),
        asked("e", impossible=True),
        asked("f", "the"),  # no gold answer that has words: nothing is the right answer
    ]
    predictions = {"a": "apple", "b": "", "c": "", "d": "plum", "e": "", "f": ""}
    assert score_version_2(questions, predictions) == pytest.approx(
        {
            "exact": 100 * 3 / 6,
            "f1": 100 * (2 / 3 + 3) / 6,
            "HasAns_exact": 0.0,
            "HasAns_f1": 100 * (2 / 3) / 2,
            "NoAns_exact": 75.0,
            "NoAns_f1": 75.0,
        }
    )
    assert set(score_version_2(questions[:2], predictions)) == {"exact", "f1", "HasAns_exact", "HasAns_f1"}


def test_the_best_threshold_answers_the_surest_questions_first():
    questions = [asked("a", "x"), asked("b", "x"), asked("c", impossible=True), asked("d", impossible=True)]
    predictions = {"a": "x", "b": "x", "c": "z", "d": "z"}
    odds = {"a": -3.0, "b": 1.0, "c": 0.0, "d": 2.5}
    # All unanswered: 2 right. Answering a: 3; then c: 2; then b: 3, no better; then d: 2.
    scores = score_version_2(questions, predictions, odds)
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (75.0, -3.0)
    assert (scores["best_f1"], scores["best_f1_thresh"]) == (75.0, -3.0)
    assert scores["exact"] == 50.0
    odds["c"] = 9.0
    # Now a, b, d, c: 3, then 4.
    scores = score_version_2(questions, predictions, odds)
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (100.0, 1.0)


def test_where_silence_is_best_the_threshold_is_zero():
    questions = [asked("a", "x"), asked("b", impossible=True)]
    scores = score_version_2(questions, {"a": "wrong", "b": "wrong"}, {"a": 1.0, "b": 2.0})
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (50.0, 0.0)
