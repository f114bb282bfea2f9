"""Downloads from a server on loopback: complete or not at all, and one sentence for everything that goes wrong."""

import hashlib
import os
import shutil
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from data_files import task_at

from cos598d.data import fetch
from cos598d.data.encoders import TextEncoder, word_pieces
from cos598d.data.fetch import DATASETS, Dataset, main

RTE = b"index\tsentence1\tsentence2\tlabel\n0\tone\ttwo\tentailment\n"
MRPC_HEAD = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def archived(kind, files):
    """The bytes of an archive of files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, "files", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return Path(shutil.make_archive(f"{folder}/made", kind, f"{folder}/files")).read_bytes()


FILES = {
    "RTE.zip": archived("zip", {"RTE/train.tsv": RTE, "RTE/dev.tsv": RTE, "__MACOSX/x": b""}),
    "msr_paraphrase_train.txt": (MRPC_HEAD + "1\t7\t8\ta\tb\n0\t9\t10\tc\td\n").encode("utf-8-sig"),
    "msr_paraphrase_test.txt": MRPC_HEAD.encode(),
    "mrpc_dev_ids.tsv": b"9\t10\n",
    **{
        f"{part}-v{version}.json": f"{part} {version}".encode()
        for part in ("train", "dev")
        for version in ("1.1", "2.0")
    },
    "cifar-10-binary.tar.gz": archived("gztar", {"cifar-10-batches-bin/test_batch.bin": b"\x01" + bytes(3072)}),
}


@pytest.fixture
def server(monkeypatch):
    """A mirror of FILES, with their digests in the catalogue; `cut` are names of files that break off."""
    cut, asked = set(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            asked.append(name)
            content = FILES.get(name)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write((content or b"")[: 10 if name in cut else None])

        def log_message(self, *_):
            pass

    for name, dataset in DATASETS.items():
        known = {url: FILES.get(url.rpartition("/")[2]) for url in dataset.files}
        digests = {url: hashlib.sha256(content or b"?").hexdigest() for url, content in known.items()}
        monkeypatch.setitem(DATASETS, name, Dataset(dataset.folder, digests))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        running.cut, running.asked, running.url = cut, asked, f"http://127.0.0.1:{running.server_port}/files/"
        yield running
        running.shutdown()


def run(server, folder, tasks):
    return main(["--data_dir", str(folder), "--tasks", tasks, "--base_url", server.url])


def test_what_is_fetched_is_what_training_reads(server, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "data"
    assert run(server, folder, "rte,MRPC,squad,CIFAR10") == 0
    said = capsys.readouterr().out
    assert f"RTE: in {folder}/RTE" in said
    assert f"export GLUE_DIR={folder} SQUAD_DIR={folder}/SQuAD IMAGE_DIR={folder}" in said
    encoder = TextEncoder(word_pieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one"], lower_case=True))
    monkeypatch.setenv("GLUE_DIR", str(folder))
    for name, part, count in (("rte", "train", 1), ("mrpc", "train", 1), ("mrpc", "dev", 1)):
        assert len(task_at(None, name).load(part, encoder, 16)) == count
    assert len(list((folder / "SQuAD").iterdir())) == 4
    assert (folder / "CIFAR10" / "test_batch.bin").stat().st_size == 3073
    assert sorted(one.name for one in folder.iterdir()) == ["CIFAR10", "MRPC", "RTE", "SQuAD"]
    before = list(server.asked)
    assert run(server, folder, "rte,MRPC,squad,CIFAR10") == 0
    assert server.asked == before, "what is there is not fetched again"


def failed(server, folder, tasks, words, capsys):
    assert run(server, folder, tasks) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not list(folder.iterdir()), "nothing is left behind"


def test_what_goes_wrong_is_one_sentence_and_leaves_nothing(server, tmp_path, monkeypatch, capsys):
    failed(server, tmp_path, "CoLA", "404", capsys)
    with monkeypatch.context() as forged:
        forged.setitem(FILES, "RTE.zip", archived("zip", {"RTE/train.tsv": b"forged"}))
        failed(server, tmp_path, "RTE", "another sha256 than the published file", capsys)
    server.cut.add("RTE.zip")
    failed(server, tmp_path, "RTE", "was not fetched", capsys)
    server.cut.clear()
    with monkeypatch.context() as full:
        full.setattr(fetch.shutil, "unpack_archive", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        failed(server, tmp_path, "RTE", "No space left on device", capsys)
    assert run(server, tmp_path, "RTE") == 0, "the next call succeeds"
    server.url = "http://127.0.0.1:9/"
    assert run(server, tmp_path, "WNLI") == 1
    assert "Try again later" in capsys.readouterr().err


def test_unknown_names_are_refused(tmp_path, capsys):
    for words in ("RTEE", "", "RTE,x"):
        with pytest.raises(SystemExit) as caught:
            main(["--data_dir", str(tmp_path), "--tasks", words])
        assert caught.value.code == 2
        assert "Choose from CoLA" in capsys.readouterr().err
