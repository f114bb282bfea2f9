"""A model on the hub is downloaded once, found again without a network, and missed in one sentence in time.

The hub is a small server on this host. Each download runs in a process of its own, as ranks do, because
huggingface_hub reads its settings when it is imported.
"""

import contextlib
import hashlib
import json
import os
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
from programs import PATIENCE, TINY_TRAINING, script

ROOT = Path(__file__).parent.parent
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
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", FakeHub.requests
    server.shutdown()
    server.server_close()


def start(model: str, endpoint: str, home: Path, program: str = ASK, **environment: str) -> subprocess.Popen:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()
    }
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
    return answer(start(model, endpoint, home, **environment))


def nowhere() -> str:
    """An address on this host where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def assert_names_the_ways_out(sentence: str) -> None:
    for way in ("local folder", "minilm", "HF_HOME", "tiny"):
        assert way in sentence, sentence
    assert sentence.endswith(".")


def test_ranks_that_start_together_download_each_needed_file_once(hub, tmp_path):
    endpoint, requests = hub
    ranks = [start("small-uncased", endpoint, tmp_path) for _ in range(3)]
    folders = {answer(rank)[0] for rank in ranks}
    assert len(folders) == 1
    folder = Path(folders.pop())
    wanted = ("config.json", "model.safetensors", "vocab.txt")
    assert sorted(file.name for file in folder.iterdir()) == sorted(wanted)
    for file in wanted:
        assert (folder / file).read_bytes() == content("small-uncased", file)
    downloads = {
        file: count for (method, model, file), count in requests.items() if method == "GET" and model in MODELS
    }
    assert downloads == dict.fromkeys(wanted, 1)


def test_a_filled_cache_needs_no_network(hub, tmp_path):
    endpoint, requests = hub
    folder, _ = fetch("owner/old", endpoint, tmp_path)
    assert sorted(file.name for file in Path(folder).iterdir()) == sorted(MODELS["owner/old"])
    requests.clear()
    assert fetch("owner/old", endpoint, tmp_path)[0] == folder
    assert not requests
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert fetch("owner/old", nowhere(), tmp_path, **environment)[0] == folder


def test_a_cache_that_lacks_only_the_optional_file_serves_offline(hub, tmp_path):
    endpoint, _ = hub
    folder, _ = fetch("owner/old", endpoint, tmp_path)
    (Path(folder) / "tokenizer_config.json").unlink()
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert fetch("owner/old", nowhere(), tmp_path, **environment)[0] == folder
    (Path(folder) / "vocab.txt").unlink()
    sentence, _ = fetch("owner/old", nowhere(), tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in sentence
    assert_names_the_ways_out(sentence)
    assert fetch("owner/old", endpoint, tmp_path)[0] == folder
    assert (Path(folder) / "vocab.txt").exists()


def test_what_the_hub_refuses_is_said(hub, tmp_path):
    endpoint, _ = hub
    for model, words in (
        ("owner/absent", "neither a folder here nor a model"),
        ("owner/gated", "is gated"),
        ("owner/bare", "no model.safetensors or pytorch_model.bin"),
    ):
        sentence, _ = fetch(model, endpoint, tmp_path)
        assert words in sentence
        assert model in sentence
        assert_names_the_ways_out(sentence)


@pytest.mark.parametrize("revision", ["v1", "refs/pr/7", OLDER])
def test_a_revision_that_is_asked_for_is_the_one_that_comes_online_and_off(revision, hub, tmp_path):
    endpoint, requests = hub
    assert Path(fetch("owner/old", endpoint, tmp_path)[0]).name == COMMIT
    folder, _ = fetch(f"owner/old@{revision}", endpoint, tmp_path)
    assert Path(folder).name == OLDER
    assert sorted(file.name for file in Path(folder).iterdir()) == sorted(MODELS["owner/old"])
    requests.clear()
    assert fetch(f"owner/old@{revision}", nowhere(), tmp_path, HF_HUB_OFFLINE="1")[0] == folder
    assert Path(fetch("owner/old", nowhere(), tmp_path)[0]).name == COMMIT
    assert not requests


def test_a_revision_that_the_hub_has_not_is_said(hub, tmp_path):
    endpoint, _ = hub
    sentence, _ = fetch("owner/old@v9", endpoint, tmp_path)
    assert "the hub's model owner/old has no revision v9. Give a branch, a tag or a commit's full hash" in sentence
    assert_names_the_ways_out(sentence)
    sentence, _ = fetch("owner/absent@v1", endpoint, tmp_path)
    assert "neither a folder here nor a model" in sentence


def test_only_a_model_and_a_revision_make_a_name():
    from cos598d.models.hub import is_hub_name

    for name in ("a", "a/b", "a@v1", "a/b@refs/pr/1", "a@" + "f" * 40):
        assert is_hub_name(name), name
    for name in ("a@", "@v1", "a@../x", "a@-x", "a@v1@v2", "a@v 1", "a@\x1b", "a@v1\n", "a/b/c", "../a"):
        assert not is_hub_name(name), name


@contextlib.contextmanager
def silent_server(accepts: bool) -> Iterator[str]:
    """An address that takes connections and says nothing, or that answers not even a connection's first packet."""
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
def test_without_a_network_one_sentence_names_the_ways_out_in_time(hub, tmp_path):
    endpoint, _ = hub
    FakeHub.cut_short = True
    with silent_server(accepts=True) as silent, silent_server(accepts=False) as dropped:
        # All at once: most of the time is waiting.
        asked = {
            "Connection refused": start("bert-large-cased", nowhere(), tmp_path),
            "timed out": start("bert-large-cased", silent, tmp_path),
            "cannot be reached": start("bert-large-cased", dropped, tmp_path),
            "Name or service": start("bert-large-cased", "http://no-such-host.invalid", tmp_path),
            "broke off": start("small-uncased", endpoint, tmp_path),
        }
        for words, process in asked.items():
            sentence, seconds = answer(process)
            assert words in sentence
            assert seconds < 60  # and not the minutes that the kernel tries to connect
            assert_names_the_ways_out(sentence)
    assert not [file for file in tmp_path.rglob("*") if "incomplete" in file.name]


@pytest.mark.long
def test_without_a_hub_the_course_s_command_trains_minilm_and_says_so(tmp_path, monkeypatch, capfd):
    from cos598d.commands.cli import main
    from cos598d.models.find import _installed_minilm

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


def test_a_hub_name_becomes_a_model(hub, tmp_path, monkeypatch):
    endpoint, _ = hub
    from safetensors.torch import save

    from cos598d.models.build import build_model, find_model

    tiny = find_model("tiny")
    files = {
        "config.json": json.dumps(tiny.config.to_dict()).encode(),
        "vocab.txt": "".join(f"{piece}\n" for piece in tiny.vocabulary).encode(),
        "model.safetensors": save(build_model(tiny, "sequence_classification", 2, None, 1).bert.state_dict()),
    }
    monkeypatch.setattr(sys.modules[__name__], "content", lambda model, file: files[file])
    program = """
import sys
from cos598d.models.build import build_model, find_model
source = find_model(sys.argv[1], cache_dir=sys.argv[1] + "-cache")
build_model(source, "sequence_classification", 2, None, 1)
print(source.description, source.lower_case)
print(0)
"""
    monkeypatch.chdir(tmp_path)
    line, _ = answer(start("small-uncased", endpoint, tmp_path / "home", program))
    assert line == f"small-uncased from the model hub, {tiny.description.split(', ')[-1]} True"
    assert (tmp_path / "small-uncased-cache").is_dir()
    assert not (tmp_path / "home" / "hub").exists()


def test_the_commit_that_a_run_had_from_the_hub_stands_in_its_record(hub, start, tmp_path, monkeypatch):
    endpoint, _ = hub
    from safetensors.torch import save

    from cos598d.models.build import build_model, find_model

    tiny = find_model("tiny")
    files = {
        "config.json": json.dumps(tiny.config.to_dict()).encode(),
        "vocab.txt": "".join(f"{piece}\n" for piece in tiny.vocabulary).encode(),
        "pytorch_model.bin": b"",
        "model.safetensors": save(build_model(tiny, "sequence_classification", 2, None, 1).bert.state_dict()),
    }
    monkeypatch.setattr(sys.modules[__name__], "content", lambda model, file: files[file])
    name = "small-uncased@v1"
    words = [script("task1/run_glue.py"), *TINY_TRAINING, "--max_steps", "1", "--model_name_or_path", name]
    assert Path(fetch(name, endpoint, tmp_path / "home")[0]).name == OLDER
    where = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}  # from the cache alone
    run = start("run", [*words, "--output_dir", tmp_path / "run"], where)
    assert run.wait() == 0, run.text
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["model_revisions"] == {"small-uncased": OLDER}
    assert f"model: {name} from the model hub" in run.text
