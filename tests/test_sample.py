"""The bundled samples of RTE and SQuAD: the same files everywhere, with balanced labels and right answers."""

import hashlib
import json

from cos598d.data.samples import rte_sample, squad_sample, vocabulary, write_rte_sample, write_squad_sample

PARTS = ("train", "dev")


def digest(files):
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_the_rte_sample_is_the_same_everywhere(tmp_path):
    folder = write_rte_sample(tmp_path)
    files = [folder / "train.tsv", folder / "dev.tsv"]
    assert digest(files) == "5e3a61db77c887e8c398a3fd3117fc89d842e26d5439b90d8c2b89965a2701bc"


def test_the_squad_sample_is_the_same_everywhere(tmp_path):
    folder = write_squad_sample(tmp_path)
    files = [folder / f"{part}-v{version}.json" for part in PARTS for version in ("1.1", "2.0")]
    assert sorted(folder.iterdir()) == sorted(files)
    assert json.loads(files[1].read_text(encoding="utf-8")) == squad_sample("train", True)
    assert digest(files) == "bcfb22b6858e7af6800ce4be7808dafbd03086f15277c777bd461c6c924fc568"


def test_the_vocabulary_reads_the_sample_without_unknown_words():
    from cos598d.data.text.tokenization import load_encoder

    encoder = load_encoder("bert", vocabulary(), True)
    unknown = vocabulary().index("[UNK]")
    texts = [sentence for pair in rte_sample("dev") for sentence in pair[:2]]
    assert not any(unknown in ids for ids in encoder.encode_many(texts))
    assert vocabulary()[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(set(vocabulary())) == len(vocabulary())
