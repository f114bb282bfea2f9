"""Image files are converted by rule; broken, huge or misplaced ones and paths that lead outside are refused by name."""

import gzip
import io
import itertools
import pickle
import shutil
import struct
import zipfile
import zlib

import numpy as np
import pytest
from data_files import refusal

from cos598d.data import get_task
from cos598d.data.images import decode as decoding
from cos598d.data.images.cifar10 import parse_batch
from cos598d.data.images.decode import Refused, decode
from cos598d.data.images.encoder import ImageEncoder
from cos598d.data.images.files import Archive
from cos598d.errors import UserError

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (the extra images)")
RED, BLUE = (200, 10, 20), (10, 20, 200)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("IMAGE_DIR", raising=False)


def picture(colour=RED, size=(6, 4), mode="RGB", kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, kind, **options)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG of 1 x 1 pixels whose header gives this size."""
    content = picture(size=(1, 1))
    head = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


def near(pixels: np.ndarray, colour, within: int = 3) -> bool:
    return bool(np.abs(pixels.astype(int) - np.array(colour)).max() <= within)


# --- what is converted


def test_pixels_are_those_of_the_file():
    for kind in ("PNG", "BMP", "PPM", "GIF", "WEBP", "JPEG"):
        pixels = decode(picture(kind=kind, quality=95, **{"lossless": True} if kind == "WEBP" else {}))
        assert pixels.shape == (4, 6, 3)
        assert near(pixels, RED, 3 if kind == "JPEG" else 0)
    assert decode(picture(70, mode="L")).shape == (4, 6, 1)


def test_other_modes_are_converted_by_rule():
    assert near(decode(picture((0, 255, 255, 0), mode="CMYK", kind="JPEG", quality=95)), (255, 0, 0), 6)
    assert decode(picture(0x8FFF, mode="I;16")).tolist() == np.full((4, 6, 1), 0x8F).tolist()
    assert near(decode(picture((*RED, 0), mode="RGBA")), (255, 255, 255), 0)  # transparent: white shows through
    assert near(decode(picture((*RED, 255), mode="RGBA")), RED, 0)
    assert near(decode(picture((90, 255), mode="LA")), (90, 90, 90), 0)
    assert decode(picture(1, mode="1")).tolist() == np.full((4, 6, 1), 255).tolist()
    assert decode(picture(size=(1, 1))).shape == (1, 1, 3)


def test_an_animation_gives_its_first_image():
    content = picture(kind="GIF", save_all=True, append_images=[Image.new("RGB", (6, 4), BLUE)], duration=100)
    assert Image.open(io.BytesIO(content)).n_frames == 2
    assert near(decode(content), RED, 0)


def test_an_image_is_turned_as_its_exif_orientation_asks():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn it by a quarter
    assert decode(picture(kind="JPEG", exif=exif.tobytes())).shape == (6, 4, 3)


# --- what is refused


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"GIF89a", "is damaged, or none of JPEG, PNG, GIF, BMP, WEBP, PPM"),
        (b"not an image at all" * 50, "is damaged, or none of JPEG, PNG, GIF, BMP, WEBP, PPM"),
        (picture(size=(300, 300), kind="JPEG")[:-400], "is not an image"),
        (picture(size=(300, 300), kind="BMP")[:1000], "is not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is damaged, or none of"),
        (png_of(9000, 9000), "has 9000 x 9000 pixels, and at most 50 million are read"),
        (png_of(20_000, 20_000), "has more pixels than the 50 million that are read"),
        (png_of(2**31 - 1, 2**31 - 1), "pixels"),
        (picture(size=(300, 300))[:60], "is not an image"),
    ],
    ids=itertools.count(),  # a file's content is no name for a test
)
def test_an_error_names_why_an_image_is_refused(content, why):
    with pytest.raises(Refused) as caught:
        decode(content)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert " object at " not in str(caught.value), "an address in memory tells a user nothing"


def test_a_file_that_is_too_large_is_not_opened(monkeypatch):
    monkeypatch.setattr(decoding, "MOST_BYTES", 10)
    with pytest.raises(Refused, match="is a file of more than"):
        decode(picture())


# --- folders and archives


def write_images(folder, names, colour=RED, size=(6, 4)):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(colour, size))


def loaded(path, part="train", task="image_folder", encoder=None):
    one = get_task(task)
    location, _ = one.locate(str(path))
    one.check(location)
    return one, one.load(part, location, encoder or ImageEncoder(4, 3))


def refused(path, *words, task="image_folder"):
    with refusal(*words):
        loaded(path, task=task)


def zipped(folder):
    return shutil.make_archive(str(folder), "zip", folder.parent, folder.name)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("evaluation", ["dev", "val", "test", "Validation"])
def test_folders_name_classes_and_parts(tmp_path, packed, evaluation):
    folder = tmp_path / "data" / "deeper"
    write_images(folder, ["train/cat/1.png", "train/cat/sub/2.PNG", "train/ant/1.jpg", f"{evaluation}/cat/9.gif"])
    write_images(folder, ["train/dog/1.jpeg", "train/.hidden/1.png", "train/cat/.1.png", "train/cat/notes.txt"], BLUE)
    path = zipped(tmp_path / "data") if packed else tmp_path / "data"
    task, train = loaded(path)
    assert task.classes == ("ant", "cat", "dog")
    assert task.num_labels == 3
    assert train.labels.tolist() == [0, 1, 1, 2]
    assert near(train.pixels[:3], RED)
    assert near(train.pixels[3], BLUE)
    assert loaded(path, "dev")[1].labels.tolist() == [1]


def test_without_parts_a_fixed_fifth_is_for_evaluation(tmp_path):
    names = [f"{name}/{number:02}.png" for name in ("a", "b") for number in range(10)]
    write_images(tmp_path / "images", names)
    task = get_task("image_folder")
    location, _ = task.locate(str(tmp_path / "images"))
    train, dev = (task.source(part, location) for part in ("train", "dev"))
    assert np.bincount(train.labels).tolist() == [8, 8]
    assert np.bincount(dev.labels).tolist() == [2, 2]
    assert not set(train.files) & set(dev.files)


def test_only_changed_images_are_decoded_again(tmp_path, monkeypatch):
    write_images(tmp_path / "images", ["train/a/1.png", "train/b/1.png", "val/a/1.png"])
    first = loaded(tmp_path / "images")[1]
    reads = []
    monkeypatch.setattr("cos598d.data.images.files.decode", lambda content: reads.append(1) or decode(content))
    again = loaded(tmp_path / "images")[1]
    assert reads == []
    assert again.digest() == first.digest()
    (tmp_path / "images/train/b/1.png").write_bytes(picture(BLUE, (5, 5)))
    assert loaded(tmp_path / "images")[1].digest() != first.digest()
    assert len(reads) == 2


def test_an_error_names_up_to_three_broken_files(tmp_path):
    write_images(tmp_path / "images", ["train/a/1.png", "train/b/1.png", "val/a/1.png"])
    (tmp_path / "images/train/a/0\x1b.png").write_bytes(b"broken")
    refused(tmp_path / "images", "train/a/0\\x1b.png is damaged, or none of JPEG", "Fix or remove it")
    for number in range(4):
        (tmp_path / f"images/train/b/z{number}.png").write_bytes(png_of(20_000, 20_000))
    refused(tmp_path / "images", "z0.png has more pixels than", "and 2 more", "Fix or remove them")


def test_folders_without_classes_are_refused(tmp_path):
    for name, files, words in (
        ("empty", [], ["images of no classes"]),
        ("one", ["train/a/1.png", "val/a/1.png"], ["images of one class (a)"]),
        ("loose", ["a/1.png", "b/1.png", "2.png"], ["2.png is in no class's folder"]),
        ("only_dev", ["train/a/1.png", "train/b/1.png", "val/c/1.png"], ["the class c has images to evaluate on"]),
    ):
        (tmp_path / name).mkdir()
        write_images(tmp_path / name, files)
        refused(tmp_path / name, *words)
    refused(tmp_path / "nowhere", "There is no", "--data_dir")
    (tmp_path / "no.zip").write_bytes(b"PK\x03\x04 and nothing more")
    refused(tmp_path / "no.zip", "cannot be read as a zip archive")
    with pytest.raises(UserError, match="IMAGE_DIR"):
        get_task("image_folder").locate(None, {})


def test_links_that_lead_outside_are_refused(tmp_path):
    write_images(tmp_path / "images", ["train/a/1.png", "train/b/1.png", "val/a/1.png"])
    (tmp_path / "secret.png").write_bytes(picture())
    link = tmp_path / "images/train/a/2.png"
    link.symlink_to(tmp_path / "secret.png")
    refused(tmp_path / "images", "train/a/2.png is a link that leads out of its folder")
    link.unlink()
    link.symlink_to("1.png")
    assert len(loaded(tmp_path / "images")[1]) == 3
    (tmp_path / "images/train/c").symlink_to(tmp_path / "images/train/a")
    refused(tmp_path / "images", "is a link to a folder, which is not followed")


def test_harmful_or_damaged_archives_are_refused(tmp_path, monkeypatch):
    for name in ("../a/1.png", "/a/1.png", "a/../../1.png", "a\\..\\1.png"):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            archive.writestr(zipfile.ZipInfo(name), picture())
        with pytest.raises(UserError, match="leads out of the archive"):
            Archive(tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.png", bytes(1 << 20))
        archive.writestr("b/1.png", picture())
    monkeypatch.setattr("cos598d.data.images.files.MOST_BYTES", 1 << 19)
    refused(tmp_path / "bomb.zip", "a/1.png is a file of more than 0 MB")
    # A file of another size than its header gives is cut off at that size, or does not match its checksum.
    content = (tmp_path / "bomb.zip").read_bytes().replace(struct.pack("<I", 1 << 20), struct.pack("<I", 100))
    (tmp_path / "liar.zip").write_bytes(content)
    refused(tmp_path / "liar.zip", "a/1.png")
    with zipfile.ZipFile(tmp_path / "damaged.zip", "w") as archive:
        for name in ("a/1.png", "b/1.png"):
            archive.writestr(name, picture())
    (tmp_path / "damaged.zip").write_bytes((tmp_path / "damaged.zip").read_bytes().replace(b"IDAT", b"IDAX", 1))
    refused(tmp_path / "damaged.zip", "a/1.png")


def test_images_of_many_sizes_keep_their_order(tmp_path):
    sides = np.random.default_rng(0).integers(1, 90, (60, 2)).tolist()
    for number, side in enumerate(sides):
        colour = (number, 2 * number, 3 * number)
        write_images(tmp_path / "images", [f"train/{number % 2}/{number:03}.png"], colour, tuple(side))
    write_images(tmp_path / "images", ["val/0/1.png"])
    train = loaded(tmp_path / "images")[1]
    assert train.pixels[:, 0, 0, 0].tolist() == [*range(0, 60, 2), *range(1, 60, 2)]
    assert train.labels.tolist() == [0] * 30 + [1] * 30


# --- MNIST


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def mnist(folder, stems=("train", "t10k"), packed=True, count=50):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, stem in enumerate(stems):
        images = np.random.default_rng(seed).integers(0, 256, (count, 28, 28))
        for name, array in (("images-idx3", images), ("labels-idx1", np.arange(count) % 10)):
            content = gzip.compress(idx(array)) if packed else idx(array)
            (folder / (f"{stem}-{name}-ubyte" + ".gz" * packed)).write_bytes(content)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_gzipped_or_not(tmp_path, packed):
    mnist(tmp_path / "MNIST" / "raw", packed=packed)
    task = get_task("mnist")
    location, words = task.locate(None, {"IMAGE_DIR": str(tmp_path)})
    assert words == "IMAGE_DIR/MNIST/raw"
    parts = [task.load(part, location, ImageEncoder(28, 1)) for part in ("train", "dev")]
    for seed, part in enumerate(parts):
        images = np.random.default_rng(seed).integers(0, 256, (50, 28, 28))
        assert np.array_equal(part.pixels[..., 0], images)
        assert part.labels.tolist() == [number % 10 for number in range(50)]


def test_a_fifth_of_mnist_s_second_part_is_for_evaluation_without_the_first(tmp_path):
    mnist(tmp_path, ("t10k",))
    assert [len(loaded(tmp_path, part, "mnist")[1]) for part in ("train", "dev")] == [40, 10]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin as an IDX file"),
        (idx(np.zeros((4, 4))), "does not begin as an IDX file of 3 dimensions"),
        (idx(np.zeros((4, 4, 4)))[:-1], "ends early"),
        (idx(np.zeros((4, 4, 4))) + b"\0", "continues after its end"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**31, 2**31), "its header gives 2147483648 x"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 0, 28, 28), "its header gives 0 x 28 x 28"),
        (gzip.compress(idx(np.zeros((4, 4, 4))))[:-20], "end-of-stream"),
        (gzip.compress(idx(np.zeros((400, 4, 4))) + bytes(1 << 22)), "continues after its end"),
        (b"\x1f\x8b" + b"\xff" * 50, "cannot be read as an IDX file"),
    ],
    ids=itertools.count(),
)
def test_a_file_that_is_no_idx_file_is_refused(tmp_path, content, words):
    file = mnist(tmp_path, packed=False) / "t10k-images-idx3-ubyte"
    file.write_bytes(content)
    refused(tmp_path, f"{file} cannot be read as an IDX file (", words, task="mnist")


def test_mnist_whose_files_do_not_fit_or_are_missing_is_refused(tmp_path):
    folder = mnist(tmp_path / "short")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(49))))
    refused(folder, "49 for 50 images", task="mnist")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.full(50, 10))))
    refused(folder, "one is above 9", task="mnist")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    refused(folder, "has no train-labels-idx1-ubyte", task="mnist")
    refused(tmp_path, "No MNIST in", "IMAGE_DIR", task="mnist")


# --- CIFAR-10


def batch_of(count: int, seed: int = 0, protocol: int = 4) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (count, 3072)).astype(np.uint8)
    return pickle.dumps({b"data": values, b"labels": [number % 10 for number in range(count)]}, protocol)


def test_cifars_batches_are_read(tmp_path):
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}").write_bytes(batch_of(20, number))
    (tmp_path / "test_batch").write_bytes(batch_of(10, 9))
    train, dev = (loaded(tmp_path, part, "cifar10", ImageEncoder(32, 3))[1] for part in ("train", "dev"))
    assert (len(train), len(dev)) == (100, 10)
    values = np.random.default_rng(9).integers(0, 256, (10, 3072)).astype(np.uint8)
    assert np.array_equal(dev.pixels[3, 5, 7], values[3].reshape(3, 32, 32)[:, 5, 7])
    assert dev.labels.tolist() == list(range(10))
    (tmp_path / "data_batch_3").unlink()
    refused(tmp_path, "data_batch_3 is missing", task="cifar10")


def of_python_2(values: np.ndarray, labels: list[int]) -> bytes:
    """A batch as the published files have it: str in place of bytes, and numpy's old name for its module."""
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"K" + bytes([len(values)]) + b"M" + struct.pack("<H", values.shape[1]) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape + kind
    array += b"\x89T" + struct.pack("<I", values.size) + values.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def test_a_batch_pickled_by_python_2_is_read(tmp_path):
    values = np.random.default_rng(4).integers(0, 256, (2, 3072)).astype(np.uint8)
    (tmp_path / "batch").write_bytes(of_python_2(values, [3, 4]))
    images, labels = parse_batch(tmp_path / "batch")
    assert np.array_equal(images[1, 0, 31], values[1].reshape(3, 32, 32)[:, 0, 31])
    assert labels.tolist() == [3, 4]


class Attack:
    def __reduce__(self):
        return exec, ("raise SystemExit('this was run')",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(Attack(), 2), "exec, which no batch needs"),
        (pickle.dumps({b"data": Attack(), b"labels": []}, 2), "which no batch needs"),
        (b"cos\nsystem\n(S'echo'\ntR.", "os.system, which no batch needs"),
        (pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}, 4), "not unsigned bytes"),
        (pickle.dumps({b"data": np.zeros((1, 30), dtype=np.uint8), b"labels": [1]}, 4), "the shape (1, 30)"),
        (pickle.dumps({b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [1]}, 4), "a label for each"),
        (pickle.dumps({b"data": np.zeros((1, 3072), dtype=np.uint8), b"labels": [10]}, 4), "not numbers from 0 to 9"),
        (pickle.dumps({b"data": np.array([[Attack()]], dtype=object), b"labels": [1]}, 4), "not unsigned bytes"),
        (pickle.dumps([1, 2, 3]), "cannot be read as a batch"),
        (batch_of(3)[:-50], "cannot be read as a batch"),
        (b"", "cannot be read as a batch"),
    ],
    ids=itertools.count(),
)
def test_a_pickle_that_is_no_batch_is_refused_without_running_it(tmp_path, content, words):
    (tmp_path / "test_batch").write_bytes(content)
    with refusal(words, f"{tmp_path / 'test_batch'} cannot be read as a batch of CIFAR-10 ("):
        get_task("cifar10").check(tmp_path, ["dev"])


def test_cifar_as_image_files_is_read_from_a_folder_or_an_archive(tmp_path):
    write_images(tmp_path / "all" / "cifar10", ["train/cat/1.png", "train/ship/1.png", "test/cat/1.png"])
    zipped(tmp_path / "all" / "cifar10")
    for path in (tmp_path / "all", tmp_path / "all" / "cifar10", tmp_path / "all" / "cifar10.zip"):
        task, train = loaded(path, task="cifar10")
        assert task.num_labels == 10
        assert train.labels.tolist() == [3, 8]
    write_images(tmp_path / "other", ["train/cat/1.png", "train/tree/1.png", "test/cat/1.png"])
    refused(tmp_path / "other", "a class tree", task="cifar10")
    refused(tmp_path, "No images of CIFAR-10", task="cifar10")
