"""Images become what a model reads, by rule; a part of a data set is the same for every run, and so is every change."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from cos598d.config import RunConfig, config_from
from cos598d.data import get_task
from cos598d.data.examples import split
from cos598d.data.images.encoder import ImageEncoder, Images, augment
from cos598d.data.images.task import ImageOptions, ImagesInMemory
from cos598d.data.tasks import TaskOptions
from cos598d.errors import UsageError, UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))


def pixels_of(count: int, size: int = 16, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, size, size, channels)).astype(np.uint8)


def images(augments: bool = True, mirrors: bool = True, count: int = 10) -> Images:
    labels = np.arange(count, dtype=np.int64) % 3
    return Images(pixels_of(count), labels, ImageEncoder(16, 3), augments, mirrors)


# --- pixels


def test_an_image_of_the_models_size_stays_as_it_is_and_grey_becomes_colour_and_back():
    grey, coloured = pixels_of(3, channels=1), pixels_of(3)
    assert np.array_equal(ImageEncoder(16, 1).fit(grey), grey)
    assert np.array_equal(ImageEncoder(16, 3).fit(grey), np.repeat(grey, 3, axis=3))
    assert np.array_equal(ImageEncoder(16, 1).fit(np.repeat(grey, 3, axis=3)), grey)
    weights = np.array([0.299, 0.587, 0.114])
    assert np.abs(ImageEncoder(16, 1).fit(coloured)[..., 0] - coloured @ weights).max() <= 0.5 + 1e-4


def test_a_larger_image_is_averaged_and_a_smaller_one_is_interpolated():
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


def test_an_images_changes_depend_on_its_index_and_the_epoch_alone():
    features = images()
    whole = features.collate(np.arange(10), (42, 1))["pixel_values"]
    for chosen in ([3], [9, 3, 0], [5, 6, 7, 3]):
        batch = features.collate(np.array(chosen), (42, 1))["pixel_values"]
        assert torch.equal(batch, whole[chosen])
    for draw in ((42, 2), (43, 1)):
        assert not torch.equal(features.collate(np.arange(10), draw)["pixel_values"], whole)


def test_without_a_draw_or_where_nobody_asked_nothing_changes():
    as_they_are = images().collate(np.arange(10))["pixel_values"]
    assert torch.equal(images(augments=False).collate(np.arange(10), (42, 1))["pixel_values"], as_they_are)
    assert torch.equal(ImageEncoder(16, 3).scale(pixels_of(10)), as_they_are)


def test_every_shift_and_the_mirror_are_drawn_and_no_other_change():
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


def test_a_digit_in_a_mirror_is_none():
    assert not get_task("digits").mirrors


# --- parts


def test_a_fifth_of_each_class_is_for_evaluation_and_no_image_is_in_both_parts():
    labels = np.repeat([0, 1, 2, 3], [50, 23, 5, 4])
    train, dev = split(labels, "train"), split(labels, "dev")
    assert np.array_equal(np.sort(np.concatenate([train, dev])), np.arange(82))
    assert np.bincount(labels[dev], minlength=4).tolist() == [10, 4, 1, 0]
    assert not np.array_equal(dev[:10], np.arange(10))
    assert np.array_equal(split(labels, "dev"), dev)


def test_the_digits_are_scikit_learns_all_of_them_once():
    task = get_task("digits")
    parts = [task.load(part, None, ImageEncoder(8, 1)) for part in ("train", "dev")]
    assert [len(part) for part in parts] == [1442, 355]
    found = load_digits()
    there = {(image.astype(int).tobytes(), int(label)) for image, label in zip(found.images, found.target)}
    here = {
        (np.rint(image[..., 0] / 255 * 16).astype(int).tobytes(), int(label))
        for part in parts
        for image, label in zip(part.pixels, part.labels)
    }
    assert here == there
    assert parts[0].labels.dtype == np.int64


def test_a_limit_takes_the_same_images_whatever_else_is_asked_and_the_cache_tells_sizes_apart(tmp_path):
    task = get_task("digits")
    some = task.load("train", None, ImageEncoder(8, 1), limit=100)
    whole = task.load("train", None, ImageEncoder(8, 1))
    assert np.array_equal(some.pixels, whole.pixels[np.arange(100) * 1442 // 100])
    assert task.load("dev", None, ImageEncoder(16, 3)).pixels.shape == (355, 16, 16, 3)
    assert len(list((tmp_path / "cache" / "images").glob("*.safetensors"))) == 3
    again = task.load("train", None, ImageEncoder(8, 1), limit=100)
    assert not again.pixels.flags.owndata  # mapped
    assert again.digest() == some.digest() != whole.digest()


def test_images_in_memory_are_brought_to_size_block_by_block():
    source = ImagesInMemory(pixels_of(600, 4, 1), np.zeros(600))
    places = np.arange(599, -1, -1)
    assert np.array_equal(source.pixels(places, ImageEncoder(4, 1)), pixels_of(600, 4, 1)[::-1])


# --- flags


def test_a_task_of_images_brings_its_own_defaults():
    config = config_from({"task_name": "digits"})
    assert (config.model_type, config.model_name_or_path) == ("vit", "vit-tiny")
    config.check(2)
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
def test_flags_of_another_kind_of_task_are_refused(values, words):
    with pytest.raises(UsageError) as caught:
        config_from(values).check(1)
    assert words in str(caught.value)


def test_the_digits_are_in_no_folder_and_have_no_other_part():
    with pytest.raises(UserError, match="Leave --data_dir out"):
        get_task("digits").locate("somewhere")
    with pytest.raises(ValueError, match="has the parts train, dev"):
        get_task("digits").load("test", None, ImageEncoder(8, 1))


def test_the_size_that_is_asked_for_is_the_tasks():
    assert get_task("digits", TaskOptions(image_size=16)).image_form.size == 16
    assert RunConfig(task_name="digits").task().image_form.size == 8
    assert issubclass(TaskOptions, ImageOptions)
