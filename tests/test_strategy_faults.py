"""What a strategy or an engine cannot do is one sentence on every rank, and a lost rank takes the others with it."""

import signal

import pytest
from programs import ROOT, TINY_TRAINING, children_of, free_port, is_alive, script, wait_until

SCRIPT = "task2b/run_glue.py"
# Read by Python before the program: packages that are not there, too old, or broken.
WITHOUT = """
import importlib.metadata, sys
real, said = importlib.metadata.version, {said}
def version(name):
    if name not in said:
        return real(name)
    if said[name] is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return said[name]
importlib.metadata.version = version
for name in said:
    sys.modules[name] = None
"""


def end_alike(ranks, code, sentence):
    """Every rank ends with this code, and this sentence is the last that it says."""
    for rank in ranks:
        assert rank.wait() == code, rank.text
        assert sentence in rank.text.strip().splitlines()[-1], rank.text
        assert "Traceback" not in rank.text, rank.text


@pytest.mark.parametrize("stage", ["zero1", "sparse_zero1", "zero2", "zero3", "shared_weights"])
def test_a_killed_rank_takes_the_others_with_it_by_name(start_ranks, tmp_path, stage):
    words = [*TINY_TRAINING, "--sync", stage, "--max_steps", 100000, "--output_dir", "out"]
    ranks = start_ranks(SCRIPT, 3, words)
    ranks[1].wait_for("iteration 3:")
    started = [child for rank in ranks for child in children_of(rank.process.pid)]
    ranks[1].process.send_signal(signal.SIGKILL)
    end_alike([ranks[0], ranks[2]], 1, "lost connection to rank 1")
    wait_until(lambda: not any(is_alive(child) for child in started))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["live"]  # the rows so far


# Fragments set out after every second step, and arrive after the second one from there.
DYING = """
import os, signal
from cos598d.sync.diloco import DiLoCo

class Dying(DiLoCo):
    def after_step(self):
        self.die_where({steps}, "before")
        super().after_step()
        self.die_where({steps}, "after")

    def die_where(self, steps, place):
        if (self.comm.rank, self._steps, place) == (1, steps, "{place}"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("steps", "place"),
    [(19, "before"), (20, "after"), (21, "before")],
    ids=["others have set out", "all have set out", "it should arrive"],
)
def test_a_rank_that_is_killed_while_a_fragment_travels_takes_the_others_with_it(start_ranks, tmp_path, steps, place):
    (tmp_path / "dying.py").write_text(DYING.format(steps=steps, place=place))
    words = [*TINY_TRAINING, "--sync", f"{tmp_path}/dying.py:Dying", "--sync_every", 2, "--fragments", 2]
    ranks = start_ranks(SCRIPT, 3, [*words, "--max_steps", 100000, "--output_dir", "out"])
    others = [ranks[0], ranks[2]]
    for rank in others:
        rank.wait_for("iteration 3:")
    started = [child for rank in others for child in children_of(rank.process.pid)]
    assert ranks[1].wait() == -signal.SIGKILL
    end_alike(others, 1, "lost connection to rank 1")
    wait_until(lambda: not any(is_alive(child) for child in started))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["live"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sync", "said", "code", "sentence"),
    [
        ("deepspeed", {"deepspeed": None}, 2, "--sync deepspeed needs DeepSpeed, which is not installed. Run `make en"),
        ("fabric", {"lightning": "2.4.9"}, 2, "--sync fabric needs Lightning Fabric 2.5 or newer, and 2.4.9 is inst"),
        ("horovod", {"horovod": None}, 2, "--sync horovod needs Horovod, which is not installed. Run `make engines`."),
        ("horovod", {"horovod": "0.28.1"}, 1, "Horovod is installed but cannot be imported (No module named"),
    ],
)
def test_an_engine_that_is_missing_too_old_or_broken_is_one_sentence_on_every_rank(
    start, tmp_path, sync, said, code, sentence
):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(said=said))
    words = [*TINY_TRAINING, "--sync", sync, "--max_steps", 2, "--output_dir", tmp_path / "out", "--no_cuda"]
    place = ["--master_port", free_port(), "--world_size", 2, "--local_rank"]
    places = [[*place, rank] for rank in range(2)] if sync == "deepspeed" else [[]]  # all look in the same way
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ranks = [start(f"rank{rank}", [script(SCRIPT), *words, *place], environ) for rank, place in enumerate(places)]
    end_alike(ranks, code, sentence)


def test_every_rank_says_it(start_ranks):
    words = [*TINY_TRAINING, "--sync", "zero3", "--compress", "bf16", "--max_steps", 2]
    end_alike(
        start_ranks(SCRIPT, 2, words),
        2,
        "--compress has no effect with --sync zero3. Leave it out, or choose one of flat, ",
    )


@pytest.mark.parametrize(
    "files",
    [
        (
            "latest",
            "global_step10/mp_rank_00_model_states.pt",
            "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ),
        (".metadata", "__0_0.distcp", "__1_0.distcp"),
    ],
    ids=["DeepSpeed's own", "torch's sharded"],
)
def test_a_checkpoint_in_an_engine_s_own_form_is_one_sentence_on_every_rank(start_ranks, tmp_path, files):
    for name in files:
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x80\x02}q\x00.")  # a pickle, which nobody opens
    words = [*TINY_TRAINING, "--sync", "zero3", "--model_name_or_path", tmp_path / "theirs"]
    end_alike(start_ranks(SCRIPT, 2, words), 1, "theirs has no model.safetensors or pytorch_model.bin. Give")
