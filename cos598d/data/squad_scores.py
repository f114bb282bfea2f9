"""SQuAD's official scores: exact match and F1 over words, each question's best over its gold answers.

They are those of the official scripts for 1.1 (Rajpurkar et al. 2016, section 6.1) and for 2.0 (Rajpurkar, Jia and
Liang 2018, section 5), under the scripts' names. `cos598d score --task squad` scores a file of any program.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

ODDS_THRESHOLD = 1.0  # above it, the official script takes a question for unanswered
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # only ASCII's, as in the official scripts
Golds = Mapping[str, list[str]]  # the gold answers of each question by its id; none if it is impossible


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, white space as single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if both are the same after normalization, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def f1_score(prediction: str, gold: str, of_nothing: float = 0.0) -> float:
    """The harmonic mean of precision and recall over normalized words, counting repetitions; `of_nothing` if neither
    side has a word: 0 in the script for 1.1, and 1 in that for 2.0."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    same = (Counter(predicted) & Counter(wanted)).total()
    if same == 0:
        return 0.0 if predicted or wanted else of_nothing
    precision, recall = same / len(predicted), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def version_1(golds: Golds, answers: Mapping[str, str]) -> dict[str, float]:
    """`exact_match` and `f1` in percent. A question without a prediction or without a gold answer counts as wrong."""
    exact, f1 = _raw(golds, answers, exact_match), _raw(golds, answers, f1_score)
    return {"exact_match": _percent(exact), "f1": _percent(f1)}


def version_2(
    golds: Golds, answers: Mapping[str, str], odds: Mapping[str, float] | None = None, applies_threshold: bool = True
) -> dict[str, float]:
    """`exact`, `f1` in percent and `total`, also of questions with an answer (HasAns_) and without (NoAns_).

    1. The right answer to an impossible question is "". A question without a prediction counts as wrong.
    2. With `odds`, larger if no answer is more likely, questions whose odds are above ODDS_THRESHOLD count as
       unanswered (unless not `applies_threshold`).
    3. `best_exact` and `best_f1` are then the best scores over all thresholds, at `best_exact_thresh` and
       `best_f1_thresh`.
    """
    has_answer = {identity: bool(texts) for identity, texts in golds.items()}
    # An answer without words is none; if all are, the empty one is right.
    wanted = {identity: [text for text in texts if normalize_answer(text)] or [""] for identity, texts in golds.items()}
    raw = {"exact": _raw(wanted, answers, exact_match), "f1": _raw(wanted, answers, partial(f1_score, of_nothing=1.0))}
    is_left = {one: applies_threshold and odds is not None and odds[one] > ODDS_THRESHOLD for one in golds}
    kept = {
        name: {one: float(not has_answer[one]) if is_left[one] else score for one, score in of.items()}
        for name, of in raw.items()
    }
    found: dict[str, float] = {}
    for prefix, chosen in (
        ("", list(golds)),
        ("HasAns_", [one for one in golds if has_answer[one]]),
        ("NoAns_", [one for one in golds if not has_answer[one]]),
    ):
        if chosen:
            found |= {prefix + name: _percent({one: of[one] for one in chosen}) for name, of in kept.items()}
            found[f"{prefix}total"] = len(chosen)
    for name, of in raw.items() if odds is not None else ():
        found[f"best_{name}"], found[f"best_{name}_thresh"] = _best_threshold(of, answers, odds or {}, has_answer)
    return found


def _raw(golds: Golds, answers: Mapping[str, str], measure: Callable[[str, str], float]) -> dict[str, float]:
    """Each question's best score over its gold answers."""
    return {
        one: max((measure(answers[one], gold) for gold in texts), default=0.0) if one in answers else 0.0
        for one, texts in golds.items()
    }


def _best_threshold(
    raw: Mapping[str, float], answers: Mapping[str, str], odds: Mapping[str, float], has_answer: Mapping[str, bool]
) -> tuple[float, float]:
    """The best total in percent, and its threshold: all questions are left unanswered, then the surest one is answered,
    and so on. Of equal odds, the order of `odds` decides, as in the official script."""
    current = best = float(sum(not has for has in has_answer.values()))
    threshold = 0.0
    for one in sorted(odds, key=odds.__getitem__):
        if one not in raw:
            continue
        current += raw[one] if has_answer[one] else -float(bool(answers.get(one)))
        if current > best:
            best, threshold = current, float(odds[one])
    return 100.0 * best / len(raw), threshold


def _percent(scores: Mapping[str, float]) -> float:
    return 100.0 * sum(scores.values()) / len(scores)
