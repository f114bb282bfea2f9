"""Damaged archives, paths that lead outside and endless members are refused; MNIST and CIFAR-10 arrive."""

import gzip
import hashlib
import io
import os
import stat
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from download_mirror import ARCHIVE, TINY, assert_is_tiny, get, left_in, refused, serving, table, zipped
from test_image_files import batch_of, idx

from cos598d.data import get_task
from cos598d.data.fetch.catalogue import CATALOGUE, DatasetFile
from cos598d.data.fetch.download import main
from cos598d.data.fetch.unpack import unpack_tar
from cos598d.data.images.encoder import ImageEncoder
from cos598d.data.task import digest_file
from cos598d.errors import UserError

BATCHES = {part.name: batch_of(20, seed) for seed, part in enumerate(CATALOGUE["CIFAR10"].parts)}
CIFAR = replace(
    CATALOGUE["CIFAR10"],
    parts=tuple(
        DatasetFile(name, (20,), size=len(content), md5=hashlib.md5(content).hexdigest())
        for name, content in BATCHES.items()
    ),
)


@pytest.fixture
def mirror():
    with serving() as offered:
        yield offered


def tar_of(files, *infos: tarfile.TarInfo) -> bytes:
    """A gzipped tar archive as the published one is, with a folder around all; `infos` are further members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(member("cifar-10-batches-py", tarfile.DIRTYPE))
        for name, content in files.items():
            archive.addfile(member(f"cifar-10-batches-py/{name}", size=len(content)), io.BytesIO(content))
        for info in infos:
            archive.addfile(info)
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


# Zip archives


def with_link() -> bytes:
    buffer = io.BytesIO(ARCHIVE)
    with zipfile.ZipFile(buffer, "a") as archive:
        link = zipfile.ZipInfo("TinyFolder/link.tsv")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    return buffer.getvalue()


def changed(content: bytes, place: int, *values: int) -> bytes:
    """The content with other bytes at a place, or without values with the bits of its byte inverted."""
    return content[:place] + bytes(values or [content[place] ^ 255]) + content[place + (len(values) or 1) :]


def misplaced() -> bytes:
    """Tiny, but its list of members puts the first one before the start of the archive."""
    place = ARCHIVE.rindex(b"PK\5\6") + 16
    return changed(ARCHIVE, place, *(int.from_bytes(ARCHIVE[place : place + 4], "little") + 100).to_bytes(4, "little"))


NOT_WHOLE = "is not a complete zip archive ("
NO_NAME = "a name that the disk does not take ("
OUTSIDE = ["../out.tsv", "/tmp/out.tsv", "Tiny/../../out.tsv", "..\\out.tsv", "C:\\out.tsv", "C:out.tsv", "\\\\h\\s\\o"]
ENCRYPTED = zipped({"train.tsv": b"x"})
ZIPS = {
    **{f"outside: {name}": (zipped({**TINY, name: b"x"}, ""), "which leads outside its folder") for name in OUTSIDE},
    "a link": (with_link(), "a link or special file"),
    "a bomb": (zipped({**TINY, "zeros": bytes(32 * 1024**2)}), "would unpack to"),
    "encrypted": (changed(ENCRYPTED, ENCRYPTED.index(b"PK\1\2") + 8, 1), "which is encrypted"),
    "too few rows": (zipped({**TINY, "dev.tsv": table(49)}), "dev.tsv has 49 rows"),
    "without dev": (zipped({"train.tsv": TINY["train.tsv"]}), "dev.tsv is missing"),
    "without anything": (zipped({}), "train.tsv is missing and dev.tsv is missing"),
    "cut": (ARCHIVE[: len(ARCHIVE) // 2], NOT_WHOLE),
    "flipped": (changed(ARCHIVE, len(ARCHIVE) // 2), NOT_WHOLE),
    "web page": (b"<!DOCTYPE html><title>Log in</title>", "it is a web page, perhaps the login page"),
    "empty": (b"", NOT_WHOLE),
    "a member before the start": (misplaced(), NOT_WHOLE),
    "a name in no encoding": (zipped({**TINY, "ééé.tsv": b"x"}).replace("ééé".encode(), b"\xff" * 6), NOT_WHOLE),
    "a broken bz2 stream": (changed(zipped(TINY, method=zipfile.ZIP_BZIP2), 2000, *range(9)), NOT_WHOLE),
    "a broken lzma stream": (changed(zipped(TINY, method=zipfile.ZIP_LZMA), 2000, *range(9)), NOT_WHOLE),
    "a file where a folder is needed": (zipped({**TINY, "a": b"x", "a/b": b"x"}), NO_NAME),
    "a folder where a file is needed": (zipped({**TINY, "a/b": b"x", "a": b"x"}), NO_NAME),
    "a name too long": (zipped({**TINY, "x" * 300: b"x"}), NO_NAME),
    "folders too deep": (zipped({**TINY, "x/" * 3000 + "y": b"x"}), NO_NAME),
    "a name that a terminal obeys": (zipped({**TINY, "../\x1b[2J": b"x"}), r"../\x1b[2J"),
}


@pytest.mark.parametrize("kind", ZIPS)
def test_a_harmful_or_damaged_zip_archive_is_refused_and_the_next_try_succeeds(mirror, tmp_path, kind):
    mirror.files["Tiny-clean.zip"], words = ZIPS[kind]
    refused(mirror, tmp_path / "data", words)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    get(mirror, tmp_path / "data")
    assert_is_tiny(tmp_path / "data")


def test_an_archive_with_too_many_members_is_refused(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr("cos598d.data.fetch.unpack.MOST_MEMBERS", 5)
    mirror.files["Tiny-clean.zip"] = zipped({**TINY, "a": b"", "b": b"", "c": b""})
    refused(mirror, tmp_path, "holds more than the 5 members")


# Tar archives

CIFAR_TAR = tar_of(BATCHES)
NOT_WHOLE_TAR = "is not a complete gzipped tar archive ("
LINK = "a link or special file"
TARS = {
    "../out": (tar_of(BATCHES, member("../out")), "which leads outside its folder"),
    "/tmp/out": (tar_of(BATCHES, member("/tmp/out")), "which leads outside its folder"),
    "C:\\out": (tar_of(BATCHES, member("C:\\out")), "which leads outside its folder"),
    "a link": (tar_of(BATCHES, member("x/link", tarfile.SYMTYPE, "/etc/passwd")), LINK),
    "a hard link": (tar_of(BATCHES, member("x/hard", tarfile.LNKTYPE, "cifar-10-batches-py/test_batch")), LINK),
    "a device": (tar_of(BATCHES, member("x/device", tarfile.CHRTYPE)), LINK),
    "a pipe": (tar_of(BATCHES, member("x/pipe", tarfile.FIFOTYPE)), LINK),
    "a sparse file": (tar_of(BATCHES, member("x/sparse", tarfile.GNUTYPE_SPARSE)), LINK),
    "twice": (tar_of(BATCHES, member("cifar-10-batches-py/test_batch")), f"{NO_NAME}File exists"),
    "below a file": (tar_of(BATCHES, member("cifar-10-batches-py/test_batch/x")), NO_NAME),
    "a name too long": (tar_of(BATCHES, member("x" * 300)), NO_NAME),
    "huge": (tar_of(BATCHES, member("x/huge", size=1 << 40)), "would unpack to"),
    "cut": (CIFAR_TAR[: len(CIFAR_TAR) // 2], NOT_WHOLE_TAR),
    "flipped": (changed(CIFAR_TAR, len(CIFAR_TAR) // 2), NOT_WHOLE_TAR),
    "another checksum": (changed(CIFAR_TAR, len(CIFAR_TAR) - 8), NOT_WHOLE_TAR),
    "web page": (b"<!DOCTYPE html><title>Log in</title>", NOT_WHOLE_TAR),
    "empty": (b"", NOT_WHOLE_TAR),
    "gzip of no tar": (gzip.compress(b"not a tar archive" * 100), NOT_WHOLE_TAR),
    "longer": (tar_of(BATCHES | {"data_batch_2": BATCHES["data_batch_2"] + b"x"}), "data_batch_2 has"),
    "another batch": (tar_of(BATCHES | {"data_batch_2": batch_of(20, 9)}), "data_batch_2 has the md5"),
    "a shorter batch": (tar_of(BATCHES | {"data_batch_2": batch_of(19, 1)}), "data_batch_2 has 19 rows"),
    "a page for a batch": (tar_of(BATCHES | {"data_batch_2": b"<html>"}), "data_batch_2 cannot be read ("),
}


@pytest.mark.parametrize("kind", TARS)
def test_a_harmful_or_damaged_tar_archive_is_refused(mirror, tmp_path, kind):
    mirror.files["cifar-10-python.tar.gz"], words = TARS[kind]
    refused(mirror, tmp_path / "data", words, CIFAR)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_endless_tar_archive_is_read_only_up_to_the_limit(tmp_path):
    # After the end of the tar archive: no member announces it.
    (tmp_path / "bomb").write_bytes(tar_of({}) + gzip.compress(bytes(32 * 1024**2)))
    (tmp_path / "into").mkdir()
    with pytest.raises(UserError, match="bomb unpacks to more than is allowed"):
        unpack_tar({"bomb": tmp_path / "bomb"}, tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


# Images


def test_mnist_is_fetched_where_its_task_looks_and_only_missing_files(mirror, monkeypatch, tmp_path, capsys):
    parts = []
    for part in CATALOGUE["MNIST"].parts:
        values = (
            np.random.default_rng(1).integers(0, 256, (40, 28, 28)) if "images" in part.name else np.arange(40) % 10
        )
        mirror.files[part.name] = gzip.compress(idx(values))
        parts.append(DatasetFile(part.name, (40,), sha256=hashlib.sha256(mirror.files[part.name]).hexdigest()))
    dataset = replace(CATALOGUE["MNIST"], parts=tuple(parts))
    whole = mirror.files["train-labels-idx1-ubyte.gz"]
    for content, words in (
        (gzip.compress(idx(np.ones(40))), "train-labels-idx1-ubyte.gz has the sha256"),
        (b"<html>Log in</html>", "train-labels-idx1-ubyte.gz cannot be read (it does not begin as an IDX"),
    ):
        mirror.files["train-labels-idx1-ubyte.gz"] = content
        refused(mirror, tmp_path, words, dataset)
    mirror.files["train-labels-idx1-ubyte.gz"] = whole
    monkeypatch.setattr("cos598d.data.fetch.download.choose", lambda words: [dataset])
    assert main(["--data_dir", str(tmp_path), "--tasks", "MNIST", "--base_url", mirror.url]) == 0
    printed = capsys.readouterr().out
    assert "MNIST: 40 + 40 + 40 + 40 rows; 4 files' sha256 as recorded, in " in printed
    assert f"export IMAGE_DIR={tmp_path}" in printed
    task = get_task("mnist")
    location, words = task.locate(None, {"IMAGE_DIR": str(tmp_path)})
    assert words == "IMAGE_DIR/MNIST"
    assert [len(task.load(part, location, ImageEncoder(28, 1))) for part in ("train", "dev")] == [40, 40]
    mirror.asked.clear()
    (tmp_path / "MNIST/t10k-labels-idx1-ubyte.gz").unlink()
    get(mirror, tmp_path, dataset)
    assert [name for name, _ in mirror.asked] == ["t10k-labels-idx1-ubyte.gz"]


def test_cifar_is_fetched_where_its_task_looks_and_replaces_a_damaged_copy(mirror, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(BATCHES["test_batch"][:-9])
    mirror.files["cifar-10-python.tar.gz"] = tar_of({**BATCHES, "batches.meta": b"meta", "readme.html": b"<p>"})
    mirror.break_after = [30_000]
    said = get(mirror, tmp_path, CIFAR)
    assert "test_batch cannot be read (" in said[0]
    assert str(tmp_path) not in said[0].split(" in ")[0]
    assert (folder / "test_batch.replaced-1").read_bytes() == BATCHES["test_batch"][:-9]
    assert "20 + 20 + 20 + 20 + 20 + 20 rows; 6 files' size and md5 as recorded" in said[-2]
    assert "sha256 differs" not in said[-2]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in BATCHES} == BATCHES
    assert (folder / "readme.html").is_file()
    assert left_in(tmp_path) == ["cifar-10-batches-py"]
    task = get_task("cifar10")
    location, words = task.locate(None, {"IMAGE_DIR": str(tmp_path)})
    assert words == "IMAGE_DIR/cifar-10-batches-py"
    assert [len(task.load(part, location, ImageEncoder(32, 3))) for part in ("train", "dev")] == [100, 20]


def test_the_real_mnist_has_the_recorded_digests():
    folder = Path(os.environ.get("IMAGE_DIR", ""))
    found = {part.name: part.sha256 for part in CATALOGUE["MNIST"].parts if (folder / part.name).is_file()}
    if not os.environ.get("IMAGE_DIR") or not found:
        pytest.skip("IMAGE_DIR is not set to a folder with MNIST's gzipped files")
    assert {name: digest_file(folder / name)[0] for name in found} == found
