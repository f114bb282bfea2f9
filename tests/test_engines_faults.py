"""What an engine cannot do is refused before the ranks meet, and the others name a lost rank and end."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from programs import TINY_TRAINING, children_of, is_alive
from test_engines import ENGINES, skip_unless_installed
from torch import nn

from cos598d.comm.communicator import Communicator
from cos598d.config import RunConfig
from cos598d.errors import UsageError, UserError
from cos598d.strategies.engines.horovod import _check_names
from cos598d.strategies.engines.torch_fsdp import check_parameters

PACKAGES = {"deepspeed": "deepspeed", "fabric": "lightning", "horovod": "horovod"}
FP16 = "--precision fp16 does not work with"
TAKE_CODECS = ", or choose one of flat, bucketed, ring, halving_doubling, tree, hierarchical, sparse_rows, diloco, ddp"
DP = "--sync dp uses one process with all of its GPUs, not 2 ranks."
REFUSED = {
    "deepspeed": [
        ({"zero_stage": 4}, "--zero_stage 4 is not valid. Give 0, 1, 2 or 3."),
        ({"precision": "fp16"}, f"{FP16} --sync deepspeed. Choose fp32 or bf16, or another --sync."),
        ({"compress": "fp16"}, f"--compress has no effect with --sync deepspeed. Leave it out{TAKE_CODECS}."),
    ],
    "fabric": [
        (
            {"fabric_strategy": "fsdp"},
            "--fabric_strategy fsdp. Did you mean 'fsdp2'? Choose one of ddp, fsdp2.",
        ),
        ({"reshard": "no"}, "--reshard has no effect with --fabric_strategy ddp. Leave it out, or choose fsdp2."),
        ({"precision": "fp16"}, f"{FP16} --sync fabric. Choose fp32 or bf16, or another --sync."),
    ],
    "horovod": [
        ({"compress": "bf16"}, "--compress bf16 does not work with --sync horovod. Choose fp16."),
        ({"zero_stage": 1}, "--zero_stage has no effect with --sync horovod. Leave it out."),
    ],
    "torch_fsdp": [
        ({"reduce_scatter": "mine"}, "unknown --reduce_scatter mine. Choose one of ours, torch."),
        ({"compress": "fp16"}, f"--compress has no effect with --sync torch_fsdp. Leave it out{TAKE_CODECS}."),
    ],
    "torch_zero1": [({"reshard": "no"}, "--reshard has no effect with --sync torch_zero1. Leave it out.")],
    "ddp": [
        ({"ddp_hook": "none"}, "unknown --ddp_hook none. Choose one of fp16, powersgd, post_localsgd."),
        ({"ddp_hook": "fp16", "compress": "fp16"}, "--compress and --ddp_hook fp16 exclude each other. Give one."),
        ({"sync_every": 2}, "--sync_every with --sync ddp needs --ddp_hook post_localsgd. Add it, or leave it out."),
    ],
    "dp": [({}, f"{DP} Give --world_size 1, or choose --sync ddp.")],
}


@pytest.mark.parametrize("sync", REFUSED)
def test_an_engine_refuses_flags_before_the_ranks_meet(sync):
    if sync in PACKAGES:
        skip_unless_installed(PACKAGES[sync])
    for options, sentence in REFUSED[sync]:
        with pytest.raises(UsageError) as refused:
            RunConfig(sync=sync, no_cuda=True, **options).check(2)
        assert sentence in str(refused.value)


def test_a_model_that_fsdp_cannot_cut_is_refused_by_name():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match="--sync torch_fsdp cuts parameters along their first dimension, and scale has"):
        check_parameters(model, "torch_fsdp")
    with pytest.raises(
        UserError, match="needs parameters of one dtype, and this model has float32 and float64. Choose"
    ):
        check_parameters(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()]), "torch_fsdp")


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("name", [*ENGINES, "ddp fp16", "ddp powersgd", "ddp post_localsgd"])
def test_the_others_name_a_killed_rank_and_end(start_ranks, tmp_path, name):
    sync, options, package = ENGINES.get(name) or ("ddp", {"ddp_hook": name.split()[1]}, "torch")
    skip_unless_installed(package)
    given = [word for option, value in options.items() for word in (f"--{option}", value)]
    words = [*TINY_TRAINING, "--sync", sync, *given, "--max_steps", 100000, "--output_dir", "out", "--no_cuda"]
    ranks = start_ranks("task2b/run_glue.py", 3, words, is_fresh=True)
    ranks[1].wait_for("iteration 3:", 180)
    started = [child for rank in ranks for child in children_of(rank.process.pid)]
    ranks[1].process.send_signal(signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait(10) == 1, rank.text
        assert "lost connection to rank 1" in rank.text, rank.text
        assert "Traceback" not in rank.text, rank.text
    assert not any(is_alive(child) for child in started)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["live"]  # the rows so far


def test_horovod_refuses_a_gpu_that_it_was_not_built_for(monkeypatch):
    skip_unless_installed("horovod")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    RunConfig(sync="horovod", no_cuda=True).check(2)
    with pytest.raises(UsageError, match=r"^Horovod is built without CUDA here. Add --no_cuda, or choose anoth"):
        RunConfig(sync="horovod").check(2)


@pytest.mark.parametrize(("address", "words"), [("127.0.1.1", "127.0.1.1"), ("", "no address")])
def test_horovod_refuses_hosts_that_it_would_not_find_by_name_on_every_rank(address, words):
    comm = Communicator(None, "gloo", torch.device("cpu"))
    comm.exchange = lambda mine: [["net 1", "10.0.0.1"], ["net 2", address]]
    with pytest.raises(UserError, match=rf"the name of rank 1's host resolves to {words}. Give it the host's own"):
        _check_names(comm)
    comm.exchange = lambda mine: [["net 1", "10.0.0.1"], ["net 2", "10.0.0.2"]]
    _check_names(comm)
    comm.exchange = lambda mine: [mine, mine]  # one host, whatever it is called
    _check_names(comm)


@pytest.mark.long
def test_the_summary_names_the_source_of_the_engine_s_bytes(tmp_path):
    for sync, package, told in (("torch_fsdp", "torch", "ledger"), ("horovod", "horovod", "counters")):
        skip_unless_installed(package)
        words = [*TINY_TRAINING, "--sync", sync, "--max_steps", 2, "--world_size", 2, "--output_dir", tmp_path / sync]
        subprocess.run(
            [sys.executable, "-m", "cos598d", "train", *map(str, words)], check=True, env=os.environ, timeout=120
        )
        summary = json.loads((tmp_path / sync / "summary.json").read_text())
        assert summary["bytes_from"] == told
