"""A model's weights: what is loaded and what is refused, and saved models load in the library's classes."""

import json
import pickle
from pathlib import Path

import pytest
import pytorch_transformers
import torch
from safetensors.torch import save_file

from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError
from cos598d.models.architectures import TEXT_TYPES, model_class
from cos598d.models.build import build_model, find_model
from cos598d.models.checkpoint import load_weights, save_model

HEAD = "sequence_classification"


@pytest.fixture(scope="module")
def tiny() -> torch.nn.Module:
    return build_model(find_model("tiny"), HEAD, 2, None, seed=1)


@pytest.fixture(scope="module")
def encoder():
    source = find_model("tiny")
    return load_encoder("bert", source.vocabulary, source.lower_case)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def folder_of(path: Path, weights: dict, *, safetensors: bool = True, zipped: bool = True) -> Path:
    """A model folder of the tiny shape that holds `weights`."""
    source = find_model("tiny")
    path.mkdir(parents=True, exist_ok=True)
    load_encoder("bert", source.vocabulary, source.lower_case).save(path)
    (path / "config.json").write_text(json.dumps(source.config.to_dict()))
    if safetensors:
        save_file(weights, path / "model.safetensors")
    else:
        torch.save(weights, path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return path


def build(folder: Path, head: str = HEAD, num_labels: int = 2, seed: int = 2) -> torch.nn.Module:
    return build_model(find_model(str(folder)), head, num_labels, None, seed)


def assert_equal(found: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    found = found.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def old_names(weights: dict) -> dict:
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }


def test_safetensors_and_both_forms_of_torch_save_load_alike(tiny, tmp_path):
    weights = state(tiny)
    assert_equal(build(folder_of(tmp_path / "safetensors", weights)), weights)
    assert_equal(build(folder_of(tmp_path / "zip", weights, safetensors=False)), weights)
    assert_equal(build(folder_of(tmp_path / "legacy", weights, safetensors=False, zipped=False)), weights)


def test_old_names_bare_encoders_and_other_heads_load(tiny, tmp_path):
    weights = state(tiny)
    foreign = {
        "cls.predictions.bias": torch.ones(3),
        "cls.seq_relationship.weight": torch.ones(2, 64),
        "bert.embeddings.position_ids": torch.arange(512),
    }
    assert_equal(build(folder_of(tmp_path / "old", {**old_names(weights), **foreign})), weights)
    bare = {name.removeprefix("bert."): tensor for name, tensor in old_names(weights).items()}
    assert_equal(build(folder_of(tmp_path / "bare", bare)), weights)


def test_a_new_head_comes_from_the_seed_and_the_encoder_from_the_file(tiny, tmp_path):
    encoder = {name: tensor for name, tensor in state(tiny).items() if name.startswith("bert.")}
    folder = folder_of(tmp_path / "encoder", encoder)
    first, again, other = (build(folder, num_labels=3, seed=seed).state_dict() for seed in (1, 1, 2))
    for name, tensor in encoder.items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(other[name], tensor)
    assert first["classifier.weight"].shape == (3, 64)
    assert torch.equal(first["classifier.weight"], again["classifier.weight"])
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_half_precision_weights_become_float32(tiny, tmp_path):
    weights = {name: tensor.bfloat16() for name, tensor in state(tiny).items()}
    model = build(folder_of(tmp_path / "half", weights))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_equal(model, {name: tensor.float() for name, tensor in weights.items()})


def refused(folder: Path, *words: str, **options) -> None:
    with pytest.raises(UserError) as caught:
        build(folder, **options)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


DENSE = "bert.encoder.layer.0.output.dense"
KEY = "bert.encoder.layer.1.attention.self.key.bias"
OTHER_WEIGHTS = [  # what is changed; None: what is left out
    ({}, ["classifier.weight", "(2, 64)", "(3, 64)", "model.safetensors"]),
    ({f"{DENSE}.weight": torch.ones(64, 64)}, [f"{DENSE}.weight", "(64, 64)", "(64, 128)"]),
    ({f"{DENSE}.bias": torch.full((64,), float("nan"))}, [f"{DENSE}.bias", "not finite"]),
    ({f"{DENSE}.bias": torch.full((64,), float("inf"))}, [f"{DENSE}.bias", "not finite"]),
    ({f"{DENSE}.bias": torch.ones(64, dtype=torch.int8)}, [f"{DENSE}.bias", "is of int8", "quantized"]),
    ({KEY: None}, [f"has no {KEY}"]),
    ({"classifier.bias": None}, ["has no classifier.bias"]),  # half a head is no new head
]


@pytest.mark.parametrize(("changes", "words"), OTHER_WEIGHTS)
def test_a_tensor_that_does_not_fit_is_named(changes, words, tiny, tmp_path):
    weights = {name: tensor for name, tensor in (state(tiny) | changes).items() if tensor is not None}
    refused(folder_of(tmp_path / "model", weights), *words, num_labels=2 if changes else 3)


def test_only_question_answering_loads_without_a_pooler(tiny, tmp_path):
    weights = {name: tensor for name, tensor in state(tiny).items() if "pooler" not in name}
    folder = folder_of(tmp_path / "pooler", weights)
    refused(folder, "has no bert.pooler.dense.weight and 1 more")
    build(folder, head="question_answering")


def test_weights_of_another_model_are_refused(tmp_path):
    refused(folder_of(tmp_path / "other", {"roberta.embeddings.word_embeddings.weight": torch.ones(2)}), "bert.*")
    refused(folder_of(tmp_path / "head", {"classifier.bias": torch.ones(2)}), "no tensor of", "encoder")


def test_damaged_files_are_named(tiny, tmp_path):
    for safetensors in (True, False):
        folder = folder_of(tmp_path / f"cut{safetensors}", state(tiny), safetensors=safetensors)
        file = next(folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).exists())
        whole = file.read_bytes()
        for content in (whole[: len(whole) // 2], whole[:-1], whole[:100], b"", b"not weights at all"):
            file.write_bytes(content)
            refused(folder, str(file))


def test_nothing_in_a_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    folder = folder_of(tmp_path / "trap", {})
    (folder / "model.safetensors").unlink()
    for protocol in (2, 4):
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"bert.x": Trap()}, protocol))
        refused(folder, "pytorch_model.bin")
    torch.save({"bert.x": Trap()}, folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin")
    assert not (tmp_path / "sprung").exists()


def test_a_file_without_named_tensors_is_refused(tmp_path):
    for content in ([torch.ones(2)], {"epoch": 3}, {1: torch.ones(2)}, {"state_dict": {"bert.x": torch.ones(2)}}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match="something other than named tensors"):
            load_weights(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="no weights file"):
        load_weights(tmp_path / "model.safetensors")


def vocabulary_folder(model_type: str, folder: Path) -> str | None:
    """A small vocabulary for the types whose tokenizers do not read word pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    specials = ["<s>", "</s>", "<pad>", "<unk>", "<special0>", "<special1>", "<mask>"]
    if model_type in ("bert", "distilbert"):
        return None
    if model_type == "xlnet":
        import sentencepiece

        extra = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
        with (folder / "spiece.model").open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter([" ".join(letters), "a cat sat on a mat"] * 20),
                model_writer=writer,
                vocab_size=48,
                hard_vocab_limit=False,
                user_defined_symbols=extra,
                minloglevel=2,
            )
    else:
        pieces = [*specials, *letters, *(f"{letter}</w>" for letter in letters), "Ġ"]
        (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
        merges = "#version: 0.2\na t\n" if model_type == "roberta" else "a t 1\n"
        (folder / "merges.txt").write_text(merges)
        if model_type == "roberta":
            pieces.append("at")
            (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    return str(folder)


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_a_saved_model_loads_bit_for_bit_in_the_librarys_class_and_in_ours(model_type, tmp_path):
    source = find_model("tiny", model_type, tokenizer_name=vocabulary_folder(model_type, tmp_path / "vocabulary"))
    encoder = load_encoder(model_type, source.vocabulary, source.lower_case)
    model = build_model(source, HEAD, 3, 0.0, seed=3)
    saved = tmp_path / "saved"
    save_model(saved, torch.nn.DataParallel(model) if model_type == "bert" else model, encoder)

    wanted = state(model)
    library = model_class(model_type, HEAD).from_pretrained(str(saved))
    assert_equal(library, wanted)
    assert library.config.num_labels == 3
    found = find_model(str(saved), model_type)
    assert found.lower_case == source.lower_case or model_type in ("roberta", "xlm")
    assert_equal(build_model(found, HEAD, 3, None, seed=4), wanted)
    again = load_encoder(model_type, found.vocabulary, found.lower_case)
    assert again.encode_many(["a cat sat"]) == encoder.encode_many(["a cat sat"])
    assert again.vocab_size == encoder.vocab_size <= found.config.vocab_size

    config = json.loads((saved / "config.json").read_text())
    assert config["num_labels"] == 3
    assert config["model_type"] == model_type
    assert torch.load(saved / "pytorch_model.bin", weights_only=True).keys() == wanted.keys()
    with pytest.raises(UserError, match=f"--model_type {model_type}"):
        find_model(str(saved), "distilbert" if model_type == "bert" else "bert", tokenizer_name="tiny")


def test_the_librarys_tokenizer_loads_from_a_saved_folder(tiny, encoder, tmp_path):
    save_model(tmp_path, tiny, encoder)
    tokenizer = pytorch_transformers.BertTokenizer.from_pretrained(str(tmp_path))
    text = "The Old dog sleeps, doesn't it?"
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == encoder.encode_many([text])[0]


def test_parameters_that_are_views_of_one_buffer_are_saved_without_it(encoder, tmp_path):
    model = build_model(find_model("tiny"), HEAD, 2, None, seed=1)
    wanted = state(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()) * 4)
    at = 0
    for parameter in model.parameters():
        view = flat[at : at + parameter.numel()].view_as(parameter)
        parameter.data = view.copy_(parameter.data)
        at += parameter.numel()
    save_model(tmp_path, model, encoder)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 1.2 * 4 * at
    assert_equal(build(tmp_path), wanted)


def test_saving_into_an_older_models_folder_leaves_no_older_weights(tiny, encoder, tmp_path):
    folder = folder_of(tmp_path / "older", state(build_model(find_model("tiny"), HEAD, 2, None, seed=9)))
    save_model(folder, tiny, encoder)
    assert_equal(build(folder), state(tiny))
    assert not [file.name for file in folder.iterdir() if file.name.startswith(".")]


def test_a_full_disk_is_an_error_and_the_old_model_stays(tiny, encoder, tmp_path, monkeypatch):
    save_model(tmp_path / "model", tiny, encoder)

    def full(weights, handle):
        handle.write(b"the first half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    other = build_model(find_model("tiny"), HEAD, 2, None, seed=9)
    with pytest.raises(UserError, match="cannot be saved in .*No space left"):
        save_model(tmp_path / "model", other, encoder)
    assert_equal(build(tmp_path / "model"), state(tiny))
    assert not [file.name for file in (tmp_path / "model").iterdir() if file.name.startswith(".")]
    with pytest.raises(UserError, match="cannot be saved"):
        save_model(tmp_path / "model" / "vocab.txt", tiny, encoder)
