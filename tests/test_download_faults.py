"""What goes wrong with a download is one sentence, in time, and leaves nothing half-written."""

import errno
import hashlib
import io
import signal
import socket
import stat
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from download_mirror import ARCHIVE, TINY, TINY_SET, assert_is_tiny, driver, get, left_in, serving, squad, table, zipped
from programs import PATIENCE, wait_until

from cos598d.data.fetch.catalogue import Dataset, DatasetFile, Download
from cos598d.data.fetch.download import main
from cos598d.data.fetch.transfer import fetch
from cos598d.data.fetch.unpack import copy_files
from cos598d.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as offered:
        yield offered


def refused(mirror, folder, match, dataset=TINY_SET, kept=0):
    """Obtaining it must fail with one sentence, and leave no target, no unpacked file and no useless part."""
    with pytest.raises(UserError, match=match) as raised:
        get(mirror, folder, dataset)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")
    assert len(left_in(folder)) == kept
    assert raised.value.exit_code == 1


@pytest.mark.parametrize(
    "member",
    ["../out.tsv", "/tmp/out.tsv", "Tiny/../../out.tsv", "..\\out.tsv", "C:\\out.tsv", "C:out.tsv", "\\\\h\\s\\o"],
)
def test_a_member_that_leads_outside_is_refused(mirror, tmp_path, member):
    mirror.files["Tiny-clean.zip"] = zipped({**{"Tiny/" + name: text for name, text in TINY.items()}, member: b"x"}, "")
    refused(mirror, tmp_path / "data", "outside its folder")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_link_is_refused(mirror, tmp_path):
    buffer = io.BytesIO(ARCHIVE)
    with zipfile.ZipFile(buffer, "a") as archive:
        link = zipfile.ZipInfo("TinyFolder/link.tsv")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    mirror.files["Tiny-clean.zip"] = buffer.getvalue()
    refused(mirror, tmp_path, "link or special file")


def test_an_archive_that_would_fill_the_disk_is_refused(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = zipped({**TINY, "zeros": bytes(32 * 1024**2)})
    refused(mirror, tmp_path, "would unpack to")


def test_an_encrypted_member_is_refused(mirror, tmp_path):
    content = bytearray(zipped({"train.tsv": b"x"}))
    content[content.index(b"PK\1\2") + 8] |= 1
    mirror.files["Tiny-clean.zip"] = bytes(content)
    refused(mirror, tmp_path, "encrypted")


def test_a_wrong_number_of_rows_is_refused(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = zipped({**TINY, "dev.tsv": table(49)})
    refused(mirror, tmp_path, "dev.tsv has 49 rows where 50 were expected")


def test_a_missing_file_is_refused(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = zipped({"train.tsv": TINY["train.tsv"]})
    refused(mirror, tmp_path, "dev.tsv is missing")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def test_a_wrong_hash_is_refused_unless_the_archive_is_the_published_one(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    right = DatasetFile("train.tsv", (600,), sha256=sha256(TINY["train.tsv"]))
    wrong = DatasetFile("dev.tsv", (50,), sha256=sha256(TINY["train.tsv"]))
    dataset = replace(TINY_SET, parts=(right, wrong))
    refused(mirror, tmp_path, "dev.tsv has the sha256", dataset)
    published = replace(dataset, sources=(Download(TINY_SET.sources[0].url, sha256(ARCHIVE)),))
    said = get(mirror, tmp_path, published)
    assert "dev.tsv has the sha256" in said[-1]
    assert "though the archive is the published one" in said[-1]
    assert_is_tiny(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "web page", "empty"])
def test_a_damaged_archive_is_refused(mirror, tmp_path, damage):
    flipped = bytearray(ARCHIVE)
    flipped[len(ARCHIVE) // 2] ^= 255
    mirror.files["Tiny-clean.zip"] = {
        "cut": ARCHIVE[: len(ARCHIVE) // 2],
        "flipped": bytes(flipped),
        "web page": b"<!DOCTYPE html><title>Log in</title>",
        "empty": b"",
    }[damage]
    refused(mirror, tmp_path, "not a whole zip archive")


def packed(method):
    """Tiny by another method, with a few bytes in the middle of the first member changed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in TINY.items():
            archive.writestr(f"TinyFolder/{name}", content)
    content = bytearray(buffer.getvalue())
    for place in range(2000, 2010):
        content[place] ^= 255
    return bytes(content)


def misplaced():
    """Tiny, but its list of members says that the first one lies before the archive's begin."""
    content = bytearray(ARCHIVE)
    end = content.rindex(b"PK\5\6")
    content[end + 16 : end + 20] = (int.from_bytes(content[end + 16 : end + 20], "little") + 100).to_bytes(4, "little")
    return bytes(content)


HOSTILE = {
    "a member before the begin": (misplaced(), "not a whole zip archive"),
    "a name in no encoding": (
        zipped({**TINY, "é\u00e9é.tsv": b"x"}).replace("ééé".encode(), b"\xff" * 6),
        "not a whole zip archive",
    ),
    "a broken bz2 stream": (packed(zipfile.ZIP_BZIP2), "not a whole zip archive"),
    "a broken lzma stream": (packed(zipfile.ZIP_LZMA), "not a whole zip archive"),
    "a file where a folder is needed": (
        zipped({**TINY, "a": b"x", "a/b": b"x"}),
        r'"TinyFolder/a/b", a name that the disk does not take \((File exists|Not a directory)\)',
    ),
    "a name too long": (zipped({**TINY, "x" * 300: b"x"}), "a name that the disk does not take"),
    "folders too deep": (zipped({**TINY, "x/" * 3000 + "y": b"x"}), "a name that the disk does not take"),
    "a name that a terminal obeys": (zipped({**TINY, "../\x1b[2J": b"x"}), r"\.\./\\x1b\[2J"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_no_disk_can_hold_is_the_archives_fault_and_the_next_try_starts_afresh(mirror, tmp_path, kind):
    mirror.files["Tiny-clean.zip"], words = HOSTILE[kind]
    refused(mirror, tmp_path / "data", words)
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    get(mirror, tmp_path / "data")
    assert_is_tiny(tmp_path / "data")


def test_a_disk_that_refuses_a_member_keeps_the_part_for_the_next_try(mirror, tmp_path, monkeypatch):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfileobj", lambda *words: (_ for _ in ()).throw(full))
        with pytest.raises(UserError, match="No space left on device"):
            get(mirror, tmp_path)
    assert len(left_in(tmp_path)) == 1
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)
    assert mirror.asked[-1][1].startswith("bytes=")


@pytest.mark.parametrize("content", [squad(19), squad(20)[:-9], b"[1]", b'{"data": [{}]}', b"<html>"])
def test_a_squad_file_that_is_not_whole_is_refused(mirror, tmp_path, content):
    source = Download("http://nowhere.invalid/dev.json")
    mirror.files["dev.json"] = content
    dataset = Dataset("S", "SQuAD", (source,), (DatasetFile("dev.json", (20,)),), copy_files, "SQUAD_DIR")
    refused(mirror, tmp_path, "dev.json (has 19 rows|cannot be read)", dataset)


def test_a_file_that_the_server_has_not_is_one_sentence(mirror, tmp_path):
    refused(mirror, tmp_path, "answered 404 .*Tiny-clean.zip; .*--base_url .*by hand")


def test_a_folder_that_cannot_be_made_is_one_sentence(mirror, tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be put into .*--data_dir"):
        get(mirror, tmp_path / "data")


@pytest.mark.parametrize("stuck", ["refused", "silent", "name"])
def test_without_a_network_the_sentence_comes_in_time_and_names_the_ways_out(monkeypatch, tmp_path, capsys, stuck):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if stuck == "name":  # a look-up that hangs, as where the name server is out of reach
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: time.sleep(3))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if stuck == "silent":
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        code = main(["--data_dir", str(tmp_path), "--tasks", "rte", "--base_url", url, "--timeout", "0.5"])
    assert code == 1
    assert time.monotonic() - began < 60
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert url.removeprefix("http://") in printed
    for way in ("--base_url", f"{tmp_path}/RTE by hand", "bundled RTE sample"):
        assert way in printed
    assert left_in(tmp_path) == []


def test_a_stalled_download_does_not_hang_and_keeps_its_part(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    mirror.stall_after = 40_000
    with pytest.raises(UserError, match="did not deliver"):
        fetch(mirror.url + "/Tiny-clean.zip", tmp_path, 0.2, pause=0, report=lambda _: None)
    (part,) = tmp_path.iterdir()
    assert ARCHIVE.startswith(part.read_bytes())
    assert part.stat().st_size > 30_000


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_process_ended_in_mid_extraction_leaves_nothing_half_written(mirror, tmp_path, how):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    data, marker = tmp_path / "data", tmp_path / "unpacked"
    code = driver(f"Path({str(marker)!r}).touch(); time.sleep(60)")
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(data), mirror.url],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(marker.exists)
    child.send_signal(how)
    assert child.wait(PATIENCE) != 0
    assert not (data / "Tiny").exists()
    left = left_in(data)
    assert [name for name in left if not name.startswith(".")] == [name for name in left if name.endswith(".part")]
    if how == signal.SIGINT:
        assert len(left) == 1
    mirror.asked.clear()
    get(mirror, data)
    assert_is_tiny(data)
    assert mirror.asked == [("Tiny-clean.zip", f"bytes={len(ARCHIVE) - 1}-")]  # the finished download was not lost


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_is_one_line_and_keeps_only_the_part(mirror, tmp_path, how, code):
    mirror.files["RTE.zip"] = ARCHIVE
    mirror.stall_after = 80_000
    command = [sys.executable, str(ROOT / "download_glue_data.py"), "--data_dir", str(tmp_path), "--tasks", "RTE"]
    child = subprocess.Popen([*command, "--base_url", mirror.url], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: any(path.suffix == ".part" and path.stat().st_size for path in tmp_path.iterdir()))
    child.send_signal(how)
    _, printed = child.communicate(timeout=PATIENCE)
    assert child.returncode == code
    assert printed.count("\n") == (1 if how == signal.SIGINT else 0)
    (part,) = left_in(tmp_path)
    assert part.endswith(".part")
