"""The bundled sample: always the same, balanced, and silent about the label to whoever reads one sentence only."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from make_samples import make
from sample_grammar.rte import DEV_PAIRS, TRAIN_PAIRS

from cos598d.data import samples
from cos598d.data.samples import rte_sample, vocabulary, write_rte_sample


def test_sample_has_both_labels_equally_often_and_no_pair_in_both_parts():
    train, dev = rte_sample("train"), rte_sample("dev")
    assert (len(train), len(dev)) == (TRAIN_PAIRS, DEV_PAIRS)
    for part in (train, dev):
        labels = Counter(label for _, _, label in part)
        assert labels == {"entailment": len(part) // 2, "not_entailment": len(part) // 2}
    sentences = [{sentence for pair in part for sentence in pair[:2]} for part in (train, dev)]
    assert not sentences[0] & sentences[1]


def test_every_sentence_stands_under_both_labels_equally_often():
    for part in ("train", "dev"):
        for place in (0, 1):
            counts = Counter((pair[place], pair[2]) for pair in rte_sample(part))
            for sentence, _ in list(counts):
                assert counts[sentence, "entailment"] == counts[sentence, "not_entailment"], sentence


@pytest.mark.parametrize("place", [0, 1], ids=["report", "statement"])
def test_one_sentence_alone_does_not_tell_the_label(place):
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    train, dev = rte_sample("train"), rte_sample("dev")
    words = CountVectorizer(ngram_range=(1, 2)).fit([pair[place] for pair in train])
    model = LogisticRegression(max_iter=500)
    model.fit(words.transform([pair[place] for pair in train]), [pair[2] for pair in train])
    accuracy = model.score(words.transform([pair[place] for pair in dev]), [pair[2] for pair in dev])
    assert accuracy == pytest.approx(0.5, abs=0.05)


def test_the_text_is_as_awkward_as_the_real_one():
    texts = [sentence for part in ("train", "dev") for pair in rte_sample(part) for sentence in pair[:2]]
    assert not any("\t" in text or "\n" in text or "{" in text for text in texts)
    assert any('"' in text for text in texts)
    assert any(not text.isascii() for text in texts)
    lengths = [len(pair[0].split()) + len(pair[1].split()) for pair in rte_sample("train")]
    assert np.quantile(lengths, 0.95) > 2 * np.quantile(lengths, 0.05)


def test_the_sample_is_the_same_everywhere(tmp_path):
    folder = write_rte_sample(tmp_path)
    digest = hashlib.sha256((folder / "train.tsv").read_bytes() + (folder / "dev.tsv").read_bytes()).hexdigest()
    assert digest == "5e3a61db77c887e8c398a3fd3117fc89d842e26d5439b90d8c2b89965a2701bc"
    assert (folder / "dev.tsv").read_text(encoding="utf-8").count("\n") == DEV_PAIRS + 1


def test_the_grammar_still_tells_the_bundled_files(tmp_path):
    bundled = Path(samples.__file__).parent
    made = make(tmp_path)
    assert {path.name for path in made} == {path.name for path in bundled.iterdir()} - {"__init__.py", "__pycache__"}
    for path in made:
        assert path.read_bytes() == (bundled / path.name).read_bytes(), path.name


def test_the_vocabulary_reads_the_sample_without_unknown_words():
    from cos598d.data.text.tokenization import load_encoder

    encoder = load_encoder("bert", vocabulary(), True)
    unknown = vocabulary().index("[UNK]")
    texts = [sentence for pair in rte_sample("dev") for sentence in pair[:2]]
    assert not any(unknown in ids for ids in encoder.encode_many(texts))
    assert vocabulary()[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(set(vocabulary())) == len(vocabulary())
