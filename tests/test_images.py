"""Images are resized and scaled by rule; each run has the same parts and draws the same changes."""

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from cos598d.config import config_from
from cos598d.data import get_task
from cos598d.data.examples import split
from cos598d.data.images.encoder import ImageEncoder, Images, augment
from cos598d.data.images.task import ImagesInMemory
from cos598d.data.tasks import TaskOptions
from cos598d.errors import UsageError, UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))


def pixels_of(count: int, size: int = 16, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, size, size, channels)).astype(np.uint8)


def images(augments: bool = True) -> Images:
    return Images(pixels_of(10), np.arange(10, dtype=np.int64) % 3, ImageEncoder(16, 3), augments, True)


# --- pixels


def test_fit_keeps_the_model_s_size_and_converts_grey_and_colour():
    grey, coloured = pixels_of(3, channels=1), pixels_of(3)
    assert np.array_equal(ImageEncoder(16, 1).fit(grey), grey)
    assert np.array_equal(ImageEncoder(16, 3).fit(grey), np.repeat(grey, 3, axis=3))
    assert np.array_equal(ImageEncoder(16, 1).fit(np.repeat(grey, 3, axis=3)), grey)
    weights = np.array([0.299, 0.587, 0.114])
    assert np.abs(ImageEncoder(16, 1).fit(coloured)[..., 0] - coloured @ weights).max() <= 0.5 + 1e-4


def test_larger_images_are_averaged_and_smaller_ones_interpolated():
    stripes = np.zeros((1, 40, 40, 1), dtype=np.uint8)
    stripes[:, ::2] = 200  # finer than the result can show: its mean is what is left
    shrunk = ImageEncoder(10, 1).fit(stripes)
    assert shrunk.shape == (1, 10, 10, 1)
    assert np.abs(shrunk[:, 1:-1].astype(int) - 100).max() <= 5
    ramp = np.repeat(np.array([0, 90], dtype=np.uint8)[None, :, None, None], 2, axis=2)
    grown = ImageEncoder(6, 1).fit(ramp)[0, :, 0, 0].astype(int)
    assert (np.diff(grown) >= 0).all()
    assert (grown[0], grown[-1]) == (0, 90)
    wide = ImageEncoder(8, 3).fit(pixels_of(2, 30)[:, :11])
    assert wide.shape == (2, 8, 8, 3)


def test_values_are_scaled_by_channel():
    encoder = ImageEncoder(2, 3, (0.0, 0.5, 1.0), (1.0, 0.5, 0.25))
    values = encoder.scale(np.full((1, 2, 2, 3), 255, dtype=np.uint8))
    assert values.shape == (1, 3, 2, 2)
    assert values.dtype == torch.float32
    assert values[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]


# --- random changes


def test_an_image_s_changes_depend_only_on_its_index_and_the_draw():
    features = images()
    whole = features.collate(np.arange(10), (42, 1))["pixel_values"]
    for chosen in ([3], [9, 3, 0], [5, 6, 7, 3]):
        assert torch.equal(features.collate(np.array(chosen), (42, 1))["pixel_values"], whole[chosen])
    for draw in ((42, 2), (43, 1)):
        assert not torch.equal(features.collate(np.arange(10), draw)["pixel_values"], whole)


def test_images_are_unchanged_without_a_draw_and_without_augment():
    unchanged = images().collate(np.arange(10))["pixel_values"]
    assert torch.equal(images(augments=False).collate(np.arange(10), (42, 1))["pixel_values"], unchanged)
    assert torch.equal(ImageEncoder(16, 3).scale(pixels_of(10)), unchanged)


def test_only_shifts_and_the_mirror_are_drawn_and_each_of_them():
    pixels = np.zeros((400, 16, 16, 1), dtype=np.uint8)
    pixels[:, 8, 5] = 255
    places = {tuple(np.argwhere(one[..., 0])[0]) for one in augment(pixels, range(400), (1,), mirrors=False)}
    assert places == {(8 + down, 5 + right) for down in range(-2, 3) for right in range(-2, 3)}
    mirrored = augment(pixels, range(400), (1,), mirrors=True)
    columns = np.array([np.argwhere(one[..., 0])[0][1] for one in mirrored])
    assert set(columns) == {3, 4, 5, 6, 7} | {15 - column for column in (3, 4, 5, 6, 7)}
    assert 0.4 < (columns > 7).mean() < 0.6
    unmirrored = augment(pixels, range(400), (1,), mirrors=False)
    assert all((one == other).all() or (one[:, ::-1] == other).all() for one, other in zip(mirrored, unmirrored))


# --- parts


def test_a_fixed_fifth_of_each_class_is_for_evaluation():
    labels = np.repeat([0, 1, 2, 3], [50, 23, 5, 4])
    train, dev = split(labels, "train"), split(labels, "dev")
    assert np.array_equal(np.sort(np.concatenate([train, dev])), np.arange(82))
    assert np.bincount(labels[dev], minlength=4).tolist() == [10, 4, 1, 0]
    assert not np.array_equal(dev[:10], np.arange(10))
    assert np.array_equal(split(labels, "dev"), dev)


def test_the_digits_are_all_of_scikit_learn_s():
    task = get_task("digits")
    parts = [task.load(part, None, ImageEncoder(8, 1)) for part in ("train", "dev")]
    assert [len(part) for part in parts] == [1442, 355]
    pixels = np.concatenate([part.pixels for part in parts]).astype(int)[..., 0]
    labels = np.concatenate([part.labels for part in parts])
    published = load_digits()
    assert {(np.rint(image / 255 * 16).astype(int).tobytes(), label) for image, label in zip(pixels, labels)} == {
        (image.astype(int).tobytes(), label) for image, label in zip(published.images, published.target)
    }
    assert parts[0].labels.dtype == np.int64
    assert not task.mirrors, "a digit in a mirror is none"


def test_a_limit_takes_fixed_images_and_each_size_has_its_own_cache_file(tmp_path):
    task = get_task("digits")
    some = task.load("train", None, ImageEncoder(8, 1), limit=100)
    whole = task.load("train", None, ImageEncoder(8, 1))
    assert np.array_equal(some.pixels, whole.pixels[np.arange(100) * 1442 // 100])
    assert task.load("dev", None, ImageEncoder(16, 3)).pixels.shape == (355, 16, 16, 3)
    assert len(list((tmp_path / "cache" / "images").glob("*.safetensors"))) == 3
    again = task.load("train", None, ImageEncoder(8, 1), limit=100)
    assert not again.pixels.flags.owndata  # mapped
    assert again.digest() == some.digest() != whole.digest()


def test_images_in_memory_are_fitted_block_by_block():
    source = ImagesInMemory(pixels_of(600, 4, 1), np.zeros(600))
    places = np.arange(599, -1, -1)
    assert np.array_equal(source.pixels(places, ImageEncoder(4, 1)), pixels_of(600, 4, 1)[::-1])


# --- flags


def test_a_task_of_images_has_its_own_defaults():
    config = config_from({"task_name": "digits"})
    assert (config.model_type, config.model_name_or_path) == ("vit", "vit-tiny")
    config.check(2)
    assert config.task().image_form.size == 8
    assert get_task("digits", TaskOptions(image_size=16)).image_form.size == 16
    assert config_from({"task_name": "digits", "learning_rate": 0.5}).learning_rate == 0.5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task_name": "digits", "model_type": "bert"}, "--model_type bert cannot do digits. Choose vit."),
        ({"task_name": "rte", "model_type": "vit"}, "--model_type vit cannot do rte. Choose bert or roberta"),
        ({"task_name": "rte", "augment": True}, "--augment is for images, and the task is rte"),
        ({"task_name": "squad", "image_size": 16}, "--image_size is for images, and the task is squad"),
        ({"task_name": "digits", "doc_stride": 5}, "--doc_stride is SQuAD's, and the task is digits"),
        ({"task_name": "digits", "max_seq_length": 64}, "--max_seq_length is for texts, and the task is digits"),
        ({"task_name": "digits", "do_lower_case": True}, "--do_lower_case is for texts"),
        ({"task_name": "digits", "image_size": 3}, "--image_size 3 is not valid. Give a number of at least 4"),
    ],
)
def test_flags_for_another_kind_of_task_are_refused(values, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        config_from(values).check(1)


def test_the_digits_have_no_folder_and_no_other_part():
    with pytest.raises(UserError, match="Leave --data_dir out"):
        get_task("digits").locate("somewhere")
    with pytest.raises(ValueError, match="has the parts train, dev"):
        get_task("digits").load("test", None, ImageEncoder(8, 1))
