"""Digits, CIFAR-10's binary files, folders of images: pixels, labels, augmenting. Imports: one call of a task's methods
in the place of a run of seconds."""

import numpy as np
import pytest
import torch
from data_files import task_at

from cos598d.data import get_task
from cos598d.data.encoders import ImageEncoder
from cos598d.errors import UserError

GREY, COLOURED = ImageEncoder(8, 1), ImageEncoder(32, 3)


def test_digits_are_scikit_learns_and_a_fifth_is_evaluated_on():
    from sklearn.datasets import load_digits

    task, digits = get_task("digits"), load_digits()
    assert task.find(None) == "scikit-learn's digits"
    parts = {part: task.load(part, GREY) for part in task.parts}
    assert sum(map(len, parts.values())) == len(digits.target)
    for number in range(10):
        counts = [int((part.labels == number).sum()) for part in parts.values()]
        assert counts[1] == sum(counts) // 5
    batch = parts["train"].collate([3, 4])
    assert batch["pixel_values"].shape == (2, 1, 8, 8)
    known = {tuple(np.rint(image.ravel() * 255 / 16).astype(int)) for image in digits.images}
    pixels = ((batch["pixel_values"] + 1) / 2 * 255).round().int()
    assert all(tuple(one.ravel().tolist()) in known for one in pixels)
    assert parts["train"].counts(np.array([1, 2, 3])) == {"images": 3}
    assert len(task.load("train", GREY, limit=7)) == 7
    with pytest.raises(UserError, match="Leave --data_dir out"):
        task.find("somewhere")


def test_augmenting_depends_on_the_example_and_the_epoch_alone():
    task, plain = (task_at(None, "digits", augment=augment) for augment in (True, False))
    examples, unchanged = task.load("train", GREY), plain.load("train", GREY)
    alone = examples.collate([5], (1, 2))["pixel_values"][0]
    assert torch.equal(alone, examples.collate([9, 5, 7], (1, 2))["pixel_values"][1])
    drawn = [examples.collate([5], (1, epoch))["pixel_values"] for epoch in range(9)]
    assert len({one.numpy().tobytes() for one in drawn}) > 3
    assert torch.equal(examples.collate([5])["pixel_values"], unchanged.collate([5], (1, 2))["pixel_values"])


def test_cifar10s_binary_files_are_read_in_their_order(tmp_path):
    drawn = np.random.default_rng(0)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    rows = {}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        rows[name] = drawn.integers(0, 256, (6, 3073), dtype=np.uint8)
        rows[name][:, 0] %= 10
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows[name].tobytes())
    task = task_at(tmp_path, "cifar10")
    train, dev = (task.load(part, COLOURED) for part in task.parts)
    assert len(train) == 30
    assert dev.labels.tolist() == rows["test_batch"][:, 0].tolist()
    assert train.labels[6:12].tolist() == rows["data_batch_2"][:, 0].tolist()
    planes = rows["test_batch"][2, 1:].reshape(3, 32, 32)
    assert torch.equal(((dev.collate([2])["pixel_values"][0] + 1) * 127.5).round().byte(), torch.from_numpy(planes))
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"\x01" * 100)
    with pytest.raises(UserError, match=r"not CIFAR-10's binary version .* --tasks CIFAR10"):
        task.load("dev", COLOURED)


@pytest.fixture
def pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    drawn = np.random.default_rng(0)
    for name, size, mode in (("cat", (40, 30), "RGB"), ("dog", (64, 64), "L")):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(10):
            shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
            picture = image.fromarray(drawn.integers(0, 256, shape, dtype=np.uint8))
            picture.save(tmp_path / "own" / name / f"{number}.png")
    return tmp_path / "own"


def test_a_folder_of_images_has_a_class_per_folder(pictures, monkeypatch):
    monkeypatch.setenv("IMAGE_DIR", str(pictures))
    task = task_at(None, "image_folder", image_size=32)
    assert task.classes == ("cat", "dog")
    train, dev = (task.load(part, COLOURED) for part in task.parts)
    assert (len(train), np.bincount(dev.labels).tolist()) == (16, [2, 2])
    assert train.collate([0, 15])["pixel_values"].shape == (2, 3, 32, 32)
    digests = {part: task.load(part, COLOURED).digest() for part in task.parts}
    divided = pictures.parent / "divided"
    for part in ("train", "valid"):
        (divided / part).parent.mkdir(exist_ok=True)
        (divided / part).symlink_to(pictures)
    task.find(str(divided))
    assert [len(task.load(part, COLOURED)) for part in task.parts] == [20, 20]
    assert len(set(digests.values())) == 2


def test_images_that_cannot_be_read_are_named(pictures):
    (pictures / "cat" / "bad.png").write_bytes(b"x")
    for place, words in (
        (pictures, "bad.png is not an image"),
        (pictures / "cat", "has 0 folders of images"),
        (pictures / "no", "does not exist"),
    ):
        with pytest.raises(UserError, match=words):
            task_at(place, "image_folder").load("train", COLOURED)


def test_images_are_scaled_to_the_models_size_and_colours():
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (1, 20, 20, 3), dtype=np.uint8)
    found = ImageEncoder(10, 3).fit(pixels)
    wanted = np.asarray(image.fromarray(pixels[0]).resize((10, 10), image.Resampling.BILINEAR))
    assert np.abs(found[0].astype(int) - wanted).max() <= 1
    grey = ImageEncoder(20, 1).fit(pixels)
    assert np.abs(grey[0, ..., 0].astype(int) - np.asarray(image.fromarray(pixels[0]).convert("L"))).max() <= 1
    scaled = ImageEncoder(20, 3).scale(pixels)
    assert (scaled.min().item(), scaled.max().item()) == (-1.0, 1.0)
