"""Our vision transformer: what it computes, its shapes and files, and which settings are refused."""

import json

import pytest
import torch
from safetensors.torch import save_file
from test_models import refused as refused_by_name

from cos598d.data.encoder import ImageForm
from cos598d.errors import UserError
from cos598d.models.build import build_model, find_model, unfilled_model, uses_every_parameter
from cos598d.models.checkpoint import save_model
from cos598d.models.vit_config import ViTConfig, patch_of

HEAD = "image_classification"
DIGITS = ImageForm(8, 1)


def small_config(**values) -> ViTConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return ViTConfig(**{**sizes, "image_size": 12, "patch_size": 3, **values})


def random_model(config: ViTConfig, seed: int = 0) -> torch.nn.Module:
    """A model with large random weights everywhere, norms and biases included, so that nothing is nearly linear."""
    model = unfilled_model("vit", HEAD, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(config: ViTConfig, images: int = 5) -> dict[str, torch.Tensor]:
    shape = (images, config.num_channels, config.image_size, config.image_size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels, "labels": torch.arange(images) % config.num_labels}


def folder_of(folder, weights, config=None, file="model.safetensors", **changes):
    """A published model's folder; a setting that is changed to None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": "vit", **(config or small_config()).to_dict(), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    save = torch.save if file.endswith(".bin") else save_file
    save(weights, folder / file)
    return folder


def built(name, labels: int = 7, **options) -> torch.nn.Module:
    return build_model(find_model(str(name), "vit", **options), HEAD, labels, None, seed=1)


def refused(name, *words: str, model_type: str = "vit", **options) -> None:
    refused_by_name(*words, name=name, model_type=model_type, **options)


@pytest.fixture
def folder(tmp_path):
    """A published folder of the small model."""
    return folder_of(tmp_path / "model", random_model(small_config()).state_dict())


def test_every_parameter_gets_a_gradient():
    model = built("vit-tiny", form=DIGITS)
    loss, scores = model(torch.randn(4, 1, 8, 8), labels=torch.arange(4))
    assert scores.shape == (4, 7)
    loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert uses_every_parameter("vit", HEAD)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(scores, torch.arange(4)).item())


def test_a_block_normalizes_first_and_adds_its_input():
    config = small_config(num_labels=3)
    model = random_model(config)
    # Blocks whose last layers give nothing leave the tokens as they are: the first one's embedding is classified.
    for block in model.vit.encoder.layer:
        for part in (block.attention.output["dense"], block.output["dense"]):
            part.weight.data.zero_()
            part.bias.data.zero_()
    embeddings = model.vit.embeddings
    first = (embeddings.cls_token + embeddings.position_embeddings[:, :1])[0]
    (scores,) = model(batch(config)["pixel_values"])
    assert torch.allclose(scores, model.classifier(model.vit.layernorm(first)).expand(5, -1), atol=1e-5)


def test_patches_at_other_places_give_other_scores():
    config = small_config(num_labels=3)
    model = random_model(config)
    pixels = batch(config, 1)["pixel_values"]
    moved = pixels.roll(config.patch_size, dims=3)  # the same patches, elsewhere
    with torch.no_grad():
        assert not torch.allclose(model(pixels)[0], model(moved)[0], atol=1e-3)
        model.vit.embeddings.position_embeddings.zero_()
        assert torch.allclose(model(pixels)[0], model(moved)[0], atol=1e-5)


def test_dropout_reaches_the_attention():
    model = build_model(find_model("vit-tiny", "vit", form=DIGITS), HEAD, 2, 0.5, seed=1)
    for part in (model.vit.embeddings, *model.vit.encoder.layer):
        part.dropout.p = 0.0
    pixels = torch.randn(2, 1, 8, 8)
    first, second = (model(pixels)[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_shapes_have_the_published_sizes_and_fit_the_task_s_images():
    base = unfilled_model("vit", HEAD, find_model("vit-base", "vit").config)
    # 85,798,656 without a head, as google/vit-base-patch16-224-in21k has it less its pooler of 590,592.
    assert sum(p.numel() for p in base.vit.parameters()) == 85_798_656
    source = find_model("vit-tiny", "vit", form=DIGITS)
    assert source.description == "tiny vit, random weights, 0.5 M parameters"
    assert (source.config.image_size, source.config.patch_size, source.config.num_channels) == (8, 2, 1)
    assert source.longest_sequence is None
    assert [patch_of(size) for size in (8, 16, 28, 32, 48, 64, 96, 224)] == [2, 2, 4, 4, 6, 8, 12, 32]
    assert find_model("vit-base", "vit", form=ImageForm(32, 3)).config.patch_size == 16
    refused("vit-base", "and 8 pixels are not", "patches of 16", form=DIGITS)
    refused("vit-tiny", "and 37 pixels are not", form=ImageForm(37, 3))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["vit.", ""])
def test_a_published_folder_is_loaded_with_a_new_head(tmp_path, file, prefix):
    model = random_model(small_config())
    weights = {f"{prefix}{name}": tensor for name, tensor in model.vit.state_dict().items()}
    pooler = {f"{prefix}pooler.dense.weight": torch.zeros(32, 32), f"{prefix}pooler.dense.bias": torch.zeros(32)}
    loaded = built(folder_of(tmp_path / "in21k", weights | pooler, file=file))
    assert all(torch.equal(tensor, loaded.vit.state_dict()[name]) for name, tensor in model.vit.state_dict().items())
    assert loaded.classifier.weight.shape == (7, 32)
    assert 0.01 < loaded.classifier.weight.std() < 0.03


def test_only_a_head_for_as_many_classes_is_kept(tmp_path):
    model = random_model(small_config(num_labels=5))
    folder = folder_of(tmp_path / "finetuned", model.state_dict(), id2label={"0": "a cat"})
    assert torch.equal(built(folder, 5).classifier.weight, model.classifier.weight)
    new = built(folder, 7).classifier
    assert new.weight.shape == (7, 32)
    assert new.bias.abs().max() == 0


def test_a_saved_model_is_a_published_folder(tmp_path):
    source = find_model("vit-tiny", "vit", form=DIGITS)
    model = build_model(source, HEAD, 10, None, seed=1)
    save_model(tmp_path, model, source.load_encoder())
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json", "preprocessor_config.json", "pytorch_model.bin",
    ]  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], len(config["id2label"]), config["image_size"]) == ("vit", 10, 8)
    again = find_model(str(tmp_path), "vit")
    assert again.images.fingerprint == source.images.fingerprint
    assert (again.images.mean, again.images.std) == ((0.5,), (0.5,))
    state = build_model(again, HEAD, 10, None, seed=2).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "None for hidden_size"),
        ({"image_size": [12, 12]}, "a list for image_size"),
        ({"patch_size": 0}, "0 for patch_size"),
        ({"num_attention_heads": 5}, "hidden_size 32"),
        ({"patch_size": 13}, "image of 12 pixels"),
        ({"hidden_act": "swish"}, "swish"),
        ({"num_channels": 4}, "images of 4 channels"),
        ({"qkv_bias": "yes"}, "'yes' for qkv_bias, where true or false is expected"),
        ({"to_dict": 1}, "1 for to_dict, where a configuration has no such setting"),
        ({"model_type": "bert"}, "--model_type bert"),
        ({"image_size": 10**9}, "does not fit a ViTForImageClassification"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path, changes, words):
    refused(folder_of(tmp_path / "model", {"vit.x": torch.zeros(1)}, **changes), words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "has no JSON object"),
        ('{"image_mean": [0.5]}', "[0.5] for image_mean, where 3 numbers are expected"),
        ('{"image_std": [1, 0, 1]}', "for image_std, where 3 numbers above 0 are expected"),
        ('{"image_std": [1, true, 1]}', "for image_std"),
    ],
)
def test_a_wrong_processor_s_file_is_refused(folder, content, words):
    (folder / "preprocessor_config.json").write_text(content)
    refused(folder, "preprocessor_config.json", words)


def test_the_processor_s_file_scales_the_values(folder):
    assert find_model(str(folder), "vit").images.mean == (0.5, 0.5, 0.5)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.1, 0.2, 0.3], "size": 999}))
    images = find_model(str(folder), "vit").images
    assert (images.mean, images.std, images.size) == ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3), 12)
    file.write_text('{"do_normalize": false}')
    assert find_model(str(folder), "vit").images.std == (1.0, 1.0, 1.0)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    weights = random_model(small_config()).state_dict()
    for name, tensor, words in (
        ("vit.layernorm.weight", torch.zeros(31), "(31,)"),
        ("vit.layernorm.bias", torch.full((32,), torch.nan), "not finite"),
    ):
        folder = folder_of(tmp_path / words[1:3], weights | {name: tensor})
        with pytest.raises(UserError, match=name) as caught:
            built(folder)
        assert words in str(caught.value)
    some = {name: tensor for name, tensor in weights.items() if "layer.2" not in name}
    with pytest.raises(UserError, match=r"has no vit\.encoder\.layer\.2"):
        built(folder_of(tmp_path / "some", some))


def test_models_for_text_and_for_images_are_not_confused(folder):
    refused("vit-tiny", "type vit, not bert", "--model_type vit", model_type="bert")
    refused("minilm", "type bert, not vit", "vit-tiny")
    refused("tiny", "tiny is a model for text", "vit-tiny")
    refused(folder, "--image_size 20", "12 pixels", form=ImageForm(20, 3, is_asked_for=True))
    assert find_model(str(folder), "vit", form=ImageForm(20, 3)).images.size == 12


def test_the_configuration_can_come_from_elsewhere(folder):
    for name in (folder, folder / "config.json"):
        source = find_model("vit-tiny", "vit", config_name=str(name), form=DIGITS)
        assert (source.config.hidden_size, source.images.size, source.weights) == (32, 12, None)
    assert find_model("vit-base", "vit", config_name="vit-tiny", form=DIGITS).config.hidden_size == 128


def test_new_weights_have_the_deviation_of_vit():
    model = build_model(find_model("vit-tiny", "vit", form=DIGITS), HEAD, 10, None, seed=1)
    found = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1 and p.numel() > 200}
    assert found
    assert {name: std for name, std in found.items() if not 0.015 < std < 0.025} == {}
