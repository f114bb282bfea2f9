"""Encoders give the ids of pytorch-transformers' tokenizers and save files that those load."""

import json
import logging
import os
import random
import unicodedata
from pathlib import Path

import pytest
from data_files import refusal
from tokenizers import ByteLevelBPETokenizer

from cos598d.data.text.characters import bert_words
from cos598d.data.text.tokenization import load_encoder

pytorch_transformers = pytest.importorskip("pytorch_transformers")
logging.getLogger("pytorch_transformers").setLevel(logging.CRITICAL)

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHARACTERS = [chr(code) for code in range(33, 127)] + list("éüßñøαβσςοδ中文日語ひらгдж’“—…€½")
PIECES = [*SPECIALS, *CHARACTERS, *(f"##{c}" for c in CHARACTERS), "hello", "##llo", "he", "world", "Hello", "uber"]

# What tokenizers get wrong: each line is one known difficulty.
HARD = [
    "",
    "Hello, world! don't e-mail [x]",
    "[CLS] hello [SEP] world [SEP]",
    "[SEP]hello[SEP][SEP]world[MASK]",
    "[cls] [Sep] [SEP ] [UNK][PAD]",
    "Ünïcödé naïve café ÉCOLE Straße",
    "e\u0301cole A\u030angstro\u0308m",
    "ΟΔΟΣ ΣΑΣ οδος Σ",
    "İstanbul ıI ǅ ﬁ",
    "日本語ひらがな中文abc中",
    "\uf900\ufa30 \U00020000x",
    "tab\there\nnew\r\nline\x0bvertical\x0cfeed",
    "null\x00 bell\x07 del\x7f soft\u00adhyphen zero\u200bwidth \ufeffbom \ufffdreplaced",
    "no\u00a0break\u2003em\u3000ideographic\u2028line\u2029paragraph\x85next",
    "hello\x00world hel\u200dlo",
    "“quotes” – dashes — … ¡! ¿? «» 。、 ‿ ⁀ ^$+<=>|~`",
    "new punctuation \u2e43\u2e52 \U0001f600 \U0001fae0 emoji",
    "a" * 100,
    "a" * 101,
    "é" * 100,
    "e\u0301" * 100,
    "x" + "中" * 120,
    "hellohellohello worldhe",
    "½ € \u0378 \ue000 \U000f0000 unassigned",
]


def fuzz(specials, count=300):
    """Random texts of the characters that matter, special tokens among them, from a fixed seed."""
    source = random.Random(598)
    alphabet = [*"abcHELO ,.'-[]<>\t\x00éÉσΣ中ひ\u0301\u200b\u00a0\u2028\ufffdГ9½  ", "hello", "world", *specials]
    return ["x" + "".join(source.choices(alphabet, k=source.randrange(1, 40))) for _ in range(count)]


def any_unicode(count=1500):
    """Random texts of all assigned characters between letters, from a fixed seed."""
    source = random.Random(599)
    assigned = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    return [
        "x" + "".join(source.choice([source.choice(assigned), source.choice("aeS o")]) for _ in range(40))
        for _ in range(count)
    ]


def folder_of(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return tmp_path


def ids_of(tokenizer, texts):
    return [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) for text in texts]


def assert_same_ids(encoder, tokenizer, texts):
    for text, ours, theirs in zip(texts, encoder.encode_many(texts), ids_of(tokenizer, texts), strict=True):
        assert ours == theirs, ascii(text)


def glue_vocabulary(case):
    if not os.environ.get("GLUE_DIR"):
        pytest.skip("GLUE_DIR is not set: the real vocabularies are in GLUE_DIR/../vocab")
    file = Path(os.environ["GLUE_DIR"]).parent / "vocab" / f"bert-base-{case}-vocab.txt"
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    return file


@pytest.mark.parametrize("lower_case", [True, False])
def test_word_pieces_equal_bert_tokenizers_on_hard_texts(tmp_path, lower_case):
    folder = folder_of(tmp_path, vocab__txt="\n".join(PIECES) + "\n")
    theirs = pytorch_transformers.BertTokenizer.from_pretrained(str(folder), do_lower_case=lower_case)
    texts = HARD + fuzz(SPECIALS) + any_unicode()
    encoder = load_encoder("bert", folder, lower_case)
    assert_same_ids(encoder, theirs, texts)
    assert encoder.encode_many([" ", "\t\n", "\x00", ""]) == [[], [], [], []], "no ids for white space"


@pytest.mark.long
@pytest.mark.parametrize("lower_case", [True, False])
def test_every_character_is_split_as_by_bert_tokenizer(lower_case):
    from pytorch_transformers.tokenization_bert import BasicTokenizer

    basic = BasicTokenizer(do_lower_case=lower_case)
    # The planes with characters; the rest is unassigned or private. Fifty to a text, each between letters.
    codes = [c for c in (*range(0x32000), *range(0xE0000, 0xE0200)) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(codes), 50):
        text = " ".join(f"a{chr(code)}b" for code in codes[start : start + 50])
        assert bert_words(text, lower_case).split() == basic.tokenize(text), hex(codes[start])


@pytest.mark.parametrize("case", ["cased", "uncased"])
def test_all_of_rte_gets_the_ids_of_bert_tokenizer(case):
    vocabulary = glue_vocabulary(case)
    texts = []
    for part in ("train", "dev", "test"):
        _, *rows = (Path(os.environ["GLUE_DIR"]) / "RTE" / f"{part}.tsv").read_bytes().decode().strip("\n").split("\n")
        texts += [text for row in rows for text in row.split("\t")[1:3]]
    assert len(texts) == 2 * (2490 + 277 + 3000)
    theirs = pytorch_transformers.BertTokenizer(str(vocabulary), do_lower_case=case == "uncased")
    ours = load_encoder("bert", vocabulary, case == "uncased")
    assert_same_ids(ours, theirs, texts + HARD)


@pytest.mark.parametrize("lower_case", [True, False])
@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_saved_word_pieces_load_in_pytorch_transformers_with_their_case(tmp_path, model_type, lower_case):
    encoder = load_encoder(model_type, PIECES, lower_case)
    encoder.save(tmp_path / "model")
    name = {"bert": "BertTokenizer", "distilbert": "DistilBertTokenizer"}[model_type]
    theirs = getattr(pytorch_transformers, name).from_pretrained(str(tmp_path / "model"))
    assert encoder.encode_many(HARD) == ids_of(theirs, HARD)
    assert encoder.vocab_size == len(PIECES) == len(theirs)
    assert (encoder.pad_id, encoder.cls_id, encoder.sep_id) == (0, 2, 3)


def test_a_list_a_file_and_a_folder_give_the_same_encoder(tmp_path):
    folder = folder_of(tmp_path, vocab__txt="\r\n".join(PIECES) + "\r\n")
    prints = {load_encoder("bert", source, True).fingerprint for source in (PIECES, folder, folder / "vocab.txt")}
    assert len(prints) == 1
    prints.add(load_encoder("bert", PIECES, False).fingerprint)
    prints.add(load_encoder("bert", [*PIECES, "more"], True).fingerprint)
    prints.add(load_encoder("distilbert", PIECES, True).fingerprint)
    assert len(prints) == 4


def test_the_later_of_two_equal_pieces_counts_as_in_bert_tokenizer(tmp_path):
    folder = folder_of(tmp_path, vocab__txt="\n".join([*PIECES, "hello", "[SEP]"]) + "\n")
    theirs = pytorch_transformers.BertTokenizer.from_pretrained(str(folder))
    ours = load_encoder("bert", folder, True)
    assert ours.encode_many(["hello [SEP]"]) == ids_of(theirs, ["hello [SEP]"])
    assert ours.sep_id == theirs.sep_token_id
    assert ours.vocab_size == len(PIECES) + 2


def test_byte_pairs_equal_roberta_tokenizers_and_save(tmp_path):
    trained = ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(HARD * 5 + fuzz([]), vocab_size=500, special_tokens=specials, show_progress=False)
    trained.save_model(str(tmp_path))
    theirs = pytorch_transformers.RobertaTokenizer.from_pretrained(str(tmp_path))
    ours = load_encoder("roberta", tmp_path, False)
    texts = [*HARD, *fuzz(["<s>", "</s>", "<mask>", "<pad>"]), *any_unicode()]
    texts += ["  two  spaces ", "it's we'll I'D 12ab", " <mask> x"]
    assert_same_ids(ours, theirs, texts)
    assert (ours.cls_id, ours.pad_id, ours.sep_id, ours.vocab_size) == (0, 1, 2, len(theirs))
    ours.save(tmp_path / "saved")
    again = pytorch_transformers.RobertaTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert ids_of(again, texts) == ours.encode_many(texts)
    assert load_encoder("roberta", tmp_path / "saved", False).fingerprint == ours.fingerprint


def test_xlnet_uses_its_own_tokenizer_and_saves(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("hello world\nthe cat sat on the mat, 1990,\nHello there\n" * 30, encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=50,
        hard_vocab_limit=False,
        control_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
        minloglevel=2,
    )
    ours = load_encoder("xlnet", tmp_path, False)
    theirs = pytorch_transformers.XLNetTokenizer.from_pretrained(str(tmp_path))
    texts = ["Hello world, 1990, été", "<sep> the mat<cls>"]
    assert ours.encode_many([*texts, "  "]) == [*ids_of(theirs, texts), []]
    assert (ours.layout.cls_at_end, ours.layout.pad_on_left, ours.layout.pad_segment) == (True, True, 4)
    ours.save(tmp_path / "saved")
    assert load_encoder("xlnet", tmp_path / "saved", False).encode_many(texts) == ours.encode_many(texts)
    assert not [file for file in (tmp_path / "saved").iterdir() if file.name.startswith(".")]


def test_xlm_uses_its_own_tokenizer_and_saves(tmp_path):
    pytest.importorskip("sacremoses")
    tokens = ["<s>", "</s>", "<pad>", "<unk>", *(f"<special{n}>" for n in range(10)), "hel", "lo</w>", "h", "e", "l"]
    vocabulary = json.dumps({token: place for place, token in enumerate(tokens)})
    folder = folder_of(tmp_path, vocab__json=vocabulary, merges__txt="h e 3\nhe l 2\nl o</w> 1\n")
    ours = load_encoder("xlm", folder, True)
    theirs = pytorch_transformers.XLMTokenizer.from_pretrained(str(folder))
    assert ours.encode_many(["Hello you"]) == ids_of(theirs, ["Hello you"])
    assert (ours.cls_id, ours.sep_id, ours.pad_id) == (1, 1, 2)
    ours.save(tmp_path / "saved")
    assert load_encoder("xlm", tmp_path / "saved", True).encode_many(["Hello"]) == ours.encode_many(["Hello"])


def test_a_vocabulary_with_added_tokens_keeps_them(tmp_path):
    folder = folder_of(tmp_path, vocab__txt="\n".join(PIECES) + "\n", added_tokens__json=f'{{"zz9": {len(PIECES)}}}')
    ours = load_encoder("bert", folder, True)
    assert ours.encode_many(["hello zz9"]) == [[PIECES.index("hello"), len(PIECES)]]
    assert ours.vocab_size == len(PIECES) + 1


def test_an_error_names_why_a_vocabulary_is_unusable(tmp_path):
    for name in ("empty", "list", "torn"):
        (tmp_path / name).mkdir()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\n")
    (tmp_path / "void.txt").write_text("")
    cases = [
        ("electra", PIECES, "Unknown model type 'electra'"),
        ("xlnet", PIECES, "A list of word pieces"),
        ("bert", tmp_path / "nowhere", "There is no vocabulary at"),
        ("bert", tmp_path / "empty", "There is no vocab.txt in"),
        ("bert", tmp_path / "bytes.txt", "cannot be read as UTF-8"),
        ("bert", tmp_path / "void.txt", "is empty"),
        ("bert", ["hello", "world"], "The vocabulary of 2 entries has no [UNK]"),
        ("roberta", tmp_path / "empty", "There is no vocab.json in"),
        ("roberta", tmp_path / "void.txt", "is one file"),
        ("roberta", folder_of(tmp_path / "torn", vocab__json='{"<s', merges__txt=""), "is not a vocabulary"),
        ("xlnet", tmp_path / "empty", "There is no spiece.model in"),
        ("xlm", folder_of(tmp_path / "list", vocab__json="[]", merges__txt=""), "has no readable xlm vocabulary"),
    ]
    for model_type, source, sentence in cases:
        with refusal(sentence):
            load_encoder(model_type, source, True)
