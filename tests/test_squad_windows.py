"""SQuAD's features: windows as the scripts of BERT cut them, and answers found through character offsets."""

import random
import unicodedata

import numpy as np
import pytest
from squad_files import found_in, question, squad_of
from test_features import ToyEncoder

from cos598d.data.examples import spread
from cos598d.data.squad.windows import AnswerStatus, WindowOptions, _spans, build_windows
from cos598d.data.text.layout import LAYOUTS
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "café",
    "cafe",
    "stands",
    "16",
    "##land",
    "island",
    "who",
    "what",
]
PIECES += "?.,-'"
PIECES += [form + letter for letter in LETTERS + "0123456789" for form in ("", "##")]


@pytest.fixture
def encoder():
    return load_encoder("bert", PIECES, True)


def built(encoder, paragraph, training=False, **options):
    squad = squad_of(paragraph)
    return build_windows(squad, range(len(squad.questions)), encoder, WindowOptions(**options), training)


def text_of_labels(features, window, context):
    """The part of the context that a window's labels stand for, or None where they point to [CLS]."""
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
def test_offsets_of_any_text_cut_out_what_was_read():
    # Every assigned character beside a letter, also such as grow, shrink, vanish or combine.
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


def test_a_long_context_is_cut_into_windows_and_every_whole_answer_is_labelled(encoder):
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
def test_each_token_belongs_to_the_window_of_its_widest_surroundings(tokens, room, stride):  # fmt: skip
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


def test_a_repeated_answer_is_found_at_its_offset_and_not_at_its_first_place(encoder):
    context = "in 18 , 18 and 18"
    asked = [question(str(i), "what", [found_in(context, "18", i)]) for i in range(3)]
    features = built(encoder, (context, asked))
    assert features.targets["start_positions"].tolist() == [5, 8, 13]


def test_answers_that_cannot_be_exact_are_counted_by_cause(encoder):
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


def test_an_answer_longer_than_every_window_is_said_so(encoder):
    context = " ".join(LETTERS)
    asked = [question("q", "who", [found_in(context, context)])]
    features = built(encoder, (context, asked), max_seq_length=16, max_query_length=4, doc_stride=4)
    assert features.extra["finding"].tolist() == [AnswerStatus.NO_WINDOW]
    assert not features.targets["end_positions"].any()


def test_a_long_question_is_cut_and_lengths_without_room_are_refused(encoder):
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
