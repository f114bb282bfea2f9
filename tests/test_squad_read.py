"""SQuAD's files: errors name the place; scores follow the official rules, on cases worked out by hand."""

import json

import pytest
from data_files import found_in, question, squad_value, write_squad

from cos598d.data.squad.read import GoldAnswer, Question, parse_squad, read_squad
from cos598d.data.squad.score import (
    exact_match,
    f1_score,
    f1_score_version_2,
    normalize_answer,
    score_file,
    score_version_1,
    score_version_2,
)
from cos598d.errors import UserError

CONTEXT = "Rain fell on Ålesund."
GOOD = question("q", "Where?", [found_in(CONTEXT, "Ålesund")])


def test_contexts_and_questions_are_read_in_order(tmp_path):
    other = question("r", "What?", [("Snow", 0), ("Snow.", 0)])
    impossible = question("s", "Who?", [("Snow", 0)], is_impossible=True, plausible_answers=[])
    squad = read_squad(
        write_squad(tmp_path / "a.json", (CONTEXT, [GOOD]), ("Unasked.", []), ("Snow.", [other, impossible]))
    )
    assert squad.contexts == [CONTEXT, "Unasked.", "Snow."]
    assert [(q.identity, q.context, q.impossible) for q in squad.questions] == [
        ("q", 0, False), ("r", 2, False), ("s", 2, True)
    ]  # fmt: skip
    assert squad.questions[0].answers == (("Ålesund", 13),)
    assert [answer.text for answer in squad.questions[1].answers] == ["Snow", "Snow."]
    assert squad.questions[2].answers == ()
    assert squad.has_impossible


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], r"the file has no list 'data'. Give a file of the form"),
        ({"data": {}}, r"the file has no list 'data'"),
        ({"data": ["x"]}, r"data\[0\] has no list 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\]\.paragraphs\[0\] has no text 'context'"),
        (squad_value((CONTEXT, [{"id": "q", "answers": []}])), r"paragraphs\[0\]\.qas\[0\] has no text 'question'"),
        (squad_value((CONTEXT, [{"id": 7, "question": "x"}])), r"qas\[0\] has no text 'id'"),
        (squad_value((CONTEXT, [{**GOOD, "answers": "Rain"}])), r"qas\[0\] has no list 'answers'"),
        (squad_value((CONTEXT, [{**GOOD, "answers": [{"text": "Rain"}]}])), r"answers\[0\] has no whole number"),
        (squad_value((CONTEXT, [question("q", "x", [("Rain", True)])])), r"no whole number 'answer_start'"),
        (squad_value((CONTEXT, [{**GOOD, "is_impossible": "false"}])), r"true or false 'is_impossible' but \"false\""),
        (squad_value((CONTEXT, [{**GOOD, "is_impossible": 0}])), r"no true or false 'is_impossible' but 0"),
        (squad_value((CONTEXT, [{**GOOD, "is_impossible": None}])), r"no true or false 'is_impossible' but null"),
        (squad_value((CONTEXT, [question("q", "x", [(7, 0)], is_impossible=True)])), r"has no text 'text' but 7"),
        (squad_value((CONTEXT, [question("q", "x", [("Rain", float("nan"))])])), r"number 'answer_start' but NaN"),
        (squad_value((CONTEXT, [question("q", "x", [("Rain", 0.0)])])), r"no whole number 'answer_start' but 0\.0"),
        (squad_value((CONTEXT, [question("q", "x", [("Rain", "0")])])), r"no whole number 'answer_start' but \"0\""),
        (squad_value((CONTEXT, [question(["q"], "x")])), r"qas\[0\] has no text 'id' but a list"),
        (squad_value((CONTEXT, [question("q", {"x": "\x1b"})])), r"qas\[0\] has no text 'question' but an object"),
        (squad_value((CONTEXT, ["q"])), r"qas\[0\] has no text 'id'"),
        (squad_value((CONTEXT, [{**GOOD, "answers": ["Rain"]}])), r"answers\[0\] has no text 'text'"),
        (squad_value((CONTEXT, [question("\x1b[2J", "x")] * 2)), r"the id '\\\\x1b\[2J' appears twice"),
        (squad_value((CONTEXT, [GOOD]), (" \n", [question("r", "x")])), r"paragraphs\[1\] has an empty context and 1"),
        (squad_value((CONTEXT, [GOOD, GOOD])), r"the id 'q' appears twice, at data\[0\]\.paragraphs\[0\]\.qas"),
        (squad_value((CONTEXT, [])), "has no question"),
    ],
)  # fmt: skip
def test_an_error_names_the_place_where_a_file_is_not_squad(value, words):
    with pytest.raises(UserError, match=words) as raised:
        parse_squad(value, "a.json")
    assert str(raised.value).startswith("a.json")
    assert "\n" not in str(raised.value)


def test_an_error_names_a_missing_or_damaged_file(tmp_path):
    with pytest.raises(UserError, match=r"There is no file .*none\.json"):
        read_squad(tmp_path / "none.json")
    whole = write_squad(tmp_path / "cut.json", (CONTEXT, [GOOD])).read_bytes()
    for content in (whole[:-9], b"\xff\xfe\x00", b"[" * 100_000):
        (tmp_path / "cut.json").write_bytes(content)
        with pytest.raises(UserError, match=r"cut\.json is not JSON"):
            read_squad(tmp_path / "cut.json")


@pytest.fixture
def data(tmp_path):
    asked = [question(name, "x?", [found_in(CONTEXT, text)]) for name, text in (("a", "Rain"), ("b", "fell"))]
    return write_squad(tmp_path / "data.json", (CONTEXT, asked))


def written(path, value):
    path.write_text(json.dumps(value))
    return path


def test_predictions_are_scored_and_remarks_name_missing_and_unknown_questions(tmp_path, data):
    predictions = written(tmp_path / "p.json", {"a": "the rain", "z": "other"})
    scores, remarks = score_file(data, predictions)
    assert scores == {"exact_match": 50.0, "f1": 50.0}
    assert remarks == [
        "1 of 2 questions have no prediction and count as wrong: b",
        "1 predictions are for other questions and are ignored: z",
    ]
    assert score_file(data, written(predictions, {"a": "rain", "b": "rain fell"})) == (
        {"exact_match": 50.0, "f1": pytest.approx(100 * (1 + 2 / 3) / 2)},
        [],
    )


def test_version_2_scores_use_null_odds_and_errors_name_wrong_ones(tmp_path):
    asked = [question("a", "x?", [found_in(CONTEXT, "Rain")]), question("b", "y?", is_impossible=True)]
    data = write_squad(tmp_path / "data.json", (CONTEXT, asked))
    predictions = written(tmp_path / "p.json", {"a": "Rain", "b": ""})
    odds = written(tmp_path / "o.json", {"a": -1, "b": 2.5})
    scores, _ = score_file(data, predictions, odds)
    assert (scores["exact"], scores["NoAns_f1"], scores["best_exact"]) == (100.0, 100.0, 100.0)
    assert scores["best_exact_thresh"] == -1.0
    for wrong, words in (
        ({"a": 1.0}, r"o\.json has no number for 1 questions, b\. Complete it"),
        ({"a": 1.0, "b": float("nan")}, r"the entry of 'b' is NaN. Map each question id to a number"),
        ({"a": -(10**400), "b": 1}, r"the entry of 'a' is -1000+. Map each question id to a number"),
    ):
        with pytest.raises(UserError, match=words):
            score_file(data, predictions, written(odds, wrong))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"z": "x"}, r"p\.json answers none of the 2 questions of .*data\.json"),
        (["x"], "p.json is a JSON list. Map each question id to an answer's text"),
        ({"a": ["x"]}, r"the entry of 'a' is \[\"x\"\]. Map"),
    ],
)
def test_predictions_in_another_form_or_for_other_questions_are_refused(tmp_path, data, value, words):
    with pytest.raises(UserError, match=words):
        score_file(data, written(tmp_path / "p.json", value))


def test_null_odds_are_refused_for_version_1(tmp_path, data):
    predictions = written(tmp_path / "p.json", {"a": "x"})
    with pytest.raises(UserError, match="is SQuAD 1.1, which has no null odds"):
        score_file(data, predictions, predictions)


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


def test_f1_counts_repeated_words():
    assert f1_score("the cat sat", "a cat") == pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert f1_score("to be or not to be", "to be") == pytest.approx(0.5)  # 2 of 6, 2 of 2
    assert f1_score("to be", "to to to be") == pytest.approx(2 / 3)  # 2 of 2, 2 of 4
    assert f1_score("dog", "cat") == 0.0


def test_only_version_2_accepts_an_empty_prediction_for_an_empty_answer():
    assert f1_score("", "") == 0.0
    assert f1_score_version_2("", "") == 1.0
    assert f1_score_version_2("the", "") == 1.0  # nothing is left of an article
    assert f1_score_version_2("", "cat") == f1_score_version_2("cat", "") == 0.0
    assert exact_match("the", "") == 1.0


def test_each_score_uses_its_best_gold_answer():
    questions = [asked("q", "Denver Broncos of Colorado", "Broncos", "the Denver")]
    scores = score_version_1(questions, {"q": "Denver Broncos"})
    assert scores == {"exact_match": 0.0, "f1": pytest.approx(100 * 2 / 3)}
    assert score_version_1(questions, {"q": "The BRONCOS."}) == {"exact_match": 100.0, "f1": 100.0}


def test_missing_predictions_and_golds_count_as_wrong():
    questions = [asked("right", "yes"), asked("missing", "yes"), asked("no gold")]
    predictions = {"right": "yes", "no gold": "anything"}
    assert score_version_1(questions, predictions) == pytest.approx({"exact_match": 100 / 3, "f1": 100 / 3})
    assert score_version_2(questions, {"right": "yes"})["exact"] == pytest.approx(100 / 3)


def test_version_2_scores_answerable_questions_separately():
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


def test_best_thresholds_answer_the_surest_questions_first():
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


def test_the_threshold_is_zero_if_no_answer_is_best():
    questions = [asked("a", "x"), asked("b", impossible=True)]
    scores = score_version_2(questions, {"a": "wrong", "b": "wrong"}, {"a": 1.0, "b": 2.0})
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (50.0, 0.0)
