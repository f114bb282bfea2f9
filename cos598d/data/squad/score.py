"""SQuAD's official scores of any program's predictions: exact match and F1 over words, the best over the gold answers.

The rules are those of the official evaluation scripts for 1.1 (Rajpurkar et al. 2016, section 6.1) and 2.0 (Rajpurkar,
Jia and Liang 2018, section 5), reimplemented. `cos598d score --task squad` scores a file.
"""

import functools
import json
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cos598d.data.squad.read import Question, Squad, read_json, read_squad
from cos598d.errors import UserError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Only ASCII's: the official scripts keep Unicode's dashes and quotes.
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SHOWN = 3  # ids in a remark


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, white space as single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@functools.lru_cache(maxsize=4)
def _normalized(text: str) -> str:
    """`normalize_answer`, cached: a prediction needs it once for all of its gold answers."""
    return normalize_answer(text)


@functools.lru_cache(maxsize=4)
def _words(text: str) -> Counter[str]:
    return Counter(_normalized(text).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if both are the same after normalization, else 0."""
    return float(_normalized(prediction) == _normalized(gold))


def f1_score(prediction: str, gold: str) -> float:
    """The harmonic mean of precision and recall over normalized words, counting repetitions.

    If either side has no words it is 0, as in the script for 1.1.
    """
    predicted, wanted = _words(prediction), _words(gold)
    same = sum(min(count, predicted[word]) for word, count in wanted.items())
    if same == 0:
        return 0.0
    precision, recall = same / predicted.total(), same / wanted.total()
    return 2 * precision * recall / (precision + recall)


def f1_score_version_2(prediction: str, gold: str) -> float:
    """`f1_score`, but if either side has no words it is 1 if both have none, as in the script for 2.0."""
    if not _normalized(prediction) or not _normalized(gold):
        return exact_match(prediction, gold)
    return f1_score(prediction, gold)


def score_version_1(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` in percent, each question's best over its gold answers.

    A question without a prediction, and one without a gold answer, counts as wrong.
    """
    exact = _raw(questions, predictions, exact_match, _texts)
    f1 = _raw(questions, predictions, f1_score, _texts)
    return {"exact_match": _percent(exact.values()), "f1": _percent(f1.values())}


def score_version_2(
    questions: Sequence[Question], predictions: Mapping[str, str], null_odds: Mapping[str, float] | None = None
) -> dict[str, float]:
    """`exact` and `f1` in percent, also separately for questions with an answer (HasAns) and without (NoAns).

    An empty prediction means that there is no answer. A question without a prediction counts as wrong. `null_odds` is a
    number per question that is larger if no answer is more likely. With it, the result also has the best scores over
    all thresholds (`best_exact`, `best_f1`), and these thresholds (`best_exact_thresh`, `best_f1_thresh`).
    """
    exact = _raw(questions, predictions, exact_match, _texts_or_none)
    f1 = _raw(questions, predictions, f1_score_version_2, _texts_or_none)
    scores = {"exact": _percent(exact.values()), "f1": _percent(f1.values())}
    has_answer = {question.identity: _texts_or_none(question) != [""] for question in questions}
    for prefix, wanted in (("HasAns", True), ("NoAns", False)):
        chosen = [identity for identity, has in has_answer.items() if has == wanted]
        if chosen:
            scores[f"{prefix}_exact"] = _percent([exact[identity] for identity in chosen])
            scores[f"{prefix}_f1"] = _percent([f1[identity] for identity in chosen])
    if null_odds is not None:
        for name, raw in (("exact", exact), ("f1", f1)):
            best, threshold = _best_threshold(raw, predictions, null_odds, has_answer)
            scores |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return scores


def _raw(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    measure: Callable[[str, str], float],
    golds: Callable[[Question], list[str]],
) -> dict[str, float]:
    """Each question's best score over its gold answers, by its id."""
    return {
        question.identity: max((measure(predictions[question.identity], gold) for gold in golds(question)), default=0.0)
        if question.identity in predictions
        else 0.0
        for question in questions
    }


def _texts(question: Question) -> list[str]:
    return [answer.text for answer in question.answers]


def _texts_or_none(question: Question) -> list[str]:
    """The gold answers that have words; if there are none, the empty answer is right."""
    return [text for text in _texts(question) if normalize_answer(text)] or [""]


def _best_threshold(
    raw: Mapping[str, float],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """The best total, in percent, if every question whose odds are above a threshold is left unanswered.

    It begins with all unanswered and answers one question after the other, the surest first.
    """
    current = best = float(sum(not has for identity, has in has_answer.items() if identity in predictions))
    threshold = 0.0
    for identity in sorted((i for i in raw if i in null_odds), key=null_odds.__getitem__):
        if has_answer[identity]:
            current += raw[identity]
        elif predictions.get(identity):
            current -= 1
        if current > best:
            best, threshold = current, float(null_odds[identity])
    return 100.0 * best / len(raw), threshold


def _percent(scores: Iterable[float]) -> float:
    scores = list(scores)
    return 100.0 * sum(scores) / len(scores)


def score_file(data: Path, predictions: Path, null_odds: Path | None = None) -> tuple[dict[str, float], list[str]]:
    """The official scores of a predictions file, {question id: answer}, and remarks on mismatches.

    `data` is a SQuAD file. If it has questions without an answer, 2.0's rules apply, else 1.1's. `null_odds`, {question
    id: number}, adds 2.0's best thresholds. Questions without a prediction count as wrong. Raises UserError if a file
    cannot be read or has another form, or if all predictions are for other questions.
    """
    squad = read_squad(data)
    answers = _read(predictions, "an answer's text", lambda entry: isinstance(entry, str))
    known = {question.identity for question in squad.questions}
    missing = [identity for identity in known if identity not in answers]
    strange = [identity for identity in answers if identity not in known]
    if len(missing) == len(known):
        raise UserError(
            f"{predictions} answers none of the {len(known):,} questions of {data}. Give the predictions for this data."
        )
    remarks = []
    if missing:
        remarks.append(f"{len(missing):,} of {len(known):,} questions have no prediction and count as wrong: ")
        remarks[-1] += _name(squad, missing)
    if strange:
        remarks.append(f"{len(strange):,} predictions are for other questions and are ignored: {_list(strange)}")
    if not squad.has_impossible:
        if null_odds:
            raise UserError(f"{data} is SQuAD 1.1, which has no null odds. Leave --null_odds out.")
        return score_version_1(squad.questions, answers), remarks
    odds = None
    if null_odds:
        odds = _read(null_odds, "a number", _is_number)
        if without := [identity for identity in known if identity not in odds]:
            raise UserError(f"{null_odds} has no number for {len(without):,} questions, {_list(without)}. Complete it.")
    return score_version_2(squad.questions, answers, odds), remarks


def _read(file: Path, words: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """The file's entries by question id. Each must fulfil `fits`, which `words` describes."""
    value = read_json(file, f"a file that maps each question id to {words}")
    form = f'Map each question id to {words}: {{"ID": ...}}'
    if not isinstance(value, dict):
        raise UserError(f"{file} is a JSON {type(value).__name__}. {form}.")
    for identity, entry in value.items():
        if not fits(entry):
            raise UserError(f"{file}: the entry of {identity!r} is {json.dumps(entry)[:60]}. {form}.")
    return value


def _is_number(entry: Any) -> bool:
    return type(entry) in (int, float) and abs(entry) <= sys.float_info.max  # not NaN, and within a float's range


def _name(squad: Squad, identities: list[str]) -> str:
    wanted = set(identities)
    return _list([question.identity for question in squad.questions if question.identity in wanted])


def _list(identities: list[str]) -> str:
    more = f" and {len(identities) - _SHOWN:,} more" if len(identities) > _SHOWN else ""
    return ", ".join(identities[:_SHOWN]) + more
