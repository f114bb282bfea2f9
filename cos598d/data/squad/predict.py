"""From scores of first and last tokens to answers, cut from the context by character offsets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cos598d.data.squad.options import SquadOptions
from cos598d.data.squad.read import Squad
from cos598d.data.text.features import Features


@dataclass(frozen=True)
class Predictions:
    """The contents of the official files, by question id: the answer's text, the n best, and in 2.0 the null scores."""

    texts: dict[str, str]
    nbest: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float]


class _Candidates(NamedTuple):
    """Spans of one window, each (spans,): scores of first and last tokens, and their indices in the context."""

    start_scores: np.ndarray
    end_scores: np.ndarray
    firsts: np.ndarray
    lasts: np.ndarray


def predict(
    squad: Squad, chosen: Sequence[int], features: Features, outputs: np.ndarray, options: SquadOptions
) -> Predictions:
    """The answers to the `chosen` questions from which `features` was built (see `build_windows`).

    outputs: float (windows, 2 x width), the scores for the answer's first token and those for its last, padded to the
    longest window.

    In every window the `n_best_size` best first tokens and as many last ones form the spans. Both must be in the
    context, and a span's first token must have its widest surroundings in that window. (BERT's scripts take the best of
    all tokens first and then drop those of the question, which leaves fewer.) A span's score is the sum of both. Of
    equal scores, the earlier window wins, then the better first token. The null score is that of [CLS], the lowest of
    the question's windows. `probability` is the softmax over the n best.
    """
    extra, width = features.extra, outputs.shape[1] // 2
    bounds = np.searchsorted(extra["question"], np.arange(len(chosen) + 1))
    texts, nbest, null_odds = {}, {}, {}
    for number, index in enumerate(chosen):
        question = squad.questions[index]
        windows = range(bounds[number], bounds[number + 1])
        offset = extra["context_offsets"][extra["context"][number]]
        candidates = [
            _candidates(features, window, outputs[window, :width], outputs[window, width:], options)
            for window in windows
        ]
        merged = _Candidates(*(np.concatenate(column) for column in zip(*candidates, strict=True)))
        entries = _best_texts(merged, squad.contexts[question.context], extra, int(offset), options.n_best_size)
        best = entries[0] if entries else None
        is_answered = True
        if options.version_2_with_negative:
            cls_scores = outputs[bounds[number] : bounds[number + 1], [0, width]].astype(np.float64)
            null = cls_scores[cls_scores.sum(axis=1).argmin()]
            entries = sorted([*entries, _entry("", null[0], null[1])], key=_score, reverse=True)
            best_score = _score(best) if best else -np.inf
            # Without any span the only answer is "no answer"; JSON has no infinity.
            null_odds[question.identity] = float(min(null.sum() - best_score, 1e9))
            is_answered = null_odds[question.identity] <= options.null_score_diff_threshold
        texts[question.identity] = best["text"] if best and is_answered else ""
        nbest[question.identity] = _with_probabilities(entries or [_entry("", 0.0, 0.0)])
    return Predictions(texts, nbest, null_odds)


def _candidates(
    features: Features, window: int, start_scores: np.ndarray, end_scores: np.ndarray, options: SquadOptions
) -> _Candidates:
    """The window's spans, best first tokens first; scores as float64."""
    extra = features.extra
    base = int(features.splits[window]) + 1
    begin, length = int(extra["first"][window]), int(features.lengths[window])
    context = slice(base, length - 1)
    own = slice(base + int(extra["best_from"][window]) - begin, base + int(extra["best_to"][window]) - begin)
    firsts = _top(start_scores[own], options.n_best_size) + own.start
    lasts = _top(end_scores[context], options.n_best_size) + context.start
    span = lasts[None, :] - firsts[:, None]
    rows, columns = np.nonzero((span >= 0) & (span < options.max_answer_length))
    firsts, lasts = firsts[rows], lasts[columns]
    return _Candidates(
        start_scores[firsts].astype(np.float64),
        end_scores[lasts].astype(np.float64),
        firsts - base + begin,
        lasts - base + begin,
    )


def _top(scores: np.ndarray, count: int) -> np.ndarray:
    """The indices of the `count` highest, highest first; of equal ones, the earlier first."""
    return np.argsort(-scores, kind="stable")[:count]


def _best_texts(
    candidates: _Candidates, context: str, extra: dict[str, np.ndarray], offset: int, count: int
) -> list[dict[str, Any]]:
    """The best `count` spans with different texts, as entries of the n-best file without their probability."""
    entries: list[dict[str, Any]] = []
    seen = set()
    for place in np.argsort(-(candidates.start_scores + candidates.end_scores), kind="stable"):
        begin = extra["starts"][offset + candidates.firsts[place]]
        text = context[begin : extra["ends"][offset + candidates.lasts[place]]]
        if text in seen:
            continue
        seen.add(text)
        entries.append(_entry(text, candidates.start_scores[place], candidates.end_scores[place]))
        if len(entries) == count:
            break
    return entries


def _entry(text: str, start: float, end: float) -> dict[str, Any]:
    return {"text": text, "probability": 0.0, "start_logit": float(start), "end_logit": float(end)}


def _score(entry: dict[str, Any]) -> float:
    return entry["start_logit"] + entry["end_logit"]


def _with_probabilities(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    scores = np.array([_score(entry) for entry in entries])
    exponentials = np.exp(scores - scores.max())
    for entry, share in zip(entries, exponentials / exponentials.sum(), strict=True):
        entry["probability"] = float(share)
    return entries
