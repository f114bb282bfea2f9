"""download_glue_data.py against a small server here: complete, checked files, or one error in time."""

import errno
import hashlib
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from data_files import question, squad_value
from download_mirror import ARCHIVE, TINY, TINY_SET, assert_is_tiny, driver, get, left_in, refused, serving, zipped
from programs import script, wait_until

from cos598d.data.fetch.catalogue import CATALOGUE, Dataset, DatasetFile, Download, choose
from cos598d.data.fetch.check import count_rows, look_at
from cos598d.data.fetch.download import main
from cos598d.data.fetch.transfer import fetch
from cos598d.data.fetch.unpack import copy_files
from cos598d.errors import UsageError, UserError


@pytest.fixture
def mirror():
    with serving() as offered:
        offered.files["Tiny-clean.zip"] = ARCHIVE
        yield offered


def fetch_tiny(mirror, folder, timeout=5.0):
    return fetch(mirror.url + "/Tiny-clean.zip", folder, timeout, pause=0, report=lambda _: None)


def squad(count):
    return json.dumps(squad_value(("c", [question(str(number), "q") for number in range(count)]))).encode()


# What arrives


def test_files_are_fetched_once_into_the_task_s_folder(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = zipped({**TINY, ".DS_Store": b"x", "__MACOSX/._train.tsv": b"x"}, "Other/")
    said = get(mirror, tmp_path / "data")
    assert_is_tiny(tmp_path / "data")
    assert "600 + 50 + 70 rows" in said[-1]
    assert "sha256 differs" in said[-1]
    mirror.asked.clear()
    assert get(mirror, tmp_path / "data") == ["Tiny: already there (600 + 50 + 70 rows)."]
    assert mirror.asked == []


def test_files_copied_by_hand_count_without_the_test_set(mirror, tmp_path):
    (tmp_path / "Tiny").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "Tiny" / name).write_bytes(TINY[name])
    (said,) = get(mirror, tmp_path)
    assert "already there" in said
    assert "without test.tsv" in said
    assert mirror.asked == []


def test_a_broken_connection_resumes_where_it_broke(mirror, tmp_path):
    mirror.break_after = [len(ARCHIVE) // 2]
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)
    (_, first), (_, second) = mirror.asked
    assert first is None
    assert len(ARCHIVE) // 2 - 40_000 < int(second.removeprefix("bytes=").removesuffix("-")) < len(ARCHIVE) // 2


def test_the_next_run_resumes_a_part_and_asks_for_one_byte_of_a_complete_one(mirror, tmp_path):
    mirror.break_after = [50_000] + [0] * 3
    with pytest.raises(UserError, match="did not deliver all"):
        fetch_tiny(mirror, tmp_path)
    (part,) = left_in(tmp_path)
    assert part.startswith("Tiny-clean.zip.")
    assert part.endswith(".part")
    mirror.asked.clear()
    assert fetch_tiny(mirror, tmp_path).read_bytes() == ARCHIVE
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)
    assert [asked for _, asked in mirror.asked][1:] == [f"bytes={len(ARCHIVE) - 1}-"]


@pytest.mark.parametrize(
    "how", [{"ranges": False, "break_after": [60_000]}, {"lengths": False}, {"statuses": [503]}], ids=str
)
def test_a_server_may_be_busy_or_lack_ranges_or_lengths(mirror, tmp_path, how):
    for name, value in how.items():
        setattr(mirror, name, value)
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)


@pytest.mark.parametrize("same_length", [True, False])
def test_the_rest_of_a_changed_file_is_not_appended_to_the_old_start(mirror, tmp_path, same_length):
    mirror.versions["Tiny-clean.zip"] = '"one"'
    mirror.break_after = [50_000, 0, 0, 0]
    with pytest.raises(UserError):
        fetch_tiny(mirror, tmp_path)
    mirror.files["Tiny-clean.zip"] = changed = b"y" * (len(ARCHIVE) if same_length else len(ARCHIVE) + 5)
    mirror.versions["Tiny-clean.zip"] = '"two"' if same_length else '"one"'
    assert fetch_tiny(mirror, tmp_path).read_bytes() == changed
    assert len(left_in(tmp_path)) == 1


def test_several_processes_on_one_folder_fetch_once(mirror, tmp_path, start):
    data = tmp_path / "data"
    child = start("child", ["-c", driver("pass"), data, mirror.url])
    with ThreadPoolExecutor(3) as threads:
        said = [line for lines in threads.map(get, [mirror] * 3, [data] * 3) for line in lines]
    assert child.wait() == 0, child.text
    assert_is_tiny(data)
    assert len(mirror.asked) == 1
    assert sum("already there" in line for line in said) >= 2


def test_mrpc_is_split_by_the_list_of_dev_pairs(mirror, tmp_path):
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    pairs = [f'{n % 2}\t{n}\t{n + 100}\tHe said "no {n}.\tHe did not agree {n}.' for n in range(10)]
    mirror.files["msr_paraphrase_train.txt"] = ("\ufeff" + "\r\n".join([header, *pairs]) + "\r\n").encode()
    mirror.files["msr_paraphrase_test.txt"] = "\n".join([header, *pairs[:3]]).encode()
    mirror.files["mrpc_dev_ids.tsv"] = b"4\t104\n7\t107"
    parts = (DatasetFile("train.tsv", (8,)), DatasetFile("dev.tsv", (2,)), DatasetFile("test.tsv", (3,)))
    get(mirror, tmp_path, replace(CATALOGUE["MRPC"], parts=parts))
    assert (tmp_path / "MRPC/dev.tsv").read_text() == "\n".join([header, pairs[4], pairs[7]]) + "\n"
    assert (tmp_path / "MRPC/train.tsv").read_text().count("\n") == 9
    assert (tmp_path / "MRPC/test.tsv").read_text().splitlines()[1] == '0\t0\t100\tHe said "no 0.\tHe did not agree 0.'


def test_only_the_missing_squad_file_is_fetched(mirror, tmp_path):
    parts = (DatasetFile("train-v1.1.json", (30,)), DatasetFile("dev-v1.1.json", (20,)))
    (tmp_path / "SQuAD").mkdir()
    by_hand = squad(20) + b"\n"
    (tmp_path / "SQuAD/dev-v1.1.json").write_bytes(by_hand)
    mirror.files["train-v1.1.json"] = squad(30)
    get(mirror, tmp_path, replace(CATALOGUE["SQuAD1.1"], parts=parts))
    assert [name for name, _ in mirror.asked] == ["train-v1.1.json"]
    assert (tmp_path / "SQuAD/dev-v1.1.json").read_bytes() == by_hand
    assert sorted(path.name for path in (tmp_path / "SQuAD").iterdir()) == ["dev-v1.1.json", "train-v1.1.json"]


def test_a_file_that_does_not_check_is_replaced_and_kept(mirror, tmp_path):
    (tmp_path / "Tiny").mkdir()
    (tmp_path / "Tiny/train.tsv").write_bytes(TINY["train.tsv"][:5000])
    (tmp_path / "Tiny/dev.tsv").write_bytes(TINY["dev.tsv"])
    (tmp_path / "Tiny/mine.txt").write_text("mine")
    said = get(mirror, tmp_path)
    assert "train.tsv has 12 rows" in said[0]
    assert (tmp_path / "Tiny/train.tsv").read_bytes() == TINY["train.tsv"]
    assert (tmp_path / "Tiny/train.tsv.replaced-1").read_bytes() == TINY["train.tsv"][:5000]
    assert (tmp_path / "Tiny/mine.txt").read_text() == "mine"


# What is refused


def test_a_glue_file_with_other_columns_does_not_check(tmp_path):
    parts = (DatasetFile("train.tsv", (2,)), DatasetFile("dev.tsv", (2,)))
    for name, columns in (("train", "question\tsentence"), ("dev", "sentence\tquestion")):
        rows = f"index\t{columns}\tlabel\n0\ta\tb\tentailment\n1\ta\tb\tentailment\n"
        (tmp_path / f"{name}.tsv").write_text(rows)
    assert look_at(replace(CATALOGUE["QNLI"], parts=parts), tmp_path).problems == {
        "dev.tsv": "in dev.tsv the columns are index, sentence, question, label, not QNLI's "
        "index, question, sentence, label"
    }


def test_a_wrong_hash_is_refused_unless_the_archive_is_the_published_one(mirror, tmp_path):
    digest = hashlib.sha256(TINY["train.tsv"]).hexdigest()
    dataset = replace(TINY_SET, parts=tuple(replace(part, sha256=digest) for part in TINY_SET.parts[:2]))
    refused(mirror, tmp_path, "dev.tsv has the sha256", dataset)
    source = Download(TINY_SET.sources[0].url, hashlib.sha256(ARCHIVE).hexdigest())
    said = get(mirror, tmp_path, replace(dataset, sources=(source,)))
    assert "dev.tsv has the sha256" in said[-1]
    assert "though the archive is the published one" in said[-1]
    assert_is_tiny(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (squad(19), "dev.json has 19 rows"),
        (squad(20)[:-9], "dev.json cannot be read"),
        (b"[1]", "dev.json cannot be read"),
        (b'{"data": [{}]}', "dev.json cannot be read"),
        (b"", "dev.json cannot be read"),
        (None, "answered 404 Not Found for "),
    ],
)
def test_an_incomplete_or_missing_squad_file_is_refused(mirror, tmp_path, content, words):
    if content is not None:
        mirror.files["dev.json"] = content
    source = Download("http://nowhere.invalid/dev.json")
    dataset = Dataset("S", "SQuAD", (source,), (DatasetFile("dev.json", (20,)),), copy_files, "SQUAD_DIR")
    refused(mirror, tmp_path, words, dataset)


def test_an_error_names_a_folder_that_cannot_be_made(mirror, tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be put into .*--data_dir"):
        get(mirror, tmp_path / "data")


def test_a_full_disk_keeps_the_part_for_the_next_try(mirror, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfileobj", lambda *words: (_ for _ in ()).throw(full))
        with pytest.raises(UserError, match="No space left on device"):
            get(mirror, tmp_path)
    assert len(left_in(tmp_path)) == 1
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)
    assert mirror.asked[-1][1].startswith("bytes=")


@pytest.mark.parametrize("stuck", ["refused", "silent", "name"])
def test_without_a_network_an_error_in_time_names_the_alternatives(monkeypatch, tmp_path, capsys, stuck):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if stuck == "name":  # a look-up that hangs, as where the name server is out of reach
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: time.sleep(3))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if stuck == "silent":
            listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        words = ["--data_dir", str(tmp_path), "--base_url", url, "--timeout", "0.5"]
        codes = [main([*words, "--tasks", task]) for task in ("rte", "CIFAR10")]
    assert codes == [1, 1]
    assert time.monotonic() - began < 60
    of_texts, of_images = capsys.readouterr().err.splitlines()
    for way in (url.removeprefix("http://"), "--base_url", f"{tmp_path}/RTE by hand", "bundled RTE sample"):
        assert way in of_texts
    assert "--task_name digits" in of_images
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("trickles", [False, True])
def test_a_stalled_download_ends_and_keeps_its_part(mirror, tmp_path, trickles):
    mirror.stall_after, mirror.trickles = 40_000, trickles
    with pytest.raises(UserError, match="did not deliver"):
        fetch_tiny(mirror, tmp_path, timeout=0.2)
    (part,) = tmp_path.iterdir()
    assert ARCHIVE.startswith(part.read_bytes())
    assert part.stat().st_size > 30_000


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_process_killed_while_it_unpacks_leaves_no_incomplete_file(mirror, tmp_path, start, how):
    data = tmp_path / "data"
    child = start("child", ["-c", driver("print('unpacked', flush=True); time.sleep(60)"), data, mirror.url])
    child.wait_for("unpacked")
    child.process.send_signal(how)
    assert child.wait() != 0
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
def test_a_signal_keeps_only_the_part_and_ctrl_c_prints_one_line(mirror, tmp_path, start, how, code):
    data = tmp_path / "data"
    mirror.files["RTE.zip"] = ARCHIVE
    mirror.stall_after = 80_000
    words = ["--data_dir", data, "--tasks", "RTE", "--base_url", mirror.url]
    child = start("child", [script("download_glue_data.py"), *words], is_fresh=True)
    wait_until(lambda: any(path.stat().st_size for path in data.glob("*.part")))
    child.process.send_signal(how)
    assert child.wait() == code
    _, *after = child.text.splitlines()  # the first is what it fetches
    assert len(after) == (1 if how == signal.SIGINT else 0)
    (part,) = left_in(data)
    assert part.endswith(".part")


# The command


def test_task_names_may_be_in_any_case_and_all_means_texts():
    assert [dataset.name for dataset in choose("rte, SQuAD1.1,sst,RTE")] == ["RTE", "SQuAD1.1", "SST-2"]
    assert [dataset.name for dataset in choose("mnist,CIFAR-10")] == ["MNIST", "CIFAR10"]
    assert len(choose("all")) == 11
    assert {*CATALOGUE} - {dataset.name for dataset in choose("all")} == {"diagnostic", "MNIST", "CIFAR10"}
    for words in ("RTE,Klingon", "", ","):
        with pytest.raises(UsageError, match="CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE, WNLI, diagnostic"):
            choose(words)


@pytest.mark.parametrize("words", [["--tasks", "Klingon"], ["--base_url", "ftp://x"], ["--base_url", "http://[x"]])
def test_wrong_flags_are_one_error_and_exit_2(words, tmp_path, capsys):
    assert main(["--data_dir", str(tmp_path / "data"), *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_the_script_runs_from_anywhere_without_the_package_installed(start, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = start("download", [script("download_glue_data.py"), "--tasks", "Klingon"], is_fresh=True)
    assert program.wait() == 2
    assert program.text.startswith('error: --tasks has the unknown name "Klingon"')


# The real data


def test_the_real_rte_checks_and_with_one_changed_letter_does_not(mirror, tmp_path, capsys):
    folder = Path(os.environ.get("GLUE_DIR", "")) / "RTE"
    if not os.environ.get("GLUE_DIR") or not all((folder / name).is_file() for name in TINY):
        pytest.skip("GLUE_DIR is not set to a folder with RTE/train.tsv, dev.tsv and test.tsv")
    files = {name: (folder / name).read_bytes() for name in TINY}
    words = ["--data_dir", str(tmp_path), "--tasks", "RTE", "--base_url", mirror.url]
    mirror.files["RTE.zip"] = zipped({**files, "dev.tsv": files["dev.tsv"].replace(b"cancer", b"dancer", 1)}, "RTE/")
    assert main(words) == 1
    assert "dev.tsv has the sha256" in capsys.readouterr().err
    assert left_in(tmp_path) == []
    mirror.files["RTE.zip"] = zipped(files, "RTE/")
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "2490 + 277 + 3000 rows; 3 files' sha256 as recorded" in printed
    assert f"export GLUE_DIR={tmp_path}" in printed
    assert {path.name: path.read_bytes() for path in (tmp_path / "RTE").iterdir()} == files


@pytest.mark.parametrize("name", ["SQuAD1.1", "SQuAD2.0"])
def test_the_real_squad_dev_set_has_the_recorded_number_of_questions(name):
    dev = CATALOGUE[name].parts[1]
    path = Path(os.environ.get("SQUAD_DIR", "")) / dev.name
    if not os.environ.get("SQUAD_DIR") or not path.is_file():
        pytest.skip(f"SQUAD_DIR is not set to a folder with {dev.name}")
    assert (count_rows(path),) == dev.rows


@pytest.mark.parametrize(
    ("text", "header", "rows"),
    [
        ("a\tb\n1\t2\n3\t4\n", True, 2),
        ("a\tb\n1\t2\n3\t4", True, 2),  # no newline at the end
        ("\ufeffa\tb\r\n1\t2\r\n3\t4\r\n", True, 2),
        ("1\t2\n3\t4\n", False, 2),
        ('a\tb\n1\t"2\n3\t4\n', True, 2),  # a bare quote opens nothing
        ("a\tb\n1\t2\n3", True, 1),  # torn off
        ("a\tb\n1\n2\t3\n", True, 1),  # a stray line break
        ("a\tb\n1\t2\n\n", True, 1),
        ("", True, 0),
        ("", False, 0),
    ],
)
def test_rows_are_lines_with_all_their_columns(tmp_path, text, header, rows):
    (tmp_path / "x.tsv").write_bytes(text.encode())
    assert count_rows(tmp_path / "x.tsv", header) == rows
