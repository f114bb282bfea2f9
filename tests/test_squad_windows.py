"""SQuAD's features are windows as the scripts of BERT cut them, and scores of their tokens become answers."""

import json
import random
import unicodedata

import numpy as np
import pytest
from data_files import found_in, question, squad_of
from test_features import ToyEncoder

from cos598d.data.examples import spread
from cos598d.data.squad.options import SquadOptions
from cos598d.data.squad.predict import predict
from cos598d.data.squad.windows import AnswerStatus, WindowOptions, _spans, build_windows
from cos598d.data.text.layout import LAYOUTS
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "café", "cafe", "stands", "16", "##land", "island", "who"]
PIECES += ["what", *"?.,-'", *(form + letter for letter in LETTERS + "0123456789" for form in ("", "##"))]
LOW = -9.0


def bert_encoder():
    return load_encoder("bert", PIECES, True)


@pytest.fixture
def encoder():
    return bert_encoder()


def built(encoder, paragraph, training=False, **options):
    squad = squad_of(paragraph)
    return build_windows(squad, range(len(squad.questions)), encoder, WindowOptions(**options), training)


def text_of_labels(features, window, context):
    """The part of the context that a window's labels mark, or None if they point to [CLS]."""
    start, end = (int(features.targets[f"{name}_positions"][window]) for name in ("start", "end"))
    if start == 0 and end == 0:
        return None
    base = int(features.splits[window]) + 1
    first = int(features.extra["first"][window])
    number = features.extra["context"][features.extra["question"][window]]
    offset = int(features.extra["context_offsets"][number])
    begin, stop = (
        features.extra[name][offset + first + place - base] for name, place in (("starts", start), ("ends", end))
    )
    return context[begin:stop]  # fmt: skip


@pytest.mark.long
def test_offsets_are_ordered_and_inside_any_text():
    # Every assigned character next to a letter, including those that grow, shrink, vanish or combine.
    encoder = {lower: load_encoder("bert", [*PIECES, "ß", "Ω"], lower) for lower in (False, True)}
    characters = [chr(code) for code in range(0x30000) if unicodedata.category(chr(code))[0] != "C"]
    dice = random.Random(5)
    dice.shuffle(characters)
    texts = ["".join(characters[i : i + 40]) for i in range(0, len(characters), 40)]
    texts += ["Iİı ΑΣ ΑΣ. ǅ ﬁ ²½ [SEP] x[UNK]y e\u0301\u0323a Å \u0301a", "", "  \n\u200b ", "강남 が ﷺ"]
    for lower, one in encoder.items():
        for text, encoded, ids in zip(texts, one.encode_with_offsets(texts), one.encode_many(texts), strict=True):
            assert encoded.ids.tolist() == ids
            assert (encoded.starts < encoded.ends).all()
            assert (encoded.starts >= 0).all()
            assert (encoded.ends <= len(text)).all()
            assert (np.diff(encoded.starts) >= 0).all()
            assert (np.diff(encoded.ends) >= 0).all()
            assert lower or not any(text[begin].isspace() for begin in encoded.starts)


def test_a_short_context_is_one_window_of_question_and_context(encoder):
    context = "the cafe stands."
    features = built(encoder, (context, [question("q", "who?", [found_in(context, "cafe")])]))
    names = [PIECES[token] for token in features.tokens]
    assert names == ["[CLS]", "who", "?", "[SEP]", "t", "##h", "##e", "cafe", "stands", ".", "[SEP]"]
    assert (features.targets["start_positions"].tolist(), features.targets["end_positions"].tolist()) == ([7], [7])
    batch = features.collate([0])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]
    assert features.extra["finding"].tolist() == [AnswerStatus.EXACT]


def test_windows_of_a_long_context_label_each_complete_answer(encoder):
    context = " ".join(LETTERS[i % 26] for i in range(50))
    places = [found_in(context, "a b", 1), found_in(context, "g h", 0)]  # tokens 26-27 and 6-7
    asked = [question(str(i), "who", [place]) for i, place in enumerate(places)]
    features = built(encoder, (context, asked), max_seq_length=24, max_query_length=4, doc_stride=8)
    # One token of question and three special ones leave 20 of 24.
    assert features.extra["first"].tolist() == [0, 8, 16, 24, 32] * 2
    assert (features.lengths - 4).tolist() == [20, 20, 20, 20, 18] * 2
    labelled = [text_of_labels(features, window, context) for window in range(10)]
    assert labelled == [None, "a b", "a b", "a b", None, "g h", None, None, None, None]
    assert features.extra["question"].tolist() == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    ("tokens", "room", "stride"), [(50, 20, 8), (21, 20, 20), (243, 100, 30), (99, 10, 64), (7, 9, 1)]
)
def test_each_token_belongs_to_the_window_with_its_widest_context(tokens, room, stride):  # fmt: skip
    firsts, lengths, best_from, best_to = _spans(tokens, room, stride)
    assert (lengths <= room).all()
    assert int(firsts[-1] + lengths[-1]) == tokens
    for token in range(tokens):
        scores = []
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
            left, right = token - first, first + length - 1 - token
            scores.append(min(left, right) + 0.01 * length if left >= 0 and right >= 0 else -1)
        owners = [i for i in range(len(firsts)) if best_from[i] <= token < best_to[i]]
        assert owners == [scores.index(max(scores))]


def test_a_repeated_answer_is_found_at_its_offset(encoder):
    context = "in 18 , 18 and 18"
    asked = [question(str(i), "what", [found_in(context, "18", i)]) for i in range(3)]
    features = built(encoder, (context, asked))
    assert features.targets["start_positions"].tolist() == [5, 8, 13]


def test_inexact_answers_are_counted_by_cause(encoder):
    context = "the island stands 6 , 16 lands , 61"
    asked = [
        question("exact", "what", [found_in(context, "16")]),
        question("moved", "what", [("6", context.index("16") + 1)]),
        question("inside", "what", [found_in(context, "sland")]),
        question("offset", "what", [("16", 3)]),
        question("outside", "what", [("6", 5000)]),
        question("none", "what"),
        question("impossible", "what", [found_in(context, "16")], is_impossible=True),
    ]
    features = built(encoder, (context, asked))
    assert [AnswerStatus(value).name for value in features.extra["finding"]] == [
        "EXACT", "MOVED", "INSIDE_TOKEN", "WRONG_OFFSET", "WRONG_OFFSET", "NO_ANSWER", "IMPOSSIBLE"
    ]  # fmt: skip
    found = [text_of_labels(features, window, context) for window in range(7)]
    assert found == ["16", "6", "island", None, None, None, None]
    training = built(encoder, (context, asked), training=True)
    assert training.extra["question"].tolist() == [0, 1, 2, 6]
    assert training.extra["finding"].tolist() == features.extra["finding"].tolist()


def test_an_answer_longer_than_every_window_has_its_own_status(encoder):
    context = " ".join(LETTERS)
    asked = [question("q", "who", [found_in(context, context)])]
    features = built(encoder, (context, asked), max_seq_length=16, max_query_length=4, doc_stride=4)
    assert features.extra["finding"].tolist() == [AnswerStatus.NO_WINDOW]
    assert not features.targets["end_positions"].any()


def test_a_long_question_is_cut_and_a_length_without_room_is_refused(encoder):
    features = built(encoder, ("a b c", [question("q", LETTERS, [("a", 0)])]), max_query_length=2)
    assert features.splits.tolist() == [3]
    with pytest.raises(UserError, match=r"leave no room for text in 12\. Raise --max_seq_length"):
        built(encoder, ("a", [question("q", "who", [("a", 0)])]), max_seq_length=12, max_query_length=9)


def test_a_file_without_a_usable_question_is_refused(encoder):
    with pytest.raises(UserError, match="has no question.*answer_start"):
        built(encoder, ("a b", [question("q", "who", [("b", 0)])]), training=True)


def test_model_types_without_offsets_are_refused():
    with pytest.raises(UserError, match="Choose --model_type bert or distilbert"):
        ToyEncoder(LAYOUTS["xlnet"]).encode_with_offsets(["a"])


def test_a_limit_takes_examples_spread_evenly():
    assert spread(10, 4).tolist() == [0, 2, 5, 7]
    assert spread(3, 5).tolist() == spread(3, None).tolist() == [0, 1, 2]


class Scored:
    """A file's features and scores to be set by window and token of the context."""

    def __init__(self, context, count=1, **options):
        asked = [question(f"q{i}", "x?", [(context.split()[0], 0)]) for i in range(count)]
        self.squad = squad_of((context, asked))
        self.chosen = list(range(count))
        self.features = build_windows(self.squad, self.chosen, bert_encoder(), WindowOptions(**options), False)
        self.width = int(self.features.lengths.max())
        self.outputs = np.full((len(self.features), 2 * self.width), LOW, dtype=np.float32)

    def set(self, token, start=None, end=None, window=0):
        place = int(self.features.splits[window]) + 1 + token - int(self.features.extra["first"][window])
        self.set_position(place, start, end, window)

    def set_position(self, place, start=None, end=None, window=0):
        if start is not None:
            self.outputs[window, place] = start
        if end is not None:
            self.outputs[window, self.width + place] = end

    def predict(self, **options):
        return predict(self.squad, self.chosen, self.features, self.outputs, SquadOptions(**options))


def test_an_answer_is_cut_unchanged_from_the_context():
    scored = Scored("Un  Café\u0301,\n(Élan) x")
    # Tokens: u ##n cafe , [UNK for the bracket] e ##l ...
    scored.set(2, start=3.0)
    scored.set(6, end=2.0)
    predicted = scored.predict()
    assert predicted.texts == {"q0": "Café\u0301,\n(Él"}
    best = predicted.nbest["q0"][0]
    assert (best["text"], best["start_logit"], best["end_logit"]) == ("Café\u0301,\n(Él", 3.0, 2.0)
    assert predicted.null_odds == {}


def test_spans_are_inside_the_context_ordered_and_short_enough():
    scored = Scored("a b c d e f")
    scored.set_position(1, start=9.0, end=9.0)  # the question
    scored.set_position(0, start=9.0, end=9.0)  # [CLS]
    scored.set_position(scored.width - 1, start=9.0, end=9.0)  # [SEP]
    scored.set(3, start=5.0)
    scored.set(1, end=5.0)  # before the best first token
    scored.set(5, end=1.0)
    assert scored.predict().texts == {"q0": "d e f"}
    scored.set(0, start=4.5)
    assert scored.predict().texts == {"q0": "a b"}
    assert scored.predict(max_answer_length=1).texts["q0"] in {"d", "b"}
    lengths = {len(entry["text"].split()) for entry in scored.predict(max_answer_length=2).nbest["q0"]}
    assert lengths == {1, 2}


def test_an_answer_comes_from_the_window_with_its_widest_context():
    context = " ".join(LETTERS)
    scored = Scored(context, max_seq_length=17, max_query_length=2, doc_stride=6)  # 12 tokens of context in a window
    assert scored.features.extra["first"].tolist() == [0, 6, 12, 18]
    scored.set(9, start=5.0, end=5.0, window=0)  # "j": wider surroundings in window 1
    scored.set(10, start=1.0, end=1.0, window=1)
    assert scored.predict().texts == {"q0": "k"}
    scored.set(9, start=2.0, end=2.0, window=1)
    assert scored.predict().texts == {"q0": "j"}


def test_the_n_best_differ_in_text_and_their_probabilities_are_a_softmax():
    scored = Scored("b a b a")
    scored.set(0, start=2.0, end=2.0)
    scored.set(2, start=1.5, end=1.5)
    entries = scored.predict(n_best_size=3).nbest["q0"]
    assert [entry["text"] for entry in entries] == ["b", "b a b", "b a"]
    scores = np.array([entry["start_logit"] + entry["end_logit"] for entry in entries])
    assert scores.tolist() == [4.0, 3.5, 2.0 + LOW]
    wanted = np.exp(scores) / np.exp(scores).sum()
    assert [entry["probability"] for entry in entries] == pytest.approx(wanted.tolist())


def test_equal_scores_go_to_the_first():
    scored = Scored("a b c")
    scored.outputs[:] = 0.0
    assert scored.predict().texts == {"q0": "a"}


def test_version_2_gives_no_answer_above_the_null_threshold():
    context = " ".join(LETTERS)
    scored = Scored(context, max_seq_length=17, max_query_length=2, doc_stride=6)
    for window, score in enumerate((4.0, 1.0, 2.0, 3.0)):
        scored.set_position(0, start=score, end=score, window=window)
    scored.set(4, start=0.5, end=1.0)
    predicted = scored.predict(version_2_with_negative=True)
    # The lowest null score of the windows, 2, less the best answer's, 1.5.
    assert predicted.null_odds == {"q0": pytest.approx(0.5)}
    assert predicted.texts == {"q0": ""}
    assert scored.predict(version_2_with_negative=True, null_score_diff_threshold=0.5).texts == {"q0": "e"}
    assert [entry["text"] for entry in predicted.nbest["q0"][:2]] == ["", "e"]
    assert scored.predict().texts == {"q0": "e"}


def test_a_question_gets_an_answer_if_its_context_has_no_token(encoder):
    squad = squad_of(("\u200b.\u200b", [question("q", "x", [("\u200b", 0)])]), ("\u200b", [question("r", "x")]))
    features = build_windows(squad, [0, 1], encoder, WindowOptions(), False)
    outputs = np.zeros((2, 2 * int(features.lengths.max())), dtype=np.float32)
    predicted = predict(squad, [0, 1], features, outputs, SquadOptions())
    assert predicted.texts == {"q": ".", "r": ""}
    predicted = predict(squad, [0, 1], features, outputs, SquadOptions(version_2_with_negative=True))
    json.dumps(predicted.null_odds, allow_nan=False)
    assert predicted.texts["r"] == ""


def test_answers_belong_to_their_own_question():
    scored = Scored("a b c", count=3)
    for window, token in enumerate((2, 0, 1)):
        scored.set(token, start=1.0, end=1.0, window=window)
    assert scored.predict().texts == {"q0": "c", "q1": "a", "q2": "b"}
