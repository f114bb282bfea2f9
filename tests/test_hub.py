"""A model on the hub is downloaded once and found again without a network; an error in time says what is missing.

The hub is a small server on this host. Each download runs in a process of its own, as ranks do, because
huggingface_hub reads its settings when it is imported.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from programs import PATIENCE, ROOT, TINY_TRAINING, free_port, script
from safetensors.torch import save

from cos598d.commands.cli import main
from cos598d.models.build import build_model, find_model
from cos598d.models.find import _installed_minilm
from cos598d.models.hub import is_hub_name

COMMIT = "c0ffee" + "0" * 34
OLDER = "decade" + "1" * 34
REVISIONS = {"main": COMMIT, COMMIT: COMMIT, "v1": OLDER, "refs/pr/7": OLDER, OLDER: OLDER}
ASK = """
import sys, time
from cos598d.errors import UserError
from cos598d.models.hub import hub_folder
started = time.monotonic()
needed = [("config.json",), ("model.safetensors", "pytorch_model.bin"), ("vocab.txt",)]
try:
    print(hub_folder(sys.argv[1], needed, ["tokenizer_config.json"]))
except UserError as error:
    print(error)
print(time.monotonic() - started)
"""
MODELS = {
    "small-uncased": ["config.json", "model.safetensors", "pytorch_model.bin", "vocab.txt", "tf_model.h5", "README.md"],
    "owner/old": ["config.json", "pytorch_model.bin", "vocab.txt", "tokenizer_config.json"],
    "owner/bare": ["config.json", "vocab.txt"],
}


def content(model: str, file: str) -> bytes:
    return f"{file} of {model} ".encode() * (200_000 if file.startswith(("model", "pytorch")) else 1)


class FakeHub(BaseHTTPRequestHandler):
    """Answers as the hub does: a description to HEAD, the file to GET, its own header for each kind of refusal."""

    protocol_version = "HTTP/1.1"
    requests: Counter = Counter()
    cut_short = False

    def _find(self) -> bytes | None:
        model, _, rest = self.path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        revision = unquote(revision)
        self.requests[self.command, model, file] += 1
        refusal = None
        if model == "owner/gated":
            refusal = (403, "GatedRepo")
        elif model not in MODELS:
            refusal = (404, "RepoNotFound")
        elif revision not in REVISIONS:
            refusal = (404, "RevisionNotFound")
        elif file not in MODELS[model]:
            refusal = (404, "EntryNotFound")
        body = b"" if refusal else content(model, file)
        self.send_response(refusal[0] if refusal else 200)
        if refusal:
            self.send_header("X-Error-Code", refusal[1])
        self.send_header("X-Repo-Commit", REVISIONS.get(revision, COMMIT))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def do_HEAD(self):
        self._find()

    def do_GET(self):
        body = self._find()
        if type(self).cut_short and len(body) > 1000:
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        time.sleep(0.2 if len(body) > 1000 else 0)  # long enough that ranks meet here
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, Counter]]:
    """The address of a running hub and a count of its requests by (method, model, file)."""
    FakeHub.requests.clear()
    FakeHub.cut_short = False
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", FakeHub.requests
    server.shutdown()
    server.server_close()


def begin(model: str, endpoint: str, home: Path, program: str = ASK, **environment: str) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if not re.match("HF_|.*proxy", name, re.IGNORECASE)}
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, model],
        env={**kept, **given, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen) -> tuple[str, float]:
    """What the process printed, a folder or a sentence, and the seconds it took; it must print nothing else."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert errors == ""
    first, seconds = output.splitlines()
    return first, float(seconds)


def fetch(model: str, endpoint: str, home: Path, **environment: str) -> tuple[str, float]:
    return answer(begin(model, endpoint, home, **environment))


def nowhere() -> str:
    """An address on this host where nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


def assert_names_the_ways_out(sentence: str) -> None:
    assert [way for way in ("local folder", "minilm", "HF_HOME", "tiny") if way not in sentence] == [], sentence
    assert sentence.endswith(".")


def test_ranks_that_start_together_download_each_needed_file_once(hub, tmp_path):
    endpoint, requests = hub
    ranks = [begin("small-uncased", endpoint, tmp_path) for _ in range(3)]
    folders = {answer(rank)[0] for rank in ranks}
    assert len(folders) == 1
    folder = Path(folders.pop())
    wanted = ("config.json", "model.safetensors", "vocab.txt")
    assert sorted(file.name for file in folder.iterdir()) == sorted(wanted)
    for file in wanted:
        assert (folder / file).read_bytes() == content("small-uncased", file)
    downloads = {file: count for (method, _, file), count in requests.items() if method == "GET" and file}
    assert downloads == dict.fromkeys(wanted, 1)


def test_a_cache_with_the_needed_files_needs_no_network(hub, tmp_path):
    endpoint, requests = hub
    folder, _ = fetch("owner/old", endpoint, tmp_path)
    assert sorted(file.name for file in Path(folder).iterdir()) == sorted(MODELS["owner/old"])
    requests.clear()
    assert fetch("owner/old", endpoint, tmp_path)[0] == folder
    assert not requests
    for has_optional_file in (True, False):
        for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
            assert fetch("owner/old", nowhere(), tmp_path, **environment)[0] == folder
        if has_optional_file:
            (Path(folder) / "tokenizer_config.json").unlink()
    (Path(folder) / "vocab.txt").unlink()
    sentence, _ = fetch("owner/old", nowhere(), tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in sentence
    assert_names_the_ways_out(sentence)
    assert fetch("owner/old", endpoint, tmp_path)[0] == folder
    assert (Path(folder) / "vocab.txt").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("owner/absent", "owner/absent is neither a folder here nor a model"),
        ("owner/absent@v1", "neither a folder here nor a model"),
        ("owner/gated", "is gated"),
        ("owner/bare", "no model.safetensors or pytorch_model.bin"),
        ("owner/old@v9", "owner/old has no revision v9. Give a branch, a tag or a commit's full hash"),
    ],
)
def test_an_error_names_why_the_hub_has_no_such_model(hub, tmp_path, model, words):
    sentence, _ = fetch(model, hub[0], tmp_path)
    assert words in sentence
    assert model.split("@")[0] in sentence
    assert_names_the_ways_out(sentence)


@pytest.mark.parametrize("revision", ["v1", "refs/pr/7", OLDER])
def test_the_requested_revision_is_loaded_with_and_without_a_network(revision, hub, tmp_path):
    endpoint, requests = hub
    assert Path(fetch("owner/old", endpoint, tmp_path)[0]).name == COMMIT
    folder, _ = fetch(f"owner/old@{revision}", endpoint, tmp_path)
    assert Path(folder).name == OLDER
    assert sorted(file.name for file in Path(folder).iterdir()) == sorted(MODELS["owner/old"])
    requests.clear()
    assert fetch(f"owner/old@{revision}", nowhere(), tmp_path, HF_HUB_OFFLINE="1")[0] == folder
    assert Path(fetch("owner/old", nowhere(), tmp_path)[0]).name == COMMIT
    assert not requests


def test_a_hub_name_is_a_model_and_a_revision():
    for name in ("a", "a/b", "a@v1", "a/b@refs/pr/1", "a@" + "f" * 40):
        assert is_hub_name(name), name
    for name in ("a@", "@v1", "a@../x", "a@-x", "a@v1@v2", "a@v 1", "a@\x1b", "a@v1\n", "a/b/c", "../a"):
        assert not is_hub_name(name), name


@contextlib.contextmanager
def silent_server(accepts: bool) -> Iterator[str]:
    """An address that accepts connections and sends nothing, or that drops a connection's first packets."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(16 if accepts else 0)
        for _ in range(0 if accepts else 4):  # fill the queue: further packets are dropped, as by a firewall
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.long
def test_without_a_network_an_error_in_time_names_the_alternatives(hub, tmp_path):
    endpoint, _ = hub
    FakeHub.cut_short = True
    with silent_server(accepts=True) as silent, silent_server(accepts=False) as dropped:
        # All at once: most of the time is waiting.
        asked = {
            "Connection refused": begin("bert-large-cased", nowhere(), tmp_path),
            "timed out": begin("bert-large-cased", silent, tmp_path),
            "cannot be reached": begin("bert-large-cased", dropped, tmp_path),
            "Name or service": begin("bert-large-cased", "http://no-such-host.invalid", tmp_path),
            "broke off": begin("small-uncased", endpoint, tmp_path),
        }
        for words, process in asked.items():
            sentence, seconds = answer(process)
            assert words in sentence
            assert seconds < 60  # and not the minutes that the kernel tries to connect
            assert_names_the_ways_out(sentence)
    assert not [file for file in tmp_path.rglob("*") if "incomplete" in file.name]


@pytest.mark.long
def test_without_a_hub_the_course_s_command_trains_minilm(tmp_path, monkeypatch, capfd):
    if _installed_minilm() is None:
        pytest.skip("needs the package of MiniLM-L6, which make setup installs")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = "--model_type bert --model_name_or_path bert-base-cased --task_name RTE --do_train --max_seq_length 128"
    words += " --per_device_train_batch_size 1 --learning_rate 2e-5 --num_train_epochs 3 --overwrite_output_dir"
    assert main(["train", *words.split(), "--output_dir", str(tmp_path / "RTE"), "--dry_run"]) == 0
    assert "MiniLM-L6 (minilm), pretrained, 22.7 M parameters, in place of bert-base-cased" in capfd.readouterr().out
    assert main(["train", "--model_name_or_path", "bert-large-cased", "--dry_run"]) == 1


@pytest.fixture
def tiny(monkeypatch):
    """The source of the tiny model, which the hub offers as small-uncased."""
    source = find_model("tiny")
    files = {
        "config.json": json.dumps(source.config.to_dict()).encode(),
        "vocab.txt": "".join(f"{piece}\n" for piece in source.vocabulary).encode(),
        "pytorch_model.bin": b"",
        "model.safetensors": save(build_model(source, "sequence_classification", 2, None, 1).bert.state_dict()),
    }
    monkeypatch.setattr(sys.modules[__name__], "content", lambda model, file: files[file])
    return source


def test_a_hub_name_becomes_a_model(hub, tiny, tmp_path, monkeypatch):
    endpoint, _ = hub
    program = """
import sys
from cos598d.models.build import build_model, find_model
source = find_model(sys.argv[1], cache_dir=sys.argv[1] + "-cache")
build_model(source, "sequence_classification", 2, None, 1)
print(source.description, source.lower_case)
print(0)
"""
    monkeypatch.chdir(tmp_path)
    line, _ = answer(begin("small-uncased", endpoint, tmp_path / "home", program))
    assert line == f"small-uncased from the model hub, {tiny.description.split(', ')[-1]} True"
    assert (tmp_path / "small-uncased-cache").is_dir()
    assert not (tmp_path / "home" / "hub").exists()


def test_the_commit_of_a_model_from_the_hub_is_in_the_record(hub, tiny, start, tmp_path):
    endpoint, _ = hub
    name = "small-uncased@v1"
    words = [script("task1/run_glue.py"), *TINY_TRAINING, "--max_steps", "1", "--model_name_or_path", name]
    assert Path(fetch(name, endpoint, tmp_path / "home")[0]).name == OLDER
    where = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}  # only from the cache
    run = start("run", [*words, "--output_dir", tmp_path / "run"], where)
    assert run.wait() == 0, run.text
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["model_revisions"] == {"small-uncased": OLDER}
    assert f"model: {name} from the model hub" in run.text
