"""What a model's name means, what is loaded and refused, and what a saved model loads in. Imports: find, build and save
are what a run does with --model_name_or_path; here each is one call and not a run of seconds."""

import json
import pickle
import shutil
import socket
import time
from pathlib import Path

import pytest
import pytorch_transformers
import torch
from safetensors.torch import save_file

from cos598d.data.encoders import ImageForm
from cos598d.errors import HubUnreachable, UserError
from cos598d.models.build import build_model, count_parameters, find_model
from cos598d.models.checkpoint import save_model

CLASSIFIES, ANSWERS, IMAGES = "sequence_classification", "question_answering", "image_classification"
FORM = ImageForm(8, 1)


def saved(folder: Path, kind: str = "bert", head: str = CLASSIFIES) -> Path:
    source = find_model("tiny", model_type=kind)
    save_model(folder, build_model(source, head, 2, None, seed=5), source.encoder)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def loaded(folder: Path, head: str = CLASSIFIES, labels: int = 2, seed: int = 9) -> torch.nn.Module:
    return build_model(find_model(str(folder)), head, labels, 0.0, seed)


def refused(match: str, folder: Path, *arguments, **named) -> None:
    with pytest.raises(UserError, match=match) as caught:
        loaded(folder, *arguments, **named)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "form", "millions"),
    [("minilm", None, 22.7), ("tiny", None, 0.2), ("bert-base", None, 108.3), ("vit-tiny", FORM, 0.5)],
)
def test_names_that_need_no_network(name, form, millions):
    source = find_model(name, form)
    assert f"{millions} M parameters" in source.description
    with torch.device("meta"):
        model = build_model(source, CLASSIFIES if form is None else IMAGES, 2, None, 0)
    assert all(p.is_meta for p in model.parameters())
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "named", "match"),
    [
        (("vit-tiny",), {}, "reads images, and the task has texts"),
        (("tiny", FORM), {}, "reads texts, and the task has images"),
        (("minilm",), {"model_type": "distilbert"}, "of type bert, not distilbert"),
        (("tiny",), {"model_type": "roberta"}, "cannot be a model of type roberta"),
        (("vit-base", ImageForm(40, 3)), {}, "multiple of 16"),
        (("no such/name/here",), {}, "neither a folder nor a name"),
    ],
)
def test_models_that_cannot_do_the_task(arguments, named, match):
    with pytest.raises(UserError, match=match):
        find_model(*arguments, **named)
    roberta = find_model("tiny")
    roberta.config.__class__ = pytorch_transformers.RobertaConfig
    with pytest.raises(UserError, match="no roberta model for question answering"):
        build_model(roberta, ANSWERS, 2, None, 0)


@pytest.mark.parametrize(
    ("kind", "head", "library"),
    [
        ("bert", CLASSIFIES, "BertForSequenceClassification"),
        ("bert", ANSWERS, "BertForQuestionAnswering"),
        ("distilbert", CLASSIFIES, "DistilBertForSequenceClassification"),
    ],
)
def test_saved_models_load_in_both_libraries(kind, head, library, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = saved(tmp_path / "model", kind, head)
    inputs = {"input_ids": torch.tensor([[2, 30, 31, 32, 3]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    with torch.no_grad():
        expected = loaded(folder, head).eval()(**inputs)
        old = getattr(pytorch_transformers, library).from_pretrained(str(folder)).eval()(**inputs)
        new = getattr(transformers, library).from_pretrained(str(folder)).eval()(**inputs).to_tuple()
    for side, of_old, of_new in zip(expected, old, new, strict=True):
        assert torch.allclose(side, of_old, atol=1e-6)
        assert torch.allclose(side, of_new, atol=1e-6)
    text = "the first text, unaffordable!"
    ids = find_model(str(folder)).encoder.encode([(text, None)], 100)[0].ids
    assert transformers.AutoTokenizer.from_pretrained(str(folder))(text)["input_ids"] == ids
    tokenizer = pytorch_transformers.BertTokenizer.from_pretrained(str(folder))
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids[1:-1]


def test_a_saved_vit_loads_in_transformers_and_with_another_head(tmp_path):
    transformers = pytest.importorskip("transformers")
    source, pixels = find_model("vit-tiny", ImageForm(32, 3)), torch.rand(2, 3, 32, 32)
    model = build_model(source, IMAGES, 5, None, seed=1).eval()
    save_model(tmp_path, model, source.encoder)
    theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(model(pixels)[0], theirs(pixels).logits, atol=1e-6)
    again = build_model(find_model(str(tmp_path), ImageForm(32, 3)), IMAGES, 7, None, seed=2)
    assert again.classifier.out_features == 7
    assert all(
        torch.equal(each, again.state_dict()[name]) for name, each in model.vit.state_dict(prefix="vit.").items()
    )


def test_all_forms_of_weights_load_alike(tmp_path):
    folder = saved(tmp_path / "zip")
    weights = weights_of(folder)
    encoder = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier")}
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in weights.items()}
    foreign = {"cls.predictions.bias": torch.ones(3), "bert.embeddings.position_ids": torch.arange(512)}
    forms = {
        "legacy": lambda path: torch.save(weights, path / "pytorch_model.bin", _use_new_zipfile_serialization=False),
        "old": lambda path: torch.save(old | foreign, path / "pytorch_model.bin"),
        "bare": lambda path: torch.save(
            {name.removeprefix("bert."): tensor for name, tensor in weights.items()}, path / "pytorch_model.bin"
        ),
        "safetensors": lambda path: save_file(weights, path / "model.safetensors"),
        "headless": lambda path: torch.save(encoder, path / "pytorch_model.bin"),
    }
    for name, write in forms.items():
        other = Path(shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("*.bin")))
        write(other)
        found = loaded(other, labels=4 if name == "headless" else 2).state_dict()
        same = encoder if name == "headless" else weights
        assert all(torch.equal(found[key], tensor) for key, tensor in same.items()), name
    assert found["classifier.weight"].shape == (4, 64), "a new head, which starts random"


class Runs:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_weights_and_configurations_that_cannot_be_are_refused_and_no_pickle_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "model")
    good, file = weights_of(folder), folder / "pytorch_model.bin"
    name = "bert.encoder.layer.1.output.dense.weight"
    for changed, match in (
        ({name: None}, f"{name} is missing"),
        ({name: torch.ones(3, 3)}, "has the shape"),
        ({name: good[name].long()}, "int64"),
        ({name: good[name] * torch.nan}, "not finite"),
    ):
        torch.save({key: value for key, value in (good | changed).items() if value is not None}, file)
        refused(match, folder)
    torch.save([1, 2], file)
    refused("other than named tensors", folder)
    for damaged in (file.read_bytes()[:1000], pickle.dumps({"bert.x": Runs()})):
        file.write_bytes(damaged)
        refused("cannot be read as weights", folder)
    assert not (tmp_path / "executed").exists()
    config, file = json.loads((folder / "config.json").read_text()), folder / "config.json"
    for changed, match in (
        ({"model_type": "xlnet"}, "type 'xlnet'"),
        ({"hidden_size": "64"}, "hidden_size, where a whole number"),
        ({"num_attention_heads": 5}, "does not fit"),
        ({"hidden_act": "silu"}, "activation"),
        ({"vocab_size": 7}, "vocabulary of .* has .* entries"),
    ):
        file.write_text(json.dumps(config | changed))
        refused(match, folder)
    file.write_text("{")
    refused("cannot be read", folder)


def test_vocabularies_in_all_forms_give_the_same_ids(tmp_path):
    folder, text = saved(tmp_path / "model"), [("The First text", "And the second")]
    expected = find_model(str(folder)).encoder.encode(text, 30)[0].ids
    (folder / "tokenizer.json").unlink()
    assert find_model(str(folder)).encoder.encode(text, 30)[0].ids == expected, "tokenizer_config.json says lower case"
    (folder / "tokenizer_config.json").unlink()
    cased = find_model(str(folder))
    assert cased.encoder.encode(text, 30)[0].ids != expected
    assert find_model(str(folder), do_lower_case=True).encoder.encode(text, 30)[0].ids == expected
    uncased = Path(shutil.copytree(folder, tmp_path / "my-uncased"))
    assert find_model(str(uncased)).encoder.encode(text, 30)[0].ids == expected
    (folder / "vocab.txt").write_text("a\nb\n")
    refused("no tokenizer that can be read", folder)


def test_robertas_bytes_become_the_librarys_ids(tmp_path):
    letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghij", "\u0120", "\u0120a", "bc"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n\u0120 a\nb c\n")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"model_type": "roberta", "vocab_size": len(letters), "max_position_embeddings": 40, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config | {"type_vocab_size": 1}))
    torch.save({}, tmp_path / "pytorch_model.bin")
    source = find_model(str(tmp_path))
    tokenizer = pytorch_transformers.RobertaTokenizer.from_pretrained(str(tmp_path))
    for text in ("abc a", "bc  abc", "a"):
        wanted = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(f" {text}"))
        assert source.encoder.encode([(text, None)], 30)[0].ids == [0, *wanted, 2], text
    assert source.longest_sequence == 38


def test_an_unreachable_hub_is_one_sentence_within_seconds(tmp_path, monkeypatch):
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(HubUnreachable, match="no model hub gave it") as caught:
                find_model("someone/some-model", cache_dir=str(tmp_path))
            assert "\n" not in str(caught.value)
            silent.close()  # the second time nobody listens
        assert time.monotonic() - began < 60
