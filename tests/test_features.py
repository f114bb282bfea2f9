"""Features have the course's layout, are padded to the batch's longest example and kept in a file built once."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import run_ranks

from cos598d.data import get_task
from cos598d.data.glue.course import convert_examples_to_features, processors
from cos598d.data.text import features as features_module
from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.features import build_features
from cos598d.data.text.layout import LAYOUTS, Layout, truncated_lengths
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
ROWS = [
    ("a b c", "d e", "entailment"),
    ("a", "b c d e f g h i j a b c d", "not_entailment"),
    ("a b c d e f g h i j a b c d", "j", "entailment"),
    ("a b c d e f g", "b c d e f g h", "not_entailment"),
    ("a b c", "", "entailment"),
    ("a b c d e f g h i j a b c", " ", "entailment"),
    ("", "a b", "not_entailment"),
]
# The special tokens of the toy vocabulary, and what the course's script gives for each model type.
CLS, SEP, PAD = "[CLS]", "[SEP]", "[PAD]"
COURSE = {
    "bert": {"cls_token_segment_id": 0},
    "xlnet": {"cls_token_at_end": True, "cls_token_segment_id": 2, "pad_on_left": True, "pad_token_segment_id": 4},
    "roberta": {"cls_token_segment_id": 0, "sep_token_extra": True},
    "distilbert": {"cls_token_segment_id": 0},
    "xlm": {"cls_token_segment_id": 0},
}


class ToyTokenizer:
    """The two methods of a pytorch_transformers tokenizer that the course's helper calls."""

    def tokenize(self, text):
        return text.split()

    def convert_tokens_to_ids(self, tokens):
        return [PIECES.index(token) for token in tokens]


class ToyEncoder(TextEncoder):
    """The same vocabulary as an encoder of any layout, with a pad id that is not 0."""

    def __init__(self, layout):
        self.layout, self.cls_id, self.sep_id, self.pad_id = layout, 2, 3, 4
        self.vocab_size, self.fingerprint = len(PIECES), "toy"

    def encode_many(self, texts):
        return [[PIECES.index(word) for word in text.split()] for text in texts]

    def save(self, folder):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    text = "index\tsentence1\tsentence2\tlabel\n"
    text += "".join(f"{n}\t{a}\t{b}\t{label}\n" for n, (a, b, label) in enumerate(ROWS))
    for part in ("train", "dev"):
        (tmp_path / f"{part}.tsv").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def encoder():
    return load_encoder("bert", PIECES, True)


def cache_files(tmp_path):
    return sorted((tmp_path / "cache" / "features").glob("*.safetensors"))


def assert_equal_to_course(features, course, width):
    """Ours, collated, against the course's, which are padded to `width`."""
    batch = features.collate(range(len(features)))
    layout, longest = features.layout, batch["input_ids"].shape[1]
    inner = slice(width - longest, width) if layout.pad_on_left else slice(0, longest)
    outer = slice(0, width - longest) if layout.pad_on_left else slice(longest, width)
    names = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}
    expected = {ours: torch.tensor([getattr(feature, theirs) for feature in course]) for ours, theirs in names.items()}
    if not layout.uses_segments:
        del expected["token_type_ids"]
    assert not expected["attention_mask"][:, outer].any(), "only padding was left out"
    assert {*batch} == {*expected, "labels"}
    for name, values in expected.items():
        assert batch[name].equal(values[:, inner]), name
    assert batch["labels"].tolist() == [feature.label_id for feature in course]


@pytest.mark.parametrize("width", [6, 9, 16, 40])
@pytest.mark.parametrize("model_type", sorted(LAYOUTS))
def test_features_equal_the_course_s_for_each_model_type(model_type, width, folder):
    course = convert_examples_to_features(
        processors["rte"]().get_train_examples(str(folder)),
        ["entailment", "not_entailment"],
        width,
        ToyTokenizer(),
        "classification",
        pad_token=4,
        **COURSE[model_type],
    )
    ours = get_task("rte").load("train", folder, ToyEncoder(LAYOUTS[model_type]), width)
    assert_equal_to_course(ours, course, width)


def test_pairs_lose_tokens_of_the_longer_text_first():
    for first in range(12):
        for second in range(12):
            for room in range(1, 24):
                a, b = ["x"] * first, ["y"] * second
                while len(a) + len(b) > room:
                    (a if len(a) > len(b) else b).pop()
                assert truncated_lengths(first, second, room) == (len(a), len(b))


def test_a_length_without_room_for_text_is_refused(folder, encoder):
    words = r"A sequence length of 3 leaves no room for text .* at least 4 \(--max_seq_length\)"
    with pytest.raises(UserError, match=words):
        get_task("rte").load("train", folder, encoder, 3)


def test_batches_are_padded_to_their_longest_example_in_the_given_order(folder, encoder):
    features = get_task("rte").load("train", folder, encoder, 128)
    assert features.lengths.dtype == np.int32
    assert features.lengths.tolist() == [8, 17, 18, 17, 5, 15, 5]
    batch = features.collate([4, 0])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [5, 8]
    assert batch["labels"].tolist() == features.labels[[4, 0]].tolist()
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert features.collate(np.array([1]))["input_ids"].shape == (1, 17)


def test_the_cache_has_a_file_per_data_vocabulary_case_and_length(folder, encoder, tmp_path):
    task = get_task("rte")
    for _ in range(2):
        task.load("train", folder, encoder, 16)
    assert len(cache_files(tmp_path)) == 1
    task.load("train", folder, encoder, 17)
    task.load("train", folder, load_encoder("bert", [*PIECES, "k"], True), 16)
    task.load("train", folder, load_encoder("bert", PIECES, False), 16)
    task.load("dev", folder, encoder, 16)
    assert len(cache_files(tmp_path)) == 5
    with open(folder / "train.tsv", "a", encoding="utf-8") as rows:
        rows.write("7\ta\tb\tentailment\n")
    assert len(task.load("train", folder, encoder, 16)) == len(ROWS) + 1
    assert len(cache_files(tmp_path)) == 6


def test_the_cache_is_a_safetensors_file_and_stays_mapped(folder, encoder, tmp_path):
    from safetensors.numpy import load_file

    features = get_task("rte").load("train", folder, encoder, 16)
    (file,) = cache_files(tmp_path)
    assert sorted(load_file(file)) == ["offsets", "splits", "target.labels", "tokens"]
    assert file.name.startswith("rte-train-")
    assert not features.tokens.flags.owndata
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert file.name in maps.read_text()


@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "empty", "foreign"])
def test_a_damaged_cache_file_is_built_again(damage, folder, encoder, tmp_path):
    from safetensors.numpy import save_file

    task = get_task("rte")
    wanted = task.load("train", folder, encoder, 16).collate(range(len(ROWS)))
    (file,) = cache_files(tmp_path)
    content = file.read_bytes()
    file.unlink()  # so that the pages that the first load has mapped do not change
    if damage == "foreign":
        save_file({"tokens": np.zeros(3)}, file)
    else:
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        file.write_bytes({"cut": content[:-20], "flipped": flipped, "garbage": b"\x80\x04pickle", "empty": b""}[damage])
    again = task.load("train", folder, encoder, 16).collate(range(len(ROWS)))
    assert all(again[name].equal(wanted[name]) for name in wanted)
    assert file.read_bytes() == content


def test_links_and_pipes_in_the_cache_are_refused(folder, encoder, tmp_path):
    task, mine = get_task("rte"), tmp_path / "mine.txt"
    mine.write_text("precious")
    task.load("train", folder, encoder, 16)
    (file,) = cache_files(tmp_path)
    file.unlink()
    for make in (os.symlink, os.link):
        file.with_suffix(".lock").unlink()
        make(mine, file.with_suffix(".lock"))
        with pytest.raises(UserError, match=r"Features cannot be kept in .*it is a (hard )?link.*Set COS598D_CACHE"):
            task.load("train", folder, encoder, 16)
    file.with_suffix(".lock").unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=r"Features cannot be kept in .*it is not a plain file"):
        task.load("train", folder, encoder, 16)
    assert mine.read_text() == "precious"


def test_overwrite_builds_again_and_a_failed_build_keeps_the_old_file(folder, encoder, tmp_path, monkeypatch):
    task = get_task("rte")
    task.load("train", folder, encoder, 16)
    (file,) = cache_files(tmp_path)
    content = file.read_bytes()
    before = file.stat().st_ino
    task.load("train", folder, encoder, 16)
    assert file.stat().st_ino == before
    task.load("train", folder, encoder, 16, overwrite_cache=True)
    assert file.stat().st_ino != before

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(features_module, "build_features", fail)
    with pytest.raises(KeyboardInterrupt):
        task.load("train", folder, encoder, 16, overwrite_cache=True)
    assert file.read_bytes() == content
    assert len(list(file.parent.iterdir())) == 2  # the file and its lock


def test_an_error_names_a_cache_folder_that_cannot_be_written(folder, encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(folder / "train.tsv"))
    with pytest.raises(UserError, match=r"Features cannot be kept in .*COS598D_CACHE"):
        get_task("rte").load("train", folder, encoder, 16)


def load_thrice(comm, folder, log, cache):
    """On a rank: load the rows with the others, twice and then overwriting; each time their number and all builds."""
    os.environ["COS598D_CACHE"] = cache
    build, encoder, found = features_module.build_features, load_encoder("bert", PIECES, True), []

    def counted(*arguments):
        with open(log, "a") as lines:
            lines.write("built\n")
        time.sleep(0.5)  # long enough for the others to arrive
        return build(*arguments)

    features_module.build_features = counted
    for overwrite in (False, False, True):
        comm.all_reduce(torch.zeros(1), "all begin")
        loaded = get_task("rte").load("train", Path(folder), encoder, 16, overwrite_cache=overwrite)
        comm.all_reduce(torch.zeros(1), "all have loaded")
        found.append([len(loaded), int(loaded.tokens.sum()), Path(log).read_text().count("built")])
    return found


def test_four_processes_build_once_and_overwrite_once(folder, tmp_path):
    cache = os.environ["COS598D_CACHE"]
    found, *others = run_ranks(4, load_thrice, str(folder), str(tmp_path / "builds"), cache)
    assert others == [found] * 3
    assert [(rows, builds) for rows, _, builds in found] == [(len(ROWS), 1), (len(ROWS), 1), (len(ROWS), 2)]
    assert len({tokens for _, tokens, _ in found}) == 1


def test_features_are_built_block_by_block(monkeypatch):
    """More examples than a block: the same features, and never more texts in the encoder at once than a block's."""
    monkeypatch.setattr(features_module, "_BLOCK", 3)
    seen = []

    class Watched(ToyEncoder):
        def encode_many(self, texts):
            seen.append(len(texts))
            return super().encode_many(texts)

    rows = [(a, b, {"labels": place}) for place, (a, b, _) in enumerate(ROWS)]
    small = build_features(iter(rows), Watched(Layout()), 16, {"labels": np.int64})
    assert max(seen) <= 3
    monkeypatch.setattr(features_module, "_BLOCK", 100)
    whole = build_features(iter(rows), ToyEncoder(Layout()), 16, {"labels": np.int64})
    for name in ("tokens", "offsets", "splits", "labels"):
        assert np.array_equal(getattr(small, name), getattr(whole, name))
