"""SQuAD's files: what is none is refused in a sentence that names the place; scores of anybody's predictions."""

import json

import pytest
from squad_files import found_in, question, squad_value, write_squad

from cos598d.data.squad.read import parse_squad, read_squad
from cos598d.data.squad.score import score_file
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
def test_what_is_not_squad_is_refused_by_its_place(value, words):
    with pytest.raises(UserError, match=words) as raised:
        parse_squad(value, "a.json")
    assert str(raised.value).startswith("a.json")
    assert "\n" not in str(raised.value)


def test_files_that_are_missing_or_cut_off_are_named(tmp_path):
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


def test_a_predictions_file_is_scored_and_what_does_not_fit_is_said(tmp_path, data):
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


def test_predictions_for_a_file_of_version_2_are_scored_by_its_rules(tmp_path):
    asked = [question("a", "x?", [found_in(CONTEXT, "Rain")]), question("b", "y?", is_impossible=True)]
    data = write_squad(tmp_path / "data.json", (CONTEXT, asked))
    predictions = written(tmp_path / "p.json", {"a": "Rain", "b": ""})
    odds = written(tmp_path / "o.json", {"a": -1, "b": 2.5})
    scores, _ = score_file(data, predictions, odds)
    assert (scores["exact"], scores["NoAns_f1"], scores["best_exact"]) == (100.0, 100.0, 100.0)
    assert scores["best_exact_thresh"] == -1.0
    with pytest.raises(UserError, match=r"o\.json has no number for 1 questions, b\. Complete it"):
        score_file(data, predictions, written(odds, {"a": 1.0}))
    with pytest.raises(UserError, match=r"the entry of 'b' is NaN. Map each question id to a number"):
        score_file(data, predictions, written(odds, {"a": 1.0, "b": float("nan")}))
    with pytest.raises(UserError, match=r"the entry of 'a' is -1000+. Map each question id to a number"):
        score_file(data, predictions, written(odds, {"a": -(10**400), "b": 1}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"z": "x"}, r"p\.json answers none of the 2 questions of .*data\.json"),
        (["x"], "p.json is a JSON list. Map each question id to an answer's text"),
        ({"a": ["x"]}, r"the entry of 'a' is \[\"x\"\]. Map"),
    ],
)
def test_predictions_of_another_form_or_for_other_questions_are_refused(tmp_path, data, value, words):
    with pytest.raises(UserError, match=words):
        score_file(data, written(tmp_path / "p.json", value))


def test_null_odds_make_no_sense_for_version_1(tmp_path, data):
    predictions = written(tmp_path / "p.json", {"a": "x"})
    with pytest.raises(UserError, match="is SQuAD 1.1, which has no null odds"):
        score_file(data, predictions, predictions)
