"""download_glue_data.py against a small server on this machine: what it fetches arrives whole, resumed and checked."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from download_mirror import ARCHIVE, TINY, TINY_SET, assert_is_tiny, driver, get, left_in, serving, squad, zipped
from programs import PATIENCE

from cos598d.data.fetch.catalogue import CATALOGUE, Dataset, DatasetFile, Download, choose
from cos598d.data.fetch.check import count_rows, look_at
from cos598d.data.fetch.download import main, obtain
from cos598d.data.fetch.transfer import fetch
from cos598d.data.fetch.unpack import copy_files, split_mrpc
from cos598d.errors import UsageError, UserError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def mirror(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as offered:
        yield offered


def test_the_files_land_in_the_tasks_folder_whatever_the_archive_calls_its_own(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = zipped({**TINY, ".DS_Store": b"x", "__MACOSX/._train.tsv": b"x"}, "Other/")
    said = get(mirror, tmp_path / "data")
    assert_is_tiny(tmp_path / "data")
    assert "600 + 50 + 70 rows" in said[-1]
    assert "only the rows speak for it" in said[-1]


def test_what_is_there_and_checks_is_not_fetched_again(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    get(mirror, tmp_path)
    mirror.asked.clear()
    assert get(mirror, tmp_path) == ["Tiny: already there (600 + 50 + 70 rows)."]
    assert mirror.asked == []


def test_files_copied_by_hand_count_as_there_even_without_the_test_set(mirror, tmp_path):
    (tmp_path / "Tiny").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "Tiny" / name).write_bytes(TINY[name])
    (said,) = get(mirror, tmp_path)
    assert "already there" in said
    assert "without test.tsv" in said
    assert mirror.asked == []


def test_a_broken_connection_is_taken_up_where_it_broke(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    mirror.break_after = [len(ARCHIVE) // 2]
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)
    (_, first), (_, second) = mirror.asked
    assert first is None
    resumed_at = int(second.removeprefix("bytes=").removesuffix("-"))
    assert len(ARCHIVE) // 2 - 40_000 < resumed_at < len(ARCHIVE) // 2


def test_the_next_run_resumes_what_the_last_one_left_in_the_part_file(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    mirror.break_after = [50_000] + [0] * 3
    with pytest.raises(UserError, match="did not deliver the whole"):
        fetch(mirror.url + "/Tiny-clean.zip", tmp_path, 5, pause=0, report=lambda _: None)
    (part,) = left_in(tmp_path)
    assert part.startswith("Tiny-clean.zip.")
    assert part.endswith(".part")
    mirror.asked.clear()
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)
    assert len(mirror.asked) == 1
    assert mirror.asked[0][1] is not None


def test_a_complete_part_file_costs_one_request_for_one_byte(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    once = fetch(mirror.url + "/Tiny-clean.zip", tmp_path, 5)
    again = fetch(mirror.url + "/Tiny-clean.zip", tmp_path, 5)
    assert once == again
    assert again.read_bytes() == ARCHIVE
    assert mirror.asked[1:] == [("Tiny-clean.zip", f"bytes={len(ARCHIVE) - 1}-")]


def test_a_server_without_ranges_means_starting_anew(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    mirror.ranges = False
    mirror.break_after = [60_000]
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)
    assert len(mirror.asked) == 2


def test_a_server_that_tells_no_length_will_do(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    mirror.lengths = False
    get(mirror, tmp_path)
    assert_is_tiny(tmp_path)


@pytest.mark.parametrize("same_length", [True, False])
def test_the_rest_of_a_changed_file_is_not_appended_to_the_old_start(mirror, tmp_path, same_length):
    changed = b"y" * (len(ARCHIVE) if same_length else len(ARCHIVE) + 5)
    mirror.files["f.bin"], mirror.versions["f.bin"] = b"x" * len(ARCHIVE), '"one"'
    mirror.break_after = [50_000, 0, 0, 0]
    with pytest.raises(UserError):
        fetch(mirror.url + "/f.bin", tmp_path, 5, pause=0, report=lambda _: None)
    mirror.files["f.bin"] = changed
    mirror.versions["f.bin"] = '"two"' if same_length else '"one"'
    assert fetch(mirror.url + "/f.bin", tmp_path, 5).read_bytes() == changed
    assert len(left_in(tmp_path)) == 1


def test_a_busy_server_is_asked_again(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    mirror.statuses = [503]
    assert fetch(mirror.url + "/Tiny-clean.zip", tmp_path, 5, pause=0).read_bytes() == ARCHIVE


def test_several_processes_on_one_folder_fetch_once(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    said = []
    threads = [
        threading.Thread(target=obtain, args=(TINY_SET, tmp_path, mirror.url, 5.0, said.append)) for _ in range(3)
    ]
    child = subprocess.Popen([sys.executable, "-c", driver("pass"), str(tmp_path), mirror.url], cwd=ROOT)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert child.wait(PATIENCE) == 0
    assert_is_tiny(tmp_path)
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
    assert (tmp_path / "MRPC/test.tsv").read_text().splitlines()[1:3] == [
        '0\t0\t100\tHe said "no 0.\tHe did not agree 0.',
        '1\t1\t101\tHe said "no 1.\tHe did not agree 1.',
    ]
    assert CATALOGUE["MRPC"].unpack is split_mrpc


def test_a_glue_file_with_other_columns_does_not_check(tmp_path):
    header = "index\tquestion\tsentence\tlabel"
    parts = (DatasetFile("train.tsv", (2,)), DatasetFile("dev.tsv", (2,)))
    qnli = Dataset("QNLI", "QNLI", (Download("http://nowhere.invalid/QNLI.zip"),), parts)
    for name, columns in (("train.tsv", header), ("dev.tsv", "index\tsentence\tquestion\tlabel")):
        (tmp_path / name).write_text(f"{columns}\n0\ta\tb\tentailment\n1\ta\tb\tentailment\n")
    assert look_at(qnli, tmp_path).problems == {
        "dev.tsv": "in dev.tsv the columns are index, sentence, question, label where QNLI has "
        "index, question, sentence, label"
    }


def test_of_squad_only_the_missing_file_is_fetched_and_the_other_left_alone(mirror, tmp_path):
    parts = (DatasetFile("train-v1.1.json", (30,)), DatasetFile("dev-v1.1.json", (20,)))
    dataset = replace(CATALOGUE["SQuAD1.1"], parts=parts)
    assert dataset.unpack is copy_files
    (tmp_path / "SQuAD").mkdir()
    by_hand = squad(20) + b"\n"
    (tmp_path / "SQuAD/dev-v1.1.json").write_bytes(by_hand)
    mirror.files["train-v1.1.json"] = squad(30)
    get(mirror, tmp_path, dataset)
    assert [name for name, _ in mirror.asked] == ["train-v1.1.json"]
    assert (tmp_path / "SQuAD/dev-v1.1.json").read_bytes() == by_hand
    assert sorted(path.name for path in (tmp_path / "SQuAD").iterdir()) == ["dev-v1.1.json", "train-v1.1.json"]


def test_a_file_that_does_not_check_is_replaced_but_kept_aside(mirror, tmp_path):
    mirror.files["Tiny-clean.zip"] = ARCHIVE
    (tmp_path / "Tiny").mkdir()
    (tmp_path / "Tiny/train.tsv").write_bytes(TINY["train.tsv"][:5000])
    (tmp_path / "Tiny/dev.tsv").write_bytes(TINY["dev.tsv"])
    (tmp_path / "Tiny/mine.txt").write_text("mine")
    said = get(mirror, tmp_path)
    assert "train.tsv has 12 rows where 599 or 600 were expected" in said[0]
    assert (tmp_path / "Tiny/train.tsv").read_bytes() == TINY["train.tsv"]
    assert (tmp_path / "Tiny/train.tsv.replaced-1").read_bytes() == TINY["train.tsv"][:5000]
    assert (tmp_path / "Tiny/mine.txt").read_text() == "mine"


# The command


def test_the_list_of_tasks_takes_names_in_any_case_and_all():
    assert [dataset.name for dataset in choose("rte, SQuAD1.1,sst,RTE")] == ["RTE", "SQuAD1.1", "SST-2"]
    assert [dataset.name for dataset in choose("all")] == [
        name for name in CATALOGUE if name not in ("diagnostic", "MNIST", "CIFAR10")
    ]
    assert len(choose("all")) == 11
    for words in ("RTE,Klingon", "", ","):
        with pytest.raises(UsageError, match="CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE, WNLI, diagnostic"):
            choose(words)


@pytest.mark.parametrize("words", [["--tasks", "Klingon"], ["--base_url", "ftp://x"], ["--base_url", "http://[x"]])
def test_wrong_words_are_one_sentence_and_exit_2(words, tmp_path, capsys):
    assert main(["--data_dir", str(tmp_path / "data"), *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_the_script_runs_from_anywhere_without_the_package_installed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "download_glue_data.py"), "--tasks", "Klingon"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith('error: --tasks names "Klingon"')


# The real data


def real_rte():
    folder = Path(os.environ.get("GLUE_DIR", "")) / "RTE"
    if not os.environ.get("GLUE_DIR") or not all((folder / name).is_file() for name in TINY):
        pytest.skip("GLUE_DIR is not set to a folder with RTE/train.tsv, dev.tsv and test.tsv")
    return {name: (folder / name).read_bytes() for name in TINY}


def test_the_real_rte_passes_its_row_counts_and_hashes(mirror, tmp_path, capsys):
    files = real_rte()
    mirror.files["RTE.zip"] = zipped(files, "RTE/")
    assert main(["--data_dir", str(tmp_path), "--tasks", "RTE", "--base_url", mirror.url]) == 0
    printed = capsys.readouterr().out
    assert "2490 + 277 + 3000 rows; 3 files' sha256 as recorded" in printed
    assert f"export GLUE_DIR={tmp_path}" in printed
    assert {path.name: path.read_bytes() for path in (tmp_path / "RTE").iterdir()} == files
    assert main(["--data_dir", str(tmp_path), "--tasks", "RTE", "--base_url", mirror.url]) == 0
    assert "RTE: already there" in capsys.readouterr().out


def test_one_changed_letter_in_the_real_rte_is_refused(mirror, tmp_path, capsys):
    files = real_rte()
    files["dev.tsv"] = files["dev.tsv"].replace(b"lung cancer", b"lung dancer")
    mirror.files["RTE.zip"] = zipped(files, "RTE/")
    assert main(["--data_dir", str(tmp_path), "--tasks", "RTE", "--base_url", mirror.url]) == 1
    assert "dev.tsv has the sha256" in capsys.readouterr().err
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", ["SQuAD1.1", "SQuAD2.0"])
def test_the_real_squad_dev_set_has_the_recorded_number_of_questions(name):
    dev = CATALOGUE[name].parts[1]
    path = Path(os.environ.get("SQUAD_DIR", "")) / dev.name
    if not os.environ.get("SQUAD_DIR") or not path.is_file():
        pytest.skip(f"SQUAD_DIR is not set to a folder with {dev.name}")
    assert (count_rows(path),) == dev.rows


# Counting


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
