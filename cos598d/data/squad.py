"""SQuAD 1.1 and 2.0: its files, windows over long contexts, and answers cut from the text."""

import json
import os
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding

from cos598d.data.encoders import TextEncoder
from cos598d.data.examples import Examples, Texts, spread
from cos598d.data.metrics import Metric
from cos598d.data.squad_scores import version_1, version_2
from cos598d.data.task import Scores, Task, fetch_command, place_of
from cos598d.errors import UserError, first_line
from cos598d.terminal.reading import read_json

N_BEST, MOST_QUERY, MOST_ANSWER = 20, 64, 30  # spans of a window; word pieces of a question, and of an answer
_BLOCK = 256  # questions that are encoded at a time


class Question(NamedTuple):
    """One question. `answers` are the gold ones, each with the index of its first character; none if impossible."""

    identity: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]
    impossible: bool = False


class Windows(Texts):
    """Sequences `[CLS] question [SEP] window [SEP]`.

    questions: int32 (windows,), which question each is of. offsets: int32 (tokens, 2), for each token the characters of
    the context that it covers; (0, 0) for tokens outside of the context.
    """

    def __init__(self, questions: Sequence[int], offsets: Sequence[np.ndarray], *texts: Any):
        super().__init__(*texts)
        self.questions, self.offsets = np.array(questions), np.concatenate(offsets)

    def arrays(self) -> dict[str, np.ndarray]:
        return super().arrays() | {"questions": self.questions, "offsets": self.offsets}


class SquadTask(Task):
    """Questions answered by a span of their context; in 2.0 also by "no answer"."""

    name = "squad"
    head = "question_answering"
    defaults = {"max_seq_length": 384, "total_train_batch_size": 16}

    def __init__(self, with_impossible: bool = False, stride: int = 128, null_threshold: float = 0.0):
        self.with_impossible, self.stride, self.null_threshold = with_impossible, stride, null_threshold
        self._version = "2.0" if with_impossible else "1.1"
        self.metric = Metric(("f1", "exact" if with_impossible else "exact_match"), lambda predictions, labels: {})
        self._asked, self._files = dict[str, list[Question]](), dict[str, Path]()

    def find(self, data_dir: str | None) -> str:
        """The folder of train-v1.1.json and dev-v1.1.json (v2.0 with impossible questions), or whose names begin so."""
        folder = place_of(data_dir, "SQUAD_DIR", os.environ)
        if folder is None:
            self._files = {part: Path(str(files("cos598d.data.samples") / f"squad-{part}.json")) for part in self.parts}
            return f"the bundled sample of SQuAD {self._version}"
        for part in self.parts:
            known = folder.glob(f"{part}-v{self._version}*.json")
            self._files[part] = min(
                known, key=lambda file: len(file.name), default=folder / f"{part}-v{self._version}.json"
            )
        return str(folder)

    def load(self, part: str, encoder: Any, most: int, limit: int | None = None) -> Windows:
        asked = [one for one in read_questions(self._files[part]) if self.with_impossible or not one.impossible]
        self._asked[part] = [asked[place] for place in spread(len(asked), limit)]
        return build_windows(self._asked[part], encoder, most, self.stride, part == "train")

    def widths(self, examples: Examples) -> tuple[int, ...]:
        return (int(examples.lengths.max()),) * 2

    def score(self, part: str, outputs: np.ndarray, examples: Examples) -> Scores:
        assert isinstance(examples, Windows)
        asked = self._asked[part]
        answers, null_odds = predict(asked, examples, outputs, self.with_impossible, self.null_threshold)
        if not self.with_impossible:
            return Scores(version_1(golds_of(asked), answers), {"predictions.json": answers})
        found = version_2(golds_of(asked), answers, null_odds, applies_threshold=False)
        return Scores(found, {"predictions.json": answers, "null_odds.json": null_odds})


def read_questions(file: Path) -> list[Question]:
    """The questions of a SQuAD file of either version. Raises UserError."""
    try:
        found = list(_questions(json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why, fetch = f"{type(error).__name__}: {first_line(error)}", fetch_command("SQuAD1.1")
        raise UserError(f"{file} is not a SQuAD file ({why}). Give a complete one, or use {fetch}.") from error
    if not found:
        raise UserError(f"{file} has no question. Give a SQuAD file.")
    if len({one.identity for one in found}) < len(found):
        raise UserError(f"{file} has two questions with one id. Give every question its own.")
    return found


def _questions(content: dict[str, Any]) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                # An empty list of answers means "no answer", as in the official script; the test sets have no list.
                impossible = bool(asked.get("is_impossible")) or asked.get("answers") == []
                given = () if impossible else asked.get("answers", ())
                answers = tuple((answer["text"], int(answer["answer_start"])) for answer in given)
                yield Question(asked["id"], asked["question"], paragraph["context"], answers, impossible)


def golds_of(asked: Sequence[Question]) -> dict[str, list[str]]:
    """Each question's gold answers by its id."""
    return {question.identity: [text for text, _ in question.answers] for question in asked}


def build_windows(
    asked: Sequence[Question], encoder: TextEncoder, most: int, stride: int, training: bool = False
) -> Windows:
    """All windows of the questions, as sequences of at most `most` tokens, which is at least MOST_QUERY + 4.

    1. A question is cut to MOST_QUERY tokens.
    2. A context that is longer than the rest is cut into windows, each `stride` tokens after the one before.
    3. Targets are the first and the last token that the first gold answer touches. They are 0, the index of [CLS], if
       the window does not contain all of it. `training` leaves out questions whose answer is not where the file says.
    """
    rows = list(_windows(asked, encoder, most, stride, training))
    if not rows:
        raise UserError("no question has its answer at its answer_start. Check the SQuAD file.")
    tokens, offsets, splits, questions, begins, ends = zip(*rows, strict=True)
    targets = {"start_positions": np.array(begins), "end_positions": np.array(ends)}
    return Windows(questions, offsets, tokens, splits, targets, encoder)


Window = tuple[np.ndarray, np.ndarray, int, int, int, int]  # ids, offsets, split, question, first and last token


def _windows(
    asked: Sequence[Question], encoder: TextEncoder, most: int, stride: int, training: bool
) -> Iterator[Window]:
    for start in range(0, len(asked), _BLOCK):  # some at a time, whose encodings then fit into memory
        block = asked[start : start + _BLOCK]
        contexts = list(dict.fromkeys(question.context for question in block))
        known = dict(zip(contexts, map(_arrays, encoder.pieces(contexts)), strict=True))
        queries = encoder.pieces([question.text for question in block])
        for number, (question, query) in enumerate(zip(block, queries, strict=True), start):
            ids, offsets = known[question.context]
            answer = _tokens_of(question, offsets)
            if answer is None and training and not question.impossible:
                continue
            head = [encoder.cls_id, *query.ids[:MOST_QUERY], encoder.sep_id]
            base, room = len(head), most - len(head) - 1
            last = max(0, len(ids) - room)
            for first in (0, *range(min(room, stride), last + min(room, stride), min(room, stride))):
                tokens = np.array([*head, *ids[first : first + room], encoder.sep_id])
                covers = np.zeros((len(tokens), 2), dtype=np.int32)
                covers[base:-1] = offsets[first : first + room]
                is_held = answer is not None and first <= answer[0] and answer[1] < first + room
                begin, end = (base + place - first for place in answer) if answer and is_held else (0, 0)
                yield tokens, covers, base, number, begin, end


def _arrays(encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
    """A text's ids, and the characters that each covers, (tokens, 2)."""
    return np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)


def _tokens_of(question: Question, offsets: np.ndarray) -> tuple[int, int] | None:
    """The first and the last token of the context that the first gold answer touches; None if it is not there."""
    text, begin = question.answers[0] if question.answers else ("", 0)
    if not text or begin < 0 or not question.context.startswith(text, begin):
        return None
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], begin + len(text), side="left")) - 1
    return (first, last) if first <= last else None


def predict(
    asked: Sequence[Question], windows: Windows, outputs: np.ndarray, with_impossible: bool, null_threshold: float
) -> tuple[dict[str, str], dict[str, float]]:
    """Each question's answer, and the odds that it has none, by its id.

    outputs: float (windows, 2 x width), scores of first tokens and of last ones. The answer is the span with the
    highest sum of both, among the N_BEST first and as many last tokens of each window; of equal ones the earliest. The
    odds are the score of [CLS], the lowest of the question's windows, minus that sum. With impossible questions the
    answer is "" if they are above `null_threshold`.
    """
    width = outputs.shape[1] // 2
    best = {question.identity: (-np.inf, "") for question in asked}
    null = dict.fromkeys(best, np.inf)
    for window, scores in enumerate(outputs.astype(np.float64)):
        question, length = asked[windows.questions[window]], windows.lengths[window]
        start = windows.starts[window]
        offsets = windows.offsets[start : start + length]
        begins, ends = scores[:length], scores[width : width + length]
        null[question.identity] = min(null[question.identity], begins[0] + ends[0])
        context = np.arange(windows.splits[window], length - 1)
        firsts, lasts = (context[np.argsort(-side[context], kind="stable")[:N_BEST]] for side in (begins, ends))
        sums, span = begins[firsts][:, None] + ends[lasts], lasts - firsts[:, None]
        sums[(span < 0) | (span >= MOST_ANSWER)] = -np.inf
        if sums.size and sums.max() > best[question.identity][0]:
            first, last = np.unravel_index(sums.argmax(), sums.shape)
            text = question.context[offsets[firsts[first], 0] : offsets[lasts[last], 1]]
            best[question.identity] = float(sums.max()), text
    # Without any span the only answer is "no answer"; JSON has no infinity.
    odds = {identity: float(min(null[identity] - value, 1e9)) for identity, (value, _) in best.items()}
    texts = {
        identity: "" if with_impossible and odds[identity] > null_threshold else text
        for identity, (_, text) in best.items()
    }
    return texts, odds


def score_file(data: Path, predictions: Path, null_odds: Path | None = None) -> tuple[dict[str, float], list[str]]:
    """The official scores of a predictions file, {question id: answer}, and remarks on mismatches.

    If `data` has questions without an answer, 2.0's rules apply, else 1.1's. Raises UserError for files that cannot be
    scored.
    """
    asked = read_questions(data)
    answers, golds = _read(predictions, str, "{question id: answer}"), golds_of(asked)
    missing, strange = golds.keys() - answers.keys(), answers.keys() - golds.keys()
    if len(missing) == len(golds):
        raise UserError(f"{predictions} answers no question of {data}. Give the predictions for this data.")
    wrong = f"{len(missing):,} of {len(golds):,} questions have no prediction and count as wrong"
    ignored = f"{len(strange):,} predictions are for other questions and are ignored"
    pairs = ((wrong, missing), (ignored, strange))
    remarks = [f"{words}: {', '.join(sorted(which)[:3])}" for words, which in pairs if which]
    if not any(question.impossible for question in asked):
        if null_odds:
            raise UserError(f"{data} is SQuAD 1.1, which has no null odds. Leave --null_odds out.")
        return version_1(golds, answers), remarks
    odds = _read(null_odds, (int, float), "{question id: number}") if null_odds else None
    if odds is not None and (without := golds.keys() - odds.keys()):
        raise UserError(f"{null_odds} has no number for {len(without):,} questions, such as {min(without)}. Add them.")
    return version_2(golds, answers, odds), remarks


def _read(file: Path, kind: type | tuple[type, ...], words: str) -> dict[str, Any]:
    """A JSON object of entries of this kind by question id; `words` describes it. Raises UserError."""
    try:
        found = dict(read_json(file))
        if (odd := next((one for one, entry in found.items() if not isinstance(entry, kind)), None)) is not None:
            raise ValueError(f"the entry of {odd} is another")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is not {words} ({first_line(error)}). Give such a file.") from error
    return found
