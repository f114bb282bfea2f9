"""Goldens: losses and traffic of short runs go to a file, and two such files are compared to the last digit."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

GOLDENS = Path(__file__).resolve().parents[1] / "tools" / "goldens.py"


def goldens(*words):
    return subprocess.run(
        [sys.executable, GOLDENS, *map(str, words)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    file = tmp_path_factory.mktemp("goldens") / "goldens.json"
    done = goldens("record", file, "--ranks", "2", "--tasks", "task2b", "--syncs", "")
    assert done.returncode == 0, done.stderr
    return file


def changed(recorded, path, change):
    record = copy.deepcopy(json.loads(recorded.read_text()))
    change(record)
    path.write_text(json.dumps(record))
    return path


def test_a_run_has_its_losses_and_every_ranks_traffic(recorded):
    run = json.loads(recorded.read_text())["runs"]["task2b on 2"]
    assert len(run["losses"]) == 6
    gradients = [run["ledger"][rank]["gradients, all_reduce"] for rank in ("0", "1")]
    # Each rank sends 2(n-1)/n of the payload, which on two ranks is all of it.
    assert gradients[0] == gradients[1]
    assert gradients[0]["calls"] % 6 == 0
    assert gradients[0]["bytes_sent"] == gradients[0]["payload_bytes"] > 0


def test_a_file_is_the_same_as_itself(recorded):
    done = goldens("compare", recorded, recorded)
    assert (done.returncode, done.stdout) == (0, "the same to the last digit: 1 run of 6 iterations\n")


def test_the_last_digit_of_a_loss_is_a_difference_and_is_named(recorded, tmp_path):
    def nudge(record):
        losses = record["runs"]["task2b on 2"]["losses"]
        losses[3] = math.nextafter(losses[3], 1)

    done = goldens("compare", recorded, changed(recorded, tmp_path / "other.json", nudge))
    assert done.returncode == 1
    assert done.stdout.startswith("runs / task2b on 2 / losses 4: 0.")


def test_a_byte_of_traffic_and_a_missing_run_are_differences(recorded, tmp_path):
    def one_more(record):
        record["runs"]["task2b on 2"]["ledger"]["1"]["gradients, all_reduce"]["bytes_sent"] += 1

    done = goldens("compare", recorded, changed(recorded, tmp_path / "byte.json", one_more))
    assert done.returncode == 1
    assert "ledger / 1 / gradients, all_reduce / bytes_sent" in done.stdout
    done = goldens(
        "compare", recorded, changed(recorded, tmp_path / "less.json", lambda record: record["runs"].clear())
    )
    assert done.returncode == 1
    assert "runs / task2b on 2: {" in done.stdout
    assert ", nothing in " in done.stdout


@pytest.mark.parametrize(
    "words", [("compare", "nowhere.json", "nowhere.json"), ("record", "x.json", "--syncs", "rung")]
)
def test_wrong_words_are_one_sentence(words):
    done = goldens(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
