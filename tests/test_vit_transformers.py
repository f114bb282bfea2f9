"""Our vision transformer and transformers' own: the same function, the same gradients, the same files.

transformers is no part of what the project installs: `pip install '.[vit-test]'`, in an environment of its own.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_vit import HEAD, batch, random_model, small_config

from cos598d.data.images.encoder import ImageEncoder
from cos598d.models.build import build_model, find_model
from cos598d.models.checkpoint import save_model
from cos598d.models.vit import ACTIVATIONS

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra vit-test)")


def theirs_of(folder, model) -> torch.nn.Module:
    """transformers' model of what we have saved."""
    config = model.config
    save_model(folder, model, ImageEncoder(config.image_size, config.num_channels))
    return transformers.ViTForImageClassification.from_pretrained(folder)


def published(folder, model) -> dict[str, torch.Tensor]:
    """A transformers model's tensors by the names in its files."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_logits_and_gradients_are_the_same(tmp_path, activation, bias):
    config = small_config(num_labels=7, hidden_act=activation, qkv_bias=bias)
    ours = random_model(config).train()
    theirs = theirs_of(tmp_path / "ours", ours).train()
    inputs = batch(config)
    loss, logits = ours(**inputs)
    loss.backward()
    found = theirs(**inputs)
    found.loss.backward()
    assert (logits - found.logits).abs().max() <= 1e-5
    assert (loss - found.loss).abs() <= 1e-5
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    gradients = published(tmp_path / "gradients", theirs)
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-5, name


@pytest.mark.parametrize("kind", ["ViTModel", "ViTForImageClassification"])
def test_a_folder_made_by_transformers_loads_and_what_we_save_loads_there(tmp_path, kind):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, image_size=16, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    made = getattr(transformers, kind)(config)
    made.save_pretrained(tmp_path / "made")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "made")
    source = find_model(str(tmp_path / "made"), "vit")
    model = build_model(source, HEAD, 3, None, seed=1).eval()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        (scores,) = model(pixels)
        there = theirs_of(tmp_path / "saved", model).eval()
        assert torch.allclose(there(pixels).logits, scores, atol=1e-5)
        if kind == "ViTForImageClassification":
            assert torch.allclose(made.eval()(pixels).logits, scores, atol=1e-5)
        else:
            state = made.eval()(pixels).last_hidden_state[:, 0]
            assert torch.allclose(model.classifier(state), scores, atol=1e-5)


def test_images_are_scaled_as_transformers_scales_them(tmp_path):
    encoder = ImageEncoder(24, 3, (0.4, 0.5, 0.6), (0.2, 0.3, 0.1))
    encoder.save(tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (40, 31, 3)).astype(np.uint8)
    wanted = torch.as_tensor(np.asarray(processor(image, return_tensors="np")["pixel_values"]))
    found = encoder.scale(encoder.fit(image[None]))
    # Each resizes and then rounds, by a library of its own: a value may come out as the neighbouring one.
    steps = (found - wanted).abs() * 255 * torch.tensor(encoder.std).view(-1, 1, 1)
    assert steps.max() <= 1.01
    assert steps.mean() < 0.2
