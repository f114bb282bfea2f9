"""From scores to answers: which spans may be given, in which order, and cut from the text as it stands."""

import json

import numpy as np
import pytest
from squad_files import question, squad_of

from cos598d.data.squad.options import SquadOptions
from cos598d.data.squad.predict import predict
from cos598d.data.squad.windows import WindowOptions, build_windows
from cos598d.data.text.tokenization import load_encoder

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS), "cafe", "?", "."]
LOW = -9.0


class Scored:
    """A file's features and scores to be set by window and token of the context."""

    def __init__(self, context, count=1, **options):
        encoder = load_encoder("bert", PIECES, True)
        asked = [question(f"q{i}", "x?", [(context.split()[0], 0)]) for i in range(count)]
        self.squad = squad_of((context, asked))
        self.chosen = list(range(count))
        self.features = build_windows(self.squad, self.chosen, encoder, WindowOptions(**options), False)
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


def test_the_best_span_is_cut_from_the_context_as_it_is_written():
    scored = Scored("Un  Café\u0301,\n(Élan) x")
    # Tokens: u ##n cafe [UNK for the comma] ( e ##l ...
    scored.set(2, start=3.0)
    scored.set(6, end=2.0)
    predicted = scored.predict()
    assert predicted.texts == {"q0": "Café\u0301,\n(Él"}
    best = predicted.nbest["q0"][0]
    assert (best["text"], best["start_logit"], best["end_logit"]) == ("Café\u0301,\n(Él", 3.0, 2.0)
    assert predicted.null_odds == {}


def test_no_span_begins_in_the_question_ends_before_it_begins_or_is_too_long():
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


def test_an_answer_comes_from_the_window_of_its_first_tokens_widest_surroundings():
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


def test_version_2_answers_unless_nothing_is_surer_by_the_threshold():
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


def test_every_question_gets_an_answer_even_where_its_context_has_no_token():
    encoder = load_encoder("bert", PIECES, True)
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
