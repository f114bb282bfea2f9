"""Goldens: a file of short runs' losses, weights and traffic; two such files are compared to the last digit."""

import json
import math
import shutil
import subprocess
import sys

import pytest
from programs import ROOT

GOLDENS = ROOT / "scripts" / "goldens.py"


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


def differences(recorded, folder, change):
    """What `compare` prints of a file and a changed copy of it."""
    record = json.loads(recorded.read_text())
    change(record["runs"])
    (folder / "other.json").write_text(json.dumps(record))
    done = goldens("compare", recorded, folder / "other.json")
    assert done.returncode == 1
    return done.stdout


def test_a_run_has_its_losses_and_every_ranks_traffic(recorded):
    run = json.loads(recorded.read_text())["runs"]["task2b on 2"]
    assert len(run["losses"]) == 6
    gradients = [run["ledger"][rank]["gradients, all_reduce"] for rank in ("0", "1")]
    # Each rank sends 2(n-1)/n of the payload, which on two ranks is all of it.
    assert gradients[0] == gradients[1]
    assert gradients[0]["calls"] % 6 == 0
    assert gradients[0]["bytes_sent"] == gradients[0]["payload_bytes"] > 0


@pytest.mark.long
def test_a_file_is_the_same_as_itself(recorded):
    done = goldens("compare", recorded, recorded)
    assert (done.returncode, done.stdout) == (0, "the same to the last digit: 1 run of 6 iterations\n")


def test_the_last_digit_of_a_loss_is_a_difference(recorded, tmp_path):
    def nudge(runs):
        losses = runs["task2b on 2"]["losses"]
        losses[3] = math.nextafter(losses[3], 1)

    assert differences(recorded, tmp_path, nudge).startswith("runs / task2b on 2 / losses 4: 0.")


def test_other_weights_are_a_difference_where_losses_are_the_same(recorded, tmp_path):
    def swap(runs):
        run = runs["task2b on 2"]
        assert len(run["weights"]) == 64
        run["weights"] = run["weights"][::-1]

    assert differences(recorded, tmp_path, swap).startswith("runs / task2b on 2 / weights: ")


@pytest.mark.long
def test_the_weights_are_those_of_the_tree_that_was_run(recorded, tmp_path):
    """A gradient that is scaled leaves Adam's first losses as they are, to the last digit; the weights it moves."""
    tree = tmp_path / "tree"
    for folder in ("cos598d", "task2b"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    rung = tree / "cos598d" / "sync" / "all_reduce.py"
    source = rung.read_text()
    assert "/= self.comm.world_size" in source
    rung.write_text(source.replace("/= self.comm.world_size", "/= self.comm.world_size * 1.000001"))
    other = tmp_path / "other.json"
    done = goldens("record", other, "--tree", tree, "--ranks", "2", "--tasks", "task2b", "--syncs", "")
    assert done.returncode == 0, done.stderr
    done = goldens("compare", recorded, other)
    assert done.returncode == 1
    assert "runs / task2b on 2 / " in done.stdout


def test_a_byte_of_traffic_and_a_missing_run_are_differences(recorded, tmp_path):
    def one_more(runs):
        runs["task2b on 2"]["ledger"]["1"]["gradients, all_reduce"]["bytes_sent"] += 1

    assert "ledger / 1 / gradients, all_reduce / bytes_sent" in differences(recorded, tmp_path, one_more)
    said = differences(recorded, tmp_path, dict.clear)
    assert "runs / task2b on 2: {" in said
    assert ", nothing in " in said


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [("compare", "nowhere.json", "nowhere.json"), ("record", "x.json", "--syncs", "rung")]
)
def test_wrong_words_are_one_sentence(words):
    done = goldens(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
