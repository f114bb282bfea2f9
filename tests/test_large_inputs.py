"""Very long texts: memory grows with the input and no faster, and an error names the place beyond a limit.

One process of its own prints how much memory each case adds.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from data_files import found_in, question, refusal, squad_of

from cos598d.data.glue import read as glue
from cos598d.data.squad import windows
from cos598d.data.squad.windows import AnswerStatus, WindowOptions, build_windows
from cos598d.data.text import characters
from cos598d.data.text import encoder as encoders
from cos598d.data.text import features as features_module
from cos598d.data.text.features import build_features
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fox", "the", "?", "'", "!", "who", "is"]
PIECES += [form + letter for letter in LETTERS for form in ("", "##")]
CASES = """
import resource, sys
import numpy as np
from test_large_inputs import PIECES, build_features, build_windows, load_encoder, question, squad_of, WindowOptions
encoder = load_encoder("bert", PIECES, True)

def rows(*texts):
    examples = [(first, second, {"labels": 0}) for first, second in texts]
    return build_features(iter(examples), encoder, 128, {"labels": np.int64})

def windows(context, *questions):
    squad = squad_of((context, list(questions)))
    return build_windows(squad, range(len(squad.questions)), encoder, WindowOptions(64, 8, 16), True)

who = question("q", "who?", [("fox", 4)])
CASES = {
    "warm": lambda: windows("the fox " * 1000, who),
    "a row of many words": lambda: rows(("the fox " * 500_000, "fox " * 10)),
    "a row of one word": lambda: rows(("x" * 4_000_000, "fox" * 1_000_000)),
    "many long rows": lambda: rows(*[("the fox " * 10_000, None)] * 50),
    "a long context": lambda: windows("the fox " * 100_000, who),
    "a context of one word": lambda: windows("the fox " + "x" * 4_000_000, who),
    "a long question": lambda: windows("the fox", question("q", "who is " * 500_000, [("fox", 4)])),
}
for name, case in CASES.items():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, name, flush=True)
"""


@pytest.fixture
def encoder():
    return load_encoder("bert", PIECES, True)


def test_long_texts_take_memory_in_proportion(start):
    """Each is of 1 to 4 MB. A table of windows by tokens would be gigabytes, and a row tokenized whole half of one."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n{CASES}"
    program = start("cases", ["-c", limited], {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])})
    assert program.wait() == 0, program.text[-2000:]
    took = {name: int(megabytes) for megabytes, name in (line.split(" ", 1) for line in program.text.splitlines())}
    assert len(took) == 7
    for name, megabytes in took.items():
        assert megabytes < 220, f"{name}: {megabytes} MB"


HARD = [
    "the fox is who? [SEP] the\u2028fox\u2029is 'Ärger' [MASK]" * 3,
    "x" * 101 + " " + "x" * 100 + " fox",
    "  the" + " " * 40 + "fox   ",
    "y" * 300 + "\u2028" + "x" * 300,
    "y" * 300,
    "e\u0301\u0327a\u0327\u0301 \u1e69 fox\u0301" * 9,
    "",
    " ",
]


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_ids_and_offsets_do_not_depend_on_stretches_and_remembered_words(size, lower_case, monkeypatch):
    whole = load_encoder("bert", PIECES, lower_case)
    ids, places = whole.encode_many(HARD), whole.encode_with_offsets(HARD)
    monkeypatch.setattr(encoders, "_MOST_WORDS", size)
    monkeypatch.setattr(characters, "_STRETCH", size)
    encoder = load_encoder("bert", PIECES, lower_case)
    assert encoder.encode_many(HARD) == ids
    for ours, theirs in zip(encoder.encode_with_offsets(HARD), places, strict=True):
        for column, expected in zip(ours, theirs, strict=True):
            assert np.array_equal(column, expected)
            assert column.dtype == np.int32
    for most in (0, 1, 5, 1000):
        for start, every in zip(encoder.encode_starts(HARD, most), ids, strict=True):
            assert start == every[: len(start)]
            assert len(start) >= min(most, len(every))


def test_features_do_not_depend_on_the_size_of_batches(encoder, monkeypatch):
    rows = [(first, second, {"labels": 0}) for first in HARD for second in (None, *HARD)]
    squad = squad_of(*[(text, [question(str(n), text * 9)]) for n, text in enumerate(HARD) if text.strip()])

    def built():
        found = build_features(iter(rows), encoder, 16, {"labels": np.int64})
        asked = build_windows(squad, range(len(squad.questions)), encoder, WindowOptions(24, 4, 8), False)
        return [found.tokens, found.offsets, found.splits, asked.tokens, asked.offsets, *asked.extra.values()]

    whole = built()
    monkeypatch.setattr(features_module, "_BATCH_CHARACTERS", 50)
    monkeypatch.setattr(windows, "_QUESTIONS", 1)
    for ours, theirs in zip(built(), whole, strict=True):
        assert np.array_equal(ours, theirs)


def test_a_long_run_of_combining_marks_is_split_in_seconds():
    """Python sorts such a run in the square of its length: of this one for hours."""
    assert characters.bert_words("a" + "\u0316\u0300" * 250_000 + "b", True) == "ab"


def test_an_error_names_a_line_longer_than_any_example(tmp_path, monkeypatch):
    monkeypatch.setattr(glue, "MOST_LINE_BYTES", 200)
    file = tmp_path / "train.tsv"
    for line, before in ((3, "index\tsentence1\tsentence2\tlabel\n0\tone\ttwo\tentailment\n1\t"), (1, "")):
        file.write_text(before + "x" * 500)
        with pytest.raises(UserError, match=rf"train\.tsv, line {line}: more than 200 bytes without a line end"):
            list(glue.read_rows(file, glue.FORMATS["rte"]))


def test_questions_that_repeat_a_long_context_too_often_are_refused(encoder, monkeypatch):
    monkeypatch.setattr(windows, "MOST_TOKENS", 10_000)
    context = "the fox " * 1000
    asked = [question(f"q{number}\x1b", "who?", [("fox", 4)]) for number in range(10)]
    squad = squad_of((context, asked))
    options = WindowOptions(64, 8, 16)
    too_many = "whose context has 2,000 tokens, the windows hold more than 10,000 tokens"
    with refusal("a test's file: up to question 'q1", too_many):
        build_windows(squad, range(10), encoder, options, True)
    assert len(build_windows(squad, [0], encoder, options, True))


def test_the_search_for_an_answer_inside_words_has_a_limit(encoder, monkeypatch):
    looked = []
    tokens_of = windows._tokens_of
    monkeypatch.setattr(windows, "_tokens_of", lambda *words: looked.append(words[1]) or tokens_of(*words))
    context = "xa" * 2000 + " a"
    asked = [question("q", "who?", [("a", 1)]), question("r", "who?", [found_in(context, "a", 1990)])]
    squad = squad_of((context, asked))
    features = build_windows(squad, [0, 1], encoder, WindowOptions(), False)
    # The answer at the end is a token, and is found only from a place near it.
    assert features.extra["finding"].tolist() == [AnswerStatus.INSIDE_TOKEN, AnswerStatus.MOVED]
    assert len(looked) <= 2 * (windows._PLACES + 1)
