"""Questions and their contexts as sequences: windows over long contexts, answers located by character offsets."""

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

import numpy as np

from cos598d.data.squad.options import SquadOptions
from cos598d.data.squad.read import Question, Squad
from cos598d.data.squad.score import normalize_answer
from cos598d.data.text.encoder import Encoded, TextEncoder
from cos598d.data.text.features import Features, batches
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

_BLOCK = 256  # contexts tokenized at a time, if they are short
_QUESTIONS = 1024  # questions tokenized at a time
# Every question repeats its whole context, so a file's memory grows with both. SQuAD 2.0's 130,000 questions make some
# 25 million tokens; this limit is 1 GiB of ids.
MOST_TOKENS = 1 << 28
# Limits of the search for another occurrence of an answer that begins or ends inside a word piece: characters to either
# side, occurrences examined, and the longest answer. All are far above what the published files need.
_AWAY, _PLACES, _LONGEST_MOVED = 16_384, 100, 1_000


class AnswerStatus(IntEnum):
    """The result of locating a question's first gold answer in tokens."""

    EXACT = 0  # its tokens' text is the answer's, after the official normalization
    IMPOSSIBLE = 1  # the question has no answer
    MOVED = 2  # exact only elsewhere in its context, and inside a word piece at its offset: the nearest place is taken
    INSIDE_TOKEN = 3  # it begins or ends inside a word piece everywhere; its tokens have a little more
    NO_WINDOW = 4  # too long for every window
    WRONG_OFFSET = 5  # the context does not have it at its offset
    NO_ANSWER = 6  # none is given, though there should be one


# A question whose answer has no valid place in its context is useless for training.
UNUSABLE = (AnswerStatus.WRONG_OFFSET, AnswerStatus.NO_ANSWER)


@dataclass(frozen=True)
class WindowOptions:
    """How sequences are cut, in word pieces: the lengths of sequence and question, and the stride of windows."""

    max_seq_length: int = 384
    max_query_length: int = SquadOptions.max_query_length
    doc_stride: int = SquadOptions.doc_stride


def build_windows(
    squad: Squad,
    chosen: Sequence[int],
    encoder: TextEncoder,
    options: WindowOptions,
    training: bool,
    progress: Callable[[int], None] = lambda questions: None,
) -> Features:
    """The `chosen` questions of a file (rising indices of `squad.questions`) as `[CLS] question [SEP] window [SEP]`.

    A context longer than a window is split into overlapping windows, in order. The targets `start_positions` and
    `end_positions`, int64 (windows,), are the first and the last token of the first gold answer in the window's
    sequence. They are 0, the index of [CLS], if the window does not contain all of it. `training` leaves out the
    questions whose answer is not at its offset. `extra` has what prediction needs, all int32 except the offsets:

    finding (questions,)             a `Finding` for each chosen question
    context (questions,)             the index of its context among those that the chosen questions use
    question (windows,)              the index of the window's question among the chosen ones
    first (windows,)                 the index in the context of the window's first token
    best_from, best_to (windows,)    the tokens of the context that have their widest surroundings in this window
    context_offsets (contexts + 1,)  context c's tokens are starts[context_offsets[c]:context_offsets[c + 1]]
    starts, ends (tokens,)           the characters of the context that each of its tokens covers

    `progress` is called with the number of questions done since the last call. Raises UserError if the lengths leave no
    room for the context.
    """
    _check_room(options)
    builder = _Builder(squad.name, encoder, options, training)
    by_context = ((context, list(group)) for context, group in groupby(chosen, lambda i: squad.questions[i].context))
    for block in batches(by_context, _BLOCK, lambda item: len(squad.contexts[item[0]])):
        contexts = encoder.encode_with_offsets([squad.contexts[context] for context, _ in block])
        queries = _queries((squad.questions[i].text for _, group in block for i in group), encoder, options)
        for (context, group), encoded in zip(block, contexts, strict=True):
            builder.add_context(encoded)
            for index in group:
                builder.add_question(squad.questions[index], squad.contexts[context], encoded, next(queries))
        progress(sum(len(group) for _, group in block))
    return builder.features()


def _queries(texts: Iterable[str], encoder: TextEncoder, options: WindowOptions) -> Iterator[np.ndarray]:
    """Each question's tokens, cut to the maximum length."""
    for batch in batches(texts, _QUESTIONS, len):
        for ids in encoder.encode_starts(batch, options.max_query_length):
            yield np.array(ids[: options.max_query_length], dtype=np.int32)


class _Builder:
    """Collects windows in growing arrays, four bytes per token."""

    _COLUMNS = ("question", "first", "best_from", "best_to")

    def __init__(self, name: str, encoder: TextEncoder, options: WindowOptions, training: bool):
        self._name, self._encoder, self._options, self._training = name, encoder, options, training
        self._cls = np.array([encoder.cls_id], dtype=np.int32)
        self._sep = np.array([encoder.sep_id], dtype=np.int32)
        self._tokens = array("i")
        self._rows = array("i")  # of each window _COLUMNS, then length, split, start, end
        self._findings: list[int] = []
        self._context_of: list[int] = []
        self._contexts: list[Encoded] = []

    def add_context(self, encoded: Encoded) -> None:
        self._contexts.append(encoded._replace(ids=encoded.ids[:0]))

    def add_question(self, question: Question, context: str, encoded: Encoded, query: np.ndarray) -> None:
        room = self._options.max_seq_length - len(query) - 3
        tokens = _count_tokens(len(encoded.ids), room, self._options.doc_stride, len(query) + 3)
        if len(self._tokens) + tokens > MOST_TOKENS:
            raise UserError(
                f"{self._name}: up to question {printable(question.identity)!r}, whose context has "
                f"{len(encoded.ids):,} tokens, the windows hold more than {MOST_TOKENS:,} tokens. Cut long contexts "
                "up, raise --doc_stride, or take fewer questions."
            )
        firsts, lengths, best_from, best_to = _spans(len(encoded.ids), room, self._options.doc_stride)
        finding, answer = _find_answer(question, context, encoded)
        held = np.zeros(len(firsts), dtype=bool)
        if answer:
            held = (firsts <= answer[0]) & (answer[1] < firsts + lengths)
            if not held.any():
                finding = AnswerStatus.NO_WINDOW
        number = len(self._findings)
        self._findings.append(finding)
        self._context_of.append(len(self._contexts) - 1)
        if self._training and finding in UNUSABLE:
            return
        base = len(query) + 2
        for place, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
            parts = (self._cls, query, self._sep, encoded.ids[first : first + length], self._sep)
            self._tokens.frombytes(np.concatenate(parts).tobytes())
            labels = (base + answer[0] - first, base + answer[1] - first) if answer and held[place] else (0, 0)
            row = (number, first, int(best_from[place]), int(best_to[place]))
            self._rows.extend((*row, base + length + 1, len(query) + 1, *labels))

    def features(self) -> Features:
        """Raises UserError if there is no window."""
        if not self._rows:
            raise UserError(f"{self._name} has no question whose answer is at its answer_start. Check the file.")
        columns = np.array(self._rows, dtype=np.int32).reshape(-1, len(self._COLUMNS) + 4).T
        lengths, splits, starts, ends = columns[len(self._COLUMNS) :]
        extra = {name: np.ascontiguousarray(columns[place]) for place, name in enumerate(self._COLUMNS)}
        extra |= {
            "finding": np.array(self._findings, dtype=np.int32),
            "context": np.array(self._context_of, dtype=np.int32),
            "context_offsets": _offsets(len(encoded.starts) for encoded in self._contexts),
            "starts": np.concatenate([encoded.starts for encoded in self._contexts]),
            "ends": np.concatenate([encoded.ends for encoded in self._contexts]),
        }
        targets = {"start_positions": starts.astype(np.int64), "end_positions": ends.astype(np.int64)}
        tokens, splits = np.frombuffer(self._tokens, dtype=np.int32), np.ascontiguousarray(splits)
        layout, pad_id = self._encoder.layout, self._encoder.pad_id
        return Features(tokens, _offsets(lengths), splits, targets, layout, pad_id, extra)


def _offsets(sizes: Iterable[int]) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.fromiter(sizes, dtype=np.int64))])


def _check_room(options: WindowOptions) -> None:
    room = options.max_seq_length - options.max_query_length - 3
    if room < 1:
        raise UserError(
            f"A question of {options.max_query_length} tokens and its 3 special tokens leave no room for text in "
            f"{options.max_seq_length}. Raise --max_seq_length or lower --max_query_length."
        )


def _find_answer(question: Question, context: str, encoded: Encoded) -> tuple[AnswerStatus, tuple[int, int] | None]:
    """The status of the first gold answer, and its first and last token in the context."""
    if question.impossible:
        return AnswerStatus.IMPOSSIBLE, None
    if not question.answers:
        return AnswerStatus.NO_ANSWER, None
    text, begin = question.answers[0]
    if begin < 0 or not text or not context.startswith(text, begin):
        return AnswerStatus.WRONG_OFFSET, None
    tokens, is_exact = _tokens_of(text, begin, context, encoded)
    if tokens is None:  # only white space, or characters that the vocabulary drops
        return AnswerStatus.WRONG_OFFSET, None
    if is_exact:
        return AnswerStatus.EXACT, tokens
    # Annotators mark whole words: "six" does not mean a part of "the sixth" if "six" occurs elsewhere.
    places = sorted(_occurrences(text, begin, context), key=lambda place: abs(place - begin))
    for place in places[:_PLACES]:
        elsewhere, is_exact = _tokens_of(text, place, context, encoded)
        if is_exact:
            return AnswerStatus.MOVED, elsewhere
    return AnswerStatus.INSIDE_TOKEN, tokens


def _tokens_of(text: str, begin: int, context: str, encoded: Encoded) -> tuple[tuple[int, int] | None, bool]:
    """The first and last token that `text` at index `begin` touches, and whether they contain nothing else."""
    first = int(np.searchsorted(encoded.ends, begin, side="right"))
    last = int(np.searchsorted(encoded.starts, begin + len(text), side="left")) - 1
    if last < first:
        return None, False
    cut = context[encoded.starts[first] : encoded.ends[last]]
    return (first, last), normalize_answer(cut) == normalize_answer(text)


def _occurrences(text: str, begin: int, context: str) -> Iterator[int]:
    """The indices of the text in the context, at most _AWAY from `begin`."""
    if len(text) > _LONGEST_MOVED:
        return
    end = begin + _AWAY + len(text)
    place = context.find(text, max(0, begin - _AWAY), end)
    while place >= 0:
        yield place
        place = context.find(text, place + 1, end)


def _count_tokens(tokens: int, room: int, stride: int, others: int) -> int:
    """The number of tokens in all windows over a context; each has `others` tokens that are not of the context."""
    step = min(room, stride)
    windows = 1 + max(0, -((room - tokens) // step))
    return windows * (room + others) - max(0, room - tokens + (windows - 1) * step)


@functools.lru_cache(maxsize=4096)
def _spans(tokens: int, room: int, stride: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The windows of at most `room` tokens over a context: where each begins, its length, and its best tokens' range.

    A token belongs to the window in which its shorter side has the most context, as in BERT's scripts. A window's best
    tokens are contiguous, since that measure rises and falls only once.
    """
    firsts = [0]
    while firsts[-1] + room < tokens:
        firsts.append(firsts[-1] + min(room, stride))
    begin = np.array(firsts, dtype=np.int32)
    length = np.minimum(tokens - begin, room).astype(np.int32)
    # Each window looks only at its own tokens, so that time and memory grow with the windows' tokens.
    best, best_room = np.zeros(tokens, dtype=np.int32), np.full(tokens, -1.0)
    around = np.minimum(np.arange(room), np.arange(room)[::-1])
    for window, (first, size) in enumerate(zip(firsts, length.tolist(), strict=True)):
        here = slice(first, first + size)
        room_around = (around if size == room else np.minimum(np.arange(size), np.arange(size)[::-1])) + 0.01 * size
        better = room_around > best_room[here]
        best[here][better] = window
        best_room[here][better] = room_around[better]
    windows = np.arange(len(firsts))
    return begin, length, np.searchsorted(best, windows, "left"), np.searchsorted(best, windows, "right")
