"""MNIST and CIFAR-10 are fetched with the care of the texts, and land where their tasks find them."""

import gzip
import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from download_mirror import get, left_in, serving
from test_image_files import batch_of, idx

from cos598d.data import get_task
from cos598d.data.fetch.catalogue import CATALOGUE, Dataset, DatasetFile, choose
from cos598d.data.fetch.check import digest_of
from cos598d.data.fetch.download import main
from cos598d.data.fetch.unpack import unpack_tar
from cos598d.data.images.encoder import ImageEncoder
from cos598d.errors import UserError

PARTS = [part.name for part in CATALOGUE["CIFAR10"].parts]
BATCHES = {name: batch_of(20, seed) for seed, name in enumerate(PARTS)}


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as offered:
        yield offered


def small_mnist() -> tuple[Dataset, dict[str, bytes]]:
    """MNIST with 40 images in each part, and its files."""
    files, parts = {}, []
    for part in CATALOGUE["MNIST"].parts:
        is_images = "images" in part.name
        values = np.random.default_rng(1).integers(0, 256, (40, 28, 28)) if is_images else np.arange(40) % 10
        files[part.name] = gzip.compress(idx(values))
        parts.append(DatasetFile(part.name, (40,), sha256=hashlib.sha256(files[part.name]).hexdigest()))
    return replace(CATALOGUE["MNIST"], parts=tuple(parts)), files


def small_cifar() -> Dataset:
    """CIFAR-10 with 20 images in each batch."""
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in BATCHES.items()}
    parts = tuple(DatasetFile(name, (20,), size=len(content), md5=md5[name]) for name, content in BATCHES.items())
    return replace(CATALOGUE["CIFAR10"], parts=parts)


def tar_of(files, *infos: tarfile.TarInfo) -> bytes:
    """A gzipped tar archive as the published one is, with a folder around all; `infos` are further members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        folder = tarfile.TarInfo("cifar-10-batches-py")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in infos:
            archive.addfile(info)
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def refused(mirror, folder, words):
    with pytest.raises(UserError) as raised:
        get(mirror, folder, small_cifar())
    assert words in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)
    assert left_in(folder) == []


def test_mnist_lands_where_its_task_looks_and_only_what_is_missing_is_fetched(mirror, tmp_path):
    dataset, mirror.files = small_mnist()
    said = get(mirror, tmp_path, dataset)
    assert said[-1].startswith("MNIST: 40 + 40 + 40 + 40 rows; 4 files' sha256 as recorded, in ")
    task = get_task("mnist")
    location, words = task.locate(None, {"IMAGE_DIR": str(tmp_path)})
    assert words == "IMAGE_DIR/MNIST"
    assert [len(task.load(part, location, ImageEncoder(28, 1))) for part in ("train", "dev")] == [40, 40]
    mirror.asked.clear()
    (tmp_path / "MNIST/t10k-labels-idx1-ubyte.gz").unlink()
    get(mirror, tmp_path, dataset)
    assert [name for name, _ in mirror.asked] == ["t10k-labels-idx1-ubyte.gz"]
    assert "already there" in get(mirror, tmp_path, dataset)[0]


def test_cifar_lands_where_its_task_looks(mirror, tmp_path):
    mirror.files["cifar-10-python.tar.gz"] = tar_of({**BATCHES, "batches.meta": b"meta", "readme.html": b"<p>"})
    mirror.break_after = [30_000]
    said = get(mirror, tmp_path, small_cifar())
    assert "20 + 20 + 20 + 20 + 20 + 20 rows; 6 files' size and md5 as recorded" in said[-1]
    assert "only the rows speak for it" not in said[-1]
    folder = tmp_path / "cifar-10-batches-py"
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in BATCHES} == BATCHES
    assert (folder / "readme.html").is_file()
    assert left_in(tmp_path) == ["cifar-10-batches-py"]
    task = get_task("cifar10")
    location, words = task.locate(None, {"IMAGE_DIR": str(tmp_path)})
    assert words == "IMAGE_DIR/cifar-10-batches-py"
    assert [len(task.load(part, location, ImageEncoder(32, 3))) for part in ("train", "dev")] == [100, 20]


def test_damaged_batches_are_refused_and_a_damaged_copy_is_fetched_anew(mirror, tmp_path):
    longer, other = BATCHES["data_batch_2"] + b"x", batch_of(20, 9)
    for content, words in (
        (longer, f"data_batch_2 has {len(longer)} bytes where {len(other)} were expected"),
        (other, "data_batch_2 has the md5"),
        (batch_of(19, 1), "data_batch_2 has 19 rows where 20 were expected"),
        (b"<html>", "data_batch_2 cannot be read ("),
    ):
        mirror.files["cifar-10-python.tar.gz"] = tar_of({**BATCHES, "data_batch_2": content})
        refused(mirror, tmp_path / "data", words)
    mirror.files["cifar-10-python.tar.gz"] = tar_of(BATCHES)
    folder = tmp_path / "data/cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(BATCHES["test_batch"][:-9])
    said = get(mirror, tmp_path / "data", small_cifar())
    assert "test_batch cannot be read (" in said[0]
    assert str(tmp_path) not in said[0].split(" in ")[0]
    assert (folder / "test_batch").read_bytes() == BATCHES["test_batch"]
    assert (folder / "test_batch.replaced-1").read_bytes() == BATCHES["test_batch"][:-9]


def test_an_mnist_file_with_another_digest_is_refused(mirror, tmp_path):
    dataset, mirror.files = small_mnist()
    mirror.files["train-labels-idx1-ubyte.gz"] = gzip.compress(idx(np.ones(40)))
    with pytest.raises(UserError, match="train-labels-idx1-ubyte.gz has the sha256"):
        get(mirror, tmp_path, dataset)
    mirror.files["train-labels-idx1-ubyte.gz"] = b"<html>Log in</html>"
    with pytest.raises(UserError, match="train-labels-idx1-ubyte.gz cannot be read .it does not begin as an IDX"):
        get(mirror, tmp_path, dataset)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (member("../out"), "which leads outside its folder"),
        (member("/tmp/out"), "which leads outside its folder"),
        (member("C:\\out"), "which leads outside its folder"),
        (member("x/link", tarfile.SYMTYPE, "/etc/passwd"), "a link or special file"),
        (member("x/hard", tarfile.LNKTYPE, "cifar-10-batches-py/test_batch"), "a link or special file"),
        (member("x/device", tarfile.CHRTYPE), "a link or special file"),
        (member("x/pipe", tarfile.FIFOTYPE), "a link or special file"),
        (member("x/sparse", tarfile.GNUTYPE_SPARSE), "a link or special file"),
        (member("cifar-10-batches-py/test_batch"), "a name that the disk does not take (File exists)"),
        (member("cifar-10-batches-py/test_batch/x"), "a name that the disk does not take"),
        (member("x" * 300), "a name that the disk does not take (File name too long)"),
        (member("x/huge", size=1 << 40), "would unpack to"),
    ],
    ids=lambda value: value.name[:30] if isinstance(value, tarfile.TarInfo) else None,
)
def test_a_tar_archive_with_a_member_that_harms_is_refused(mirror, tmp_path, info, words):
    mirror.files["cifar-10-python.tar.gz"] = tar_of(BATCHES, info)
    refused(mirror, tmp_path / "data", words)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "checksum", "web page", "empty", "gzip of no tar"])
def test_a_damaged_tar_archive_is_refused(mirror, tmp_path, damage):
    content = tar_of(BATCHES)
    flipped, checksum = bytearray(content), bytearray(content)
    flipped[len(content) // 2] ^= 255
    checksum[-8] ^= 255  # where gzip keeps the CRC of the whole
    mirror.files["cifar-10-python.tar.gz"] = {
        "cut": content[: len(content) // 2],
        "flipped": bytes(flipped),
        "checksum": bytes(checksum),
        "web page": b"<!DOCTYPE html><title>Log in</title>",
        "empty": b"",
        "gzip of no tar": gzip.compress(b"not a tar archive" * 100),
    }[damage]
    refused(mirror, tmp_path, "not a whole gzipped tar archive")


def test_a_tar_archive_that_unpacks_without_end_is_read_no_further_than_is_allowed(tmp_path):
    # Behind the end of the tar archive: its members say nothing of it.
    (tmp_path / "bomb").write_bytes(tar_of({}) + gzip.compress(bytes(32 * 1024**2)))
    (tmp_path / "into").mkdir()
    with pytest.raises(UserError, match="bomb unpacks to more than is allowed"):
        unpack_tar({"bomb": tmp_path / "bomb"}, tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_images_are_fetched_by_name_alone_and_without_a_network_the_digits_are_a_way_out(monkeypatch, tmp_path, capsys):
    assert [one.name for one in choose("mnist,CIFAR-10")] == ["MNIST", "CIFAR10"]
    assert not {"MNIST", "CIFAR10"} & {one.name for one in choose("all")}
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    words = ["--data_dir", str(tmp_path), "--tasks", "CIFAR10", "--base_url", "http://127.0.0.1:1"]
    assert main(words) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "--task_name digits" in printed


def test_the_command_says_how_training_finds_them(mirror, monkeypatch, tmp_path, capsys):
    dataset, mirror.files = small_mnist()
    monkeypatch.setattr("cos598d.data.fetch.download.choose", lambda words: [dataset])
    assert main(["--data_dir", str(tmp_path), "--tasks", "MNIST", "--base_url", mirror.url]) == 0
    assert f"export IMAGE_DIR={tmp_path}" in capsys.readouterr().out


def test_the_real_mnist_has_the_recorded_digests():
    folder = Path(os.environ.get("IMAGE_DIR", ""))
    found = {part.name: part.sha256 for part in CATALOGUE["MNIST"].parts if (folder / part.name).is_file()}
    if not os.environ.get("IMAGE_DIR") or not found:
        pytest.skip("IMAGE_DIR is not set to a folder with MNIST's gzipped files")
    assert {name: digest_of(folder / name) for name in found} == found
